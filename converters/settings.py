"""What decides how the shards of a conversion are cut."""

from __future__ import annotations

from dataclasses import dataclass

from bagel_wds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ShardSettings:
    """Limits of a shard; a shard is closed before the sample that would exceed one.

    Attributes:
        shard_bytes: of the tar. A single sample that is larger gets a shard of its own.
        shard_samples: samples in it.
    """

    shard_bytes: int = 256 << 20
    shard_samples: int = 10_000

    def __post_init__(self) -> None:
        for name in ("shard_bytes", "shard_samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def slice_bytes(self) -> int:
        """Parquet bytes in a slice of work: somewhat less than a shard, so that most slices fill just one."""
        return max(1, self.shard_bytes * 7 // 8)

    @property
    def slice_rows(self) -> int:
        """JSON lines in a slice of work."""
        return self.shard_samples
