"""Which shards there are, and which stream reads which samples of them in which epoch.

An epoch is the group's samples in the order of that epoch's permutation of its shards. It is cut into G runs whose
lengths differ by at most one, inside a shard where it must be; stream s walks run (s + epoch) mod G, so that streams
take turns at runs that are empty. Over all streams the runs of an epoch hold each sample once.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from braceexpand import braceexpand

from bagel_wds import storage
from bagel_wds.ahead import look_ahead
from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.manifest import INDEX_SUFFIX, MANIFEST_NAME, RECORD_NAME, read_manifest
from bagel_wds.records import Cursor
from bagel_wds.redact import redact
from bagel_wds.rng import KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bagel_wds.storage import StorageOptions


class RawRows(Protocol):
    """Rows of a raw file that stand in the place of a tar; see `bagel_wds.raw`."""

    @property
    def identity(self) -> list[Any]:
        """What tells them from others, as plain JSON values."""

    def walk(self, start: int, stop: int | None, step: int) -> Iterator[dict[str, Any]]:
        """Their samples `start`, `start + step`, ... before `stop`, counted from 0; None is the end."""

    def fetch(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Samples by the rows that their references name."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar, or the rows of a raw file that stand in its place.

    Attributes:
        url: of the tar; of rows, the file and their place in it.
        dataset: name of the dataset that it belongs to.
        samples: how many it holds; None where no sidecar tells.
        index_url: of its index; None where there is none.
        bytes: size of the tar; None where no manifest tells.
        raw: the rows; None of a tar.
    """

    url: str
    dataset: str = ""
    samples: int | None = None
    index_url: str | None = None
    bytes: int | None = None
    raw: RawRows | None = None

    def __repr__(self) -> str:
        return f"Shard({redact(self.url)!r}, dataset={self.dataset!r}, samples={self.samples})"


@dataclass(frozen=True, slots=True)
class ShardSlice:
    """Samples `start`, `start + step`, ... before `stop` of one shard, in one epoch.

    Attributes:
        shard: number of the shard in the group's table.
        url, dataset, index_url, raw: of the shard.
        epoch: the group's epoch, from 0.
        piece: number of the slice in the stream's share of the epoch.
        start, stop, step: ordinals of samples; `stop` None is the shard's end.
    """

    shard: int
    url: str
    dataset: str
    index_url: str | None
    epoch: int
    piece: int = 0
    start: int = 0
    stop: int | None = None
    step: int = 1
    raw: RawRows | None = None

    def __repr__(self) -> str:
        place = f"epoch={self.epoch}, piece={self.piece}, [{self.start}:{self.stop}:{self.step}]"
        return f"ShardSlice({self.shard}, {redact(self.url)!r}, {place})"


def list_shards(
    spec: str | Sequence[str], dataset: str = "", *, look: bool = True, options: StorageOptions | None = None
) -> list[Shard]:
    """The shards that a `shards:` entry names.

    Args:
        spec: a manifest, a folder, a tar, a brace pattern such as `t2i-{000000..000127}.tar`, or a list of these; paths or
            URLs.
        dataset: name given to them.
        look: whether the shards that a manifest names are there; False believes it.
        options: how a store is reached.

    Raises:
        ConfigError: for a pattern that matches nothing, a file that is not there, also one that a manifest names, and a
            store that cannot be asked.
    """
    if not isinstance(spec, str):
        return [shard for part in spec for shard in list_shards(part, dataset, look=look, options=options)]
    if not spec:
        raise ConfigError("a shard entry is empty; a path, a pattern or a manifest belongs there")
    try:
        return _list(spec, dataset, options, look=look)
    except OSError as error:
        raise ConfigError(f"the shards cannot be listed: {error}") from error


def _list(spec: str, dataset: str, options: StorageOptions | None, *, look: bool) -> list[Shard]:
    if storage.base_name(spec).endswith(".json"):
        listed = _from_manifest(spec, dataset, options)
        if look:
            # Of a bucket two are looked for: a manifest is written last, and each rank would ask for every one.
            _all_there(spec, listed if storage.is_local(spec) else [*listed[:1], *listed[1:][-1:]], options)
        return listed
    if storage.is_folder(spec, options) or _is_web_folder(spec, options):
        manifest = storage.join(spec, MANIFEST_NAME)
        if storage.is_file(manifest, options):
            return _list(manifest, dataset, options, look=look)
        if storage.is_file(storage.join(spec, RECORD_NAME), options):
            raise ConfigError(
                f"{spec}: a conversion that was not finished: it has {RECORD_NAME} and no {MANIFEST_NAME}; run the same "
                "`bagel-wds convert` again"
            )
        # macOS leaves a `._NAME.tar` beside each NAME.tar that it copies.
        tars = [
            name
            for name in storage.list_files(spec, options)
            if name.endswith(".tar") and not any(part.startswith(".") for part in name.split("/"))
        ]
        if not tars:
            raise ConfigError(f"{spec}: no {MANIFEST_NAME} and no .tar file in this folder")
        return _with_sidecars([storage.join(spec, name) for name in tars], dataset, options)
    try:
        urls = list(braceexpand(spec))
    except ValueError as error:
        raise ConfigError(f"{spec}: the braces of this pattern do not match") from error
    _all_there(spec, [Shard(url) for url in urls], options)
    return _with_sidecars(urls, dataset, options)


def _is_web_folder(url: str, options: StorageOptions | None) -> bool:
    """Whether a web URL is that of a folder, as far as can be known: it has a manifest, or a slash at its end.

    Raises:
        ConfigError: for a folder without a manifest: a web server is not listed.
    """
    if storage.scheme_of(url) not in storage.WEB or "?" in url or "{" in url or url.endswith(".tar"):
        return False
    if storage.is_file(storage.join(url, MANIFEST_NAME), options):
        return True
    if not url.endswith("/"):
        return False
    raise ConfigError(
        f"{url}: a web server is not listed, and has no {MANIFEST_NAME} here; name the manifest, or the shards by a brace "
        "pattern"
    )


def _all_there(spec: str, shards: list[Shard], options: StorageOptions | None) -> list[Shard]:
    """The same shards, once each is known to be a file."""
    found = storage.which_are_files((shard.url for shard in shards), options)
    missing = [shard.url for shard in shards if shard.url not in found]
    if missing:
        raise ConfigError(
            f"{spec}: {len(missing)} of {len(shards)} shards are not there, the first is {missing[0]}"
            + ("; `*` is not expanded, name the folder or a brace pattern" if "*" in str(spec) else "")
        )
    return shards


def _from_manifest(url: str, dataset: str, options: StorageOptions | None) -> list[Shard]:
    under = _under(storage.parent(url))
    return [
        Shard(
            url=under(shard.url),
            dataset=dataset,
            samples=shard.samples,
            index_url=under(shard.index) if shard.index else None,
            bytes=shard.bytes,
        )
        for shard in read_manifest(url, options).shards
    ]


_ORDINARY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
"""Names that mean the same in a path and in any URL."""


def _under(folder: str) -> Callable[[str], str]:
    """What joins names to a folder, quickly where there is nothing to it: a manifest may have 100 000 of them."""
    front = folder.rstrip("/") + "/"
    is_plain = storage.join(folder, "x") == front + "x"
    return lambda name: front + name if is_plain and _ORDINARY.fullmatch(name) else storage.join(folder, name)


def _with_sidecars(urls: list[str], dataset: str, options: StorageOptions | None) -> list[Shard]:
    """Tars named one by one: their manifest, if it lies beside them, or their index, tells how much they hold."""
    known: dict[str, Shard] = {}
    # Nothing beside a URL that is signed for one object can be asked for.
    folders = dict.fromkeys(storage.parent(url) for url in urls if not storage.is_signed(url))
    manifests = [storage.join(folder, MANIFEST_NAME) for folder in folders]
    there = storage.which_are_files(manifests, options)
    for manifest in manifests:
        if manifest in there:
            known |= {_plain(shard.url): shard for shard in _from_manifest(manifest, dataset, options)}
    listed = [(url, known.get(_plain(url))) for url in urls]
    alone = [url for url, shard in listed if not shard and not storage.is_signed(url)]
    indexed = _read_indexes(alone, dataset, options)
    return [
        replace(shard, url=url) if shard else indexed.get(url, Shard(url, dataset)) for url, shard in listed
    ]


def _plain(url: str) -> str:
    """One spelling of a path: `a.tar` and `./a.tar` are the same shard."""
    return url if "://" in url else os.path.normpath(url)


def _read_indexes(urls: list[str], dataset: str, options: StorageOptions | None) -> dict[str, Shard]:
    """Those of the tars that have an index."""
    indexes = {url: _index_of(url) for url in urls}
    there = storage.which_are_files(indexes.values(), options)
    found = [(url, index) for url, index in indexes.items() if index in there]
    # Of a bucket many at a time: each takes as long as its answers.
    counts = look_ahead(lambda pair: _count_rows(pair[1], options), found, storage.AT_A_TIME)
    return {
        url: Shard(url, dataset, samples, index) for (url, index), samples in zip(found, counts, strict=True)
    }


def _index_of(url: str) -> str:
    if storage.scheme_of(url) not in storage.WEB:
        return url.removesuffix(".tar") + INDEX_SUFFIX
    return storage.join(storage.parent(url), storage.base_name(url).removesuffix(".tar") + INDEX_SUFFIX)


def _count_rows(index_url: str, options: StorageOptions | None) -> int:
    try:
        with storage.open_read(index_url, options) as file:
            return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowException) as error:
        raise ShardError(f"{index_url}: the index cannot be read: {error}") from error


def count_samples(shards: Sequence[Shard]) -> int | None:
    """How many samples the shards hold; None where one of them does not tell."""
    counts = [shard.samples for shard in shards]
    return None if None in counts else sum(samples for samples in counts if samples is not None)


def walk_epochs(
    shards: Sequence[Shard],
    *,
    seed: int,
    group: str,
    num_streams: int = 1,
    stream: int = 0,
    start: Cursor = Cursor(),  # noqa: B008 - a frozen value
    epochs: int | None = None,
) -> Iterator[ShardSlice]:
    """A stream's slices, epoch after epoch.

    Where no sidecar tells how many samples there are, an epoch is divided by whole shards, or, with fewer shards than
    streams, by every G-th sample of each.

    Args:
        shards: the group's table.
        seed: orders the shards.
        group: name of the group.
        num_streams: G.
        stream: 0..G-1.
        start: the first slice is the one that it names.
        epochs: how many epochs there are; None goes on for ever.

    Raises:
        ConfigError: if the shards hold no sample.
    """
    if count_samples(shards) == 0:
        raise ConfigError(
            f"group {group!r} has no sample in its {len(shards)} shards; point its `shards:` at some that have"
        )
    draws = KeyedDraws(seed, "shards", group)
    for epoch in count(start.epoch) if epochs is None else range(start.epoch, epochs):
        order = draws.permutation(len(shards), f"epoch:{epoch}")
        share = _share(
            [shards[number].samples for number in order], order, num_streams, (stream + epoch) % num_streams
        )
        for piece, (number, bounds) in enumerate(share):
            shard = shards[number]
            if epoch > start.epoch or piece >= start.piece:
                yield ShardSlice(
                    number, shard.url, shard.dataset, shard.index_url, epoch, piece, *bounds, shard.raw
                )


def _share(
    samples: Sequence[int | None], order: Sequence[int], parts: int, part: int
) -> Iterator[tuple[int, tuple[int, int | None, int]]]:
    """(shard, (start, stop, step)) of one of `parts` equal shares of the shards in this order."""
    known = [held for held in samples if held is not None]
    if len(known) == len(samples):
        total = sum(known)
        low, high = total * part // parts, total * (part + 1) // parts
        for number, held, end in zip(order, known, accumulate(known), strict=True):
            start, stop = max(low - (end - held), 0), min(high - (end - held), held)
            if start < stop:
                yield number, (start, stop, 1)
    elif len(samples) >= parts:
        yield from ((number, (0, None, 1)) for i, number in enumerate(order) if i % parts == part)
    else:
        yield from ((number, ((part - i) % parts, None, parts)) for i, number in enumerate(order))
