"""The sidecars that end a conversion: `quarantine.jsonl`, and last the manifest."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds import storage
from bagel_wds.manifest import MANIFEST_NAME, Counts, ManifestShard
from bagel_wds.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .record import ConversionRecord
    from .shard_writer import ShardRecord


def write_quarantine(url: str, before: str | None, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write every row left out, in the order of the source: its place, the reason's code, and what was wrong.

    Args:
        url: of the file.
        before: a quarantine whose lines come first.
        entries: the rows.
    """
    with storage.open_write(url) as file:
        if before is not None:
            with storage.open_read(before) as lines:
                shutil.copyfileobj(lines, file)
        for entry in entries:
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))


def write_manifest(
    out: str,
    record: ConversionRecord,
    counts: Counts,
    before: Sequence[ManifestShard],
    added: Sequence[ShardRecord],
) -> None:
    """Write the manifest, which says that the dataset is whole.

    It holds no time, host or absolute path, and `wids` takes it as a shard list.

    Args:
        out: the folder.
        record: of the conversion.
        counts: of the whole dataset.
        before: the shards that the dataset had.
        added: those that come behind them.
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "wids_version": 1,
        "name": record.name,
        "kind": record.kind,
        "settings": dict(record.parts[0].settings),
        "parts": len(record.parts),
        "counts": {
            "read": counts.read,
            "written": counts.written,
            "quarantined": counts.quarantined,
            "reasons": dict(counts.reasons),
            "repaired": dict(counts.repaired),
        },
        "shardlist": [
            *(_entry(shard.url, shard) for shard in before),
            *(_entry(shard.name, shard) for shard in added),
        ],
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    storage.write_bytes(storage.join(out, MANIFEST_NAME), orjson.dumps(manifest, option=options))


def _entry(url: str, shard: ManifestShard | ShardRecord) -> dict[str, Any]:
    return {
        "url": url,
        "nsamples": shard.samples,
        "filesize": shard.bytes,
        "checksum": shard.checksum,
        "index": shard.index,
    }
