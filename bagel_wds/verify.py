"""A converted dataset, checked again: what its manifest promises against what its files hold.

    manifest ──▶ each shard: size, checksum, tar, samples, index ──▶ all together: keys, counts, quarantine, strays

Whatever is wrong is a finding, not an exception, so that one bad shard does not hide the next.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from bagel_wds import storage
from bagel_wds.config import load_mapping
from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.findings import Finding, FindingLog, Findings, ShardFindings, What
from bagel_wds.manifest import INFO_NAME, MANIFEST_NAME, QUARANTINE_NAME, RECORD_NAME, read_manifest
from bagel_wds.reader import walk_members
from bagel_wds.shard_check import verify_shard
from bagel_wds.shard_samples import group_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from bagel_wds.manifest import Counts, Manifest, ManifestShard
    from bagel_wds.shard_samples import TarSample

    RunShards = Callable[
        [Callable[[ManifestShard], ShardFindings], Sequence[ManifestShard]], Iterable[ShardFindings]
    ]
    """Does some work for each shard, here or elsewhere; the results come in any order."""

__all__ = ["Finding", "Findings", "ShardFindings", "What", "find_manifests", "verify_shard", "verify_shards"]

_UNFINISHED = re.compile(r"(.*/)?\.[^/]*\.partial-[0-9a-f]+|\.conversion/.*")
"""Files of a conversion that has not ended: a shard under its hidden name, and the notes that it keeps."""


def find_manifests(path: str) -> list[str]:
    """The manifests of the datasets that lie at a path.

    Args:
        path: a manifest or its folder, a dataset info or its folder.

    Raises:
        ConfigError: if there is none, or a dataset of the info has none.
    """
    if storage.is_folder(path):
        for name in (MANIFEST_NAME, INFO_NAME):
            if storage.exists(storage.join(path, name)):
                return find_manifests(storage.join(path, name))
        unfinished = storage.exists(storage.join(path, RECORD_NAME))
        raise ConfigError(
            f"{path}: no {MANIFEST_NAME} and no {INFO_NAME} in this folder; "
            + (
                "its conversion was not finished, run it again"
                if unfinished
                else "give the folder of a finished conversion"
            )
        )
    if path.endswith(".tar"):
        raise ConfigError(
            f"{path}: one tar; give the folder of its dataset, whose manifest tells what it should hold"
        )
    mapping = load_mapping(path)
    if "shardlist" in mapping:
        return [path]
    return [_manifest_of(path, group, name, entry) for group, name, entry in _entries(path, mapping)]


def _entries(path: str, info: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for group, entries in info.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {group} is {type(entries).__name__}, not a mapping of datasets")
        yield from ((group, name, entry) for name, entry in entries.items())


def _manifest_of(path: str, group: str, name: str, entry: object) -> str:
    spec = entry.get("shards") if isinstance(entry, dict) else None
    if isinstance(spec, str):
        spec = storage.find_near(spec, storage.parent(path))
    if isinstance(spec, str) and storage.is_folder(spec):
        spec = storage.join(spec, MANIFEST_NAME)
    if not isinstance(spec, str) or not spec.endswith(".json"):
        raise ConfigError(
            f"{path}: {group}.{name} names no manifest, so nothing tells what its shards should hold; verify what "
            "`bagel-wds convert` wrote"
        )
    return spec


def _tell_nobody(done: ShardFindings) -> None:
    """Report nothing."""


def verify_shards(
    place: str, report: Callable[[ShardFindings], None] = _tell_nobody, run: RunShards = map
) -> Findings:
    """Read a dataset again, and compare everything that its sidecars say with what is there.

    Args:
        place: its manifest, or the folder of that.
        report: told of each shard that was read.
        run: how the shards are gone through; `map` reads one after another in this process.

    Raises:
        ConfigError: if the manifest cannot be read, or is a shard list that no conversion wrote.
    """
    url = storage.join(place, MANIFEST_NAME) if storage.is_folder(place) else place
    manifest = read_manifest(url)
    if manifest.kind is None or manifest.counts is None:
        raise ConfigError(
            f"{url}: a shard list without kind and counts: it was not written by `bagel-wds convert`, and there is nothing "
            "to compare the shards with"
        )
    folder = storage.parent(url)
    results = []
    for done in run(partial(verify_shard, folder=folder), manifest.shards):
        results.append(done)
        report(done)
    order = {shard.url: number for number, shard in enumerate(manifest.shards)}
    results.sort(key=lambda done: order[done.shard])
    return Findings(
        manifest=url,
        faults=(
            *(finding for done in results for finding in done.findings),
            *_check_kinds(results, manifest.kind),
            *_check_keys(results, folder),
            *_check_counts(url, manifest, manifest.counts),
            *_check_quarantine(folder, manifest.counts),
        ),
        notes=tuple(_look_around(folder, manifest)),
        num_shards=len(manifest.shards),
        num_samples=sum(done.num_samples for done in results),
        num_bytes=sum(done.num_bytes for done in results),
    )


def _check_kinds(results: Sequence[ShardFindings], kind: str) -> Iterator[Finding]:
    for done in results:
        if others := done.kinds - {kind}:
            yield Finding(
                done.shard, What.SAMPLE, f"samples of kind {', '.join(sorted(others))} in a dataset of {kind}"
            )


def _check_keys(results: Sequence[ShardFindings], folder: str) -> Iterator[Finding]:
    """Keys that come twice. Digests find them; shards that may hold one are read again, to see the keys themselves."""
    digests = [np.frombuffer(done.key_digests, np.uint64) for done in results]
    values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *digests]), return_counts=True)
    suspects = set(values[counts > 1].tolist())
    first: dict[str, str] = {}
    for done, own in zip(results, digests, strict=True):
        if suspects.isdisjoint(own.tolist()):
            continue
        log = FindingLog(done.shard)
        for sample in _walk_readable(storage.join(folder, done.shard)):
            if sample.key_digest not in suspects:
                continue
            if earlier := first.get(sample.key):
                log.add(What.KEYS, f"key {sample.key!r} is that of an earlier sample in {earlier}")
            first.setdefault(sample.key, done.shard)
        yield from log.findings()


def _walk_readable(url: str) -> Iterator[TarSample]:
    """The samples of a shard, as far as it can be read: what is wrong with it has been put down."""
    with suppress(ShardError, OSError), storage.open_read(url) as file:
        yield from group_samples(walk_members(file, url))


def _check_counts(url: str, manifest: Manifest, counts: Counts) -> Iterator[Finding]:
    told = orjson.loads(storage.read_bytes(url))["counts"].get("quarantined")
    listed = sum(shard.samples for shard in manifest.shards)
    sums = {
        f"quarantined is {told}, its reasons add up to {counts.quarantined}": told == counts.quarantined,
        f"read is {counts.read}, written {counts.written} + quarantined {counts.quarantined} is not": (
            counts.read == counts.written + counts.quarantined
        ),
        f"written is {counts.written}, the shards add up to {listed} samples": counts.written == listed,
    }
    name = url.rpartition("/")[2]
    yield from (Finding(name, What.COUNTS, detail) for detail, holds in sums.items() if not holds)


def _check_quarantine(folder: str, counts: Counts) -> Iterator[Finding]:
    finding = partial(Finding, QUARANTINE_NAME, What.QUARANTINE)
    reasons: Counter[str] = Counter()
    try:
        with storage.open_read(storage.join(folder, QUARANTINE_NAME)) as file:
            for line in file:
                reasons[str(orjson.loads(line)["reason"])] += 1
    except OSError as error:
        yield finding(f"{type(error).__name__}: {error}")
        return
    except (ValueError, TypeError, KeyError) as error:
        yield finding(f"line {reasons.total() + 1} is no row left out: {error!r}")
        return
    for reason in sorted(reasons.keys() | counts.reasons.keys()):
        listed, told = reasons[reason], counts.reasons.get(reason, 0)
        if listed != told:
            yield finding(f"{listed} rows left out for {reason}, the manifest says {told}")


def _look_around(folder: str, manifest: Manifest) -> Iterator[Finding]:
    named = {shard.url for shard in manifest.shards}
    files = storage.list_files(folder)
    for name in files:
        if name.endswith(".tar") and "/" not in name and not name.startswith(".") and name not in named:
            yield Finding(name, What.STRAY, "the manifest does not name this tar, so nobody reads it")
    unfinished = [name for name in files if _UNFINISHED.fullmatch(name)]
    if unfinished:
        yield Finding(
            unfinished[0],
            What.UNFINISHED,
            f"{len(unfinished)} files of a conversion that did not end, or is at work",
        )
