"""The sidecars that end a conversion: `quarantine.jsonl`, and last the manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds import storage
from bagel_wds.manifest import MANIFEST_NAME, QUARANTINE_NAME, Counts
from bagel_wds.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from bagel_wds.sources import RejectedRow, Source

    from .settings import ShardSettings
    from .shard_writer import ShardRecord

_MAX_DETAIL = 300


def write_quarantine(out: str, rows: Iterable[RejectedRow]) -> None:
    """Write every row left out, in the order of the source: its place, the reason's code, and what was wrong."""
    with storage.open_write(storage.join(out, QUARANTINE_NAME)) as file:
        for row in rows:
            entry = {
                **row.place.as_json(),
                "reason": row.reason,
                # A detail quotes the source, which may hold what is no UTF-8.
                "detail": row.detail[:_MAX_DETAIL].encode("utf-8", "backslashreplace").decode(),
            }
            file.write(orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE))


def write_manifest(
    out: str, source: Source, settings: ShardSettings, counts: Counts, shards: Sequence[ShardRecord]
) -> str:
    """Write the manifest, which says that the dataset is whole; gives its URL.

    It holds no time, host or absolute path, and `wids` takes it as a shard list.
    """
    url = storage.join(out, MANIFEST_NAME)
    manifest = {
        "format_version": FORMAT_VERSION,
        "wids_version": 1,
        "name": source.name,
        "kind": source.kind,
        "settings": _settings(source, settings),
        "counts": {
            "read": counts.read,
            "written": counts.written,
            "quarantined": counts.quarantined,
            "reasons": dict(counts.reasons),
        },
        "shardlist": [
            {
                "url": shard.name,
                "nsamples": shard.samples,
                "filesize": shard.bytes,
                "checksum": shard.checksum,
                "index": shard.index,
            }
            for shard in shards
        ],
    }
    storage.write_bytes(url, orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    return url


def _settings(source: Source, settings: ShardSettings) -> dict[str, Any]:
    choices: dict[str, Any] = {
        "shard_bytes": settings.shard_bytes,
        "shard_samples": settings.shard_samples,
        "max_units": source.max_units,
    }
    if source.kind == "vlm":
        choices |= {"shuffle_lines": source.shuffle_lines, "shuffle_seed": source.shuffle_seed}
    return choices
