"""What decides the bytes of a conversion, beside its source."""

from __future__ import annotations

from dataclasses import dataclass

from bagel_wds.errors import ConfigError

from .downscale import Encoder, check_max_side


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Limits of a shard, and what is done to the rows; a shard is closed before the sample that would exceed one.

    Attributes:
        shard_bytes: of the tar. A single sample that is larger gets a shard of its own.
        shard_samples: samples in it.
        shuffle: seed of a shuffle of all rows over all shards; None keeps the order of the source.
        max_side: larger images are scaled down to so many pixels on their longer side; None keeps every byte.
        encoder: of images that are scaled down.
    """

    shard_bytes: int = 256 << 20
    shard_samples: int = 10_000
    shuffle: int | None = None
    max_side: int | None = None
    encoder: Encoder = Encoder.PNG

    def __post_init__(self) -> None:
        for name in ("shard_bytes", "shard_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_side is not None:
            check_max_side(self.max_side)

    @property
    def slice_bytes(self) -> int:
        """Bytes in a slice of work: somewhat less than a shard, so that most slices fill just one."""
        return max(1, self.shard_bytes * 7 // 8)

    @property
    def slice_rows(self) -> int:
        """JSON lines in a slice of work."""
        return self.shard_samples
