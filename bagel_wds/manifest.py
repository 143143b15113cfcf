"""The manifest of a converted dataset: which shards it has, how much they hold, and what was left out.

`manifest.json` is also a valid shard list for `wids`, and a plain `wids` shard list is read here as a manifest that
tells less. It is written last, so a dataset that has one is whole. URLs in it are relative to its own folder, so the
folder can be moved or copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.storage import StorageOptions

T = TypeVar("T")

MANIFEST_NAME = "manifest.json"
QUARANTINE_NAME = "quarantine.jsonl"
RECORD_NAME = "conversion.json"
"""What a conversion was made from; it is there before the first shard."""
INFO_NAME = "dataset_info.yaml"
"""What the conversion of a mixture writes: where the manifest of each of its datasets lies."""
INDEX_SUFFIX = ".idx.parquet"
"""`NAME.tar` has its index in `NAME.idx.parquet`."""


@dataclass(frozen=True, slots=True)
class ManifestShard:
    """One shard, as the manifest names it.

    Attributes:
        url: of the tar, relative to the manifest's folder.
        samples: how many it holds.
        bytes: size of the tar.
        checksum: of the tar, `xxh3_128:` and 32 hexadecimal digits.
        index: URL of the index, relative likewise.
    """

    url: str
    samples: int
    bytes: int | None = None
    checksum: str | None = None
    index: str | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows of the source were read, and what became of them: `read == written + quarantined`.

    Attributes:
        read: rows of the source.
        written: samples in the shards.
        reasons: rows left out, by reason.
        repaired: samples whose row was mended, by what was.
    """

    read: int = 0
    written: int = 0
    reasons: Mapping[str, int] = field(default_factory=dict)
    repaired: Mapping[str, int] = field(default_factory=dict)

    @property
    def quarantined(self) -> int:
        """Rows left out."""
        return sum(self.reasons.values())


@dataclass(frozen=True, slots=True)
class Manifest:
    """A converted dataset.

    Attributes:
        shards: in the order of the source.
        name: of the dataset.
        kind: of its samples: t2i, vlm or edit; None in a shard list that is not ours.
        settings: those that decide what the shards hold.
        parts: runs of a conversion that made it: the first, and those that added to it.
        counts: of the conversion; None in a shard list that is not ours.
    """

    shards: tuple[ManifestShard, ...]
    name: str = ""
    kind: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts: Counts | None = None
    parts: int = 1


def read_manifest(url: str, options: StorageOptions | None = None) -> Manifest:
    """Read a `manifest.json`, or another shard list in the form of `wids`.

    Args:
        url: of it.
        options: how its store is reached.

    Raises:
        ConfigError: if it cannot be read, is no manifest, or was written by a later version.
    """
    try:
        value = orjson.loads(storage.read_bytes(url, options))
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"{url}: the manifest cannot be read: {error}") from error
    if not isinstance(value, dict) or "shardlist" not in value:
        raise ConfigError(f"{url}: no manifest: a JSON object with a `shardlist` belongs there")
    version = value.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ConfigError(
            f"{url}: the manifest has format_version {version!r} and this version of bagel-wds reads "
            f"{FORMAT_VERSION}; use the bagel-wds that wrote it, or convert again"
        )
    return Manifest(
        shards=tuple(
            _plain_shard(entry) or _shard(entry, f"{url}: shard {number}")
            for number, entry in enumerate(_required(value, "shardlist", list, url))
        ),
        name=_optional(value, "name", str, url) or "",
        kind=_optional(value, "kind", str, url),
        settings=_optional(value, "settings", dict, url) or {},
        counts=_counts(value["counts"], f"{url}: counts") if "counts" in value else None,
        parts=_optional(value, "parts", int, url) or 1,
    )


def _plain_shard(entry: object) -> ManifestShard | None:
    """A shard with all that a conversion writes of it, in a third of the time: there may be 100 000; else None."""
    if type(entry) is not dict:
        return None
    url, samples, num_bytes = entry.get("url"), entry.get("nsamples"), entry.get("filesize")
    checksum, index = entry.get("checksum"), entry.get("index")
    if (
        type(url) is str
        and type(samples) is int
        and type(num_bytes) is int
        and type(checksum) is str
        and type(index) is str
        and min(samples, num_bytes) >= 0
    ):
        return ManifestShard(url, samples, num_bytes, checksum, index)
    return None


def _shard(entry: object, where: str) -> ManifestShard:
    return ManifestShard(
        url=_required(entry, "url", str, where),
        samples=_required(entry, "nsamples", int, where),
        bytes=_optional(entry, "filesize", int, where),
        checksum=_optional(entry, "checksum", str, where),
        index=_optional(entry, "index", str, where),
    )


def _counts(entry: object, where: str) -> Counts:
    reasons = _required(entry, "reasons", dict, where)
    repaired = _optional(entry, "repaired", dict, where) or {}
    return Counts(
        read=_required(entry, "read", int, where),
        written=_required(entry, "written", int, where),
        reasons={reason: _required(reasons, reason, int, f"{where}: reasons") for reason in reasons},
        repaired={what: _required(repaired, what, int, f"{where}: repaired") for what in repaired},
    )


def _required(entry: object, key: str, kind: type[T], where: str) -> T:
    value = _optional(entry, key, kind, where)
    if value is None:
        raise ConfigError(f"{where}: {key!r} is missing")
    return value


def _optional(entry: object, key: str, kind: type[T], where: str) -> T | None:
    """A value of an object, of this type and, if a number, not negative; None where it is absent or null."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {type(entry).__name__}, not an object")
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{where}: {key}={value!r} is {type(value).__name__}, not {kind.__name__}")
    if isinstance(value, int) and value < 0:
        raise ConfigError(f"{where}: {key}={value} is negative")
    return value
