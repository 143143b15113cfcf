"""The stages of the pipeline: each a callable from iterator to iterator.

Any of them goes into a `wds.DataPipeline`, next to webdataset's own stages:

    wds.DataPipeline(
        wds.SimpleShardList(urls), wds.split_by_node, wds.split_by_worker, wds.tarfile_to_samples(), wds.shuffle(100),
        stages.decode(config, "t2i_pretrain"),
        stages.plan(config, "t2i_pretrain", tokenizer),
        stages.pack(config),
        stages.materialize(config, special_tokens),
    )

| stage | takes | gives |
| --- | --- | --- |
| shards | | `{"url", ...}` |
| read | `{"url"}` | samples: webdataset dicts of bytes |
| shuffle | samples | samples |
| decode | samples | `RawSample`: JSON parsed, images behind handles |
| plan | `RawSample` | `SamplePlan` |
| mix | | `Mixture` of plans |
| pack | plans | `Pack` |
| materialize | `Pack` | packed dict of tensors |
| collate | packed dicts | `SimpleCustomBatch` |

`shards` and `mix` make an iterator out of nothing and stand first; the others take the iterator before them. What a
stage needs is bound when it is made, so every stage pickles. Samples that cannot be used are counted in the `tally`
that the stages share; without one, they are only logged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bagel_wds import reader
from bagel_wds.batch import PackedBatch, SimpleCustomBatch
from bagel_wds.bookmark import StreamBook
from bagel_wds.call_order import CallOrderBook
from bagel_wds.config import Fidelity, Packing, Transport
from bagel_wds.decode import decode_sample
from bagel_wds.drops import Drops
from bagel_wds.errors import BadSample, ConfigError, Reason, ShardError, Tally
from bagel_wds.groups import groups_of, planner_of
from bagel_wds.materialize import PackMemory, materialize_pack
from bagel_wds.mixture import MixGroup, Mixture
from bagel_wds.packer import BestFitPacker, GreedyPacker, UpstreamPacker
from bagel_wds.planners import settle
from bagel_wds.planners.build import check_views
from bagel_wds.prefetch import Lane, ReadAhead
from bagel_wds.records import Cursor, Lost, Pack, RawSample, SamplePlan, SampleRef
from bagel_wds.redact import redact
from bagel_wds.rng import Draws, KeyedDraws
from bagel_wds.shards import Shard, ShardSlice, list_shards, walk_epochs
from bagel_wds.shuffle import Room, reference
from bagel_wds.shuffle import shuffle as shuffle_samples
from bagel_wds.state import StreamState
from bagel_wds.wiring import (
    dropout_rates,
    layout_rules,
    pack_limits,
    plan_tools,
    text_encoder,
    view_loader,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.bookmark import GroupBook
    from bagel_wds.config import BagelDatasetConfig, GroupConfig
    from bagel_wds.layout import LayoutRules
    from bagel_wds.materialize import ViewLoader
    from bagel_wds.packer import PackLimits
    from bagel_wds.planners import DropoutRates, Planner, PlanTools
    from bagel_wds.shards import RawRows
    from bagel_wds.storage import StorageOptions
    from bagel_wds.tokens import TextEncoder

    Sample = dict[str, Any]


def shards(
    source: str | Sequence[str] | Sequence[Shard],
    *,
    group: str = "",
    seed: int = 0,
    num_streams: int = 1,
    stream: int = 0,
    epochs: int | None = None,
    book: GroupBook | None = None,
    options: StorageOptions | None = None,
) -> Callable[[], Iterator[Sample]]:
    """A stream's share of the shards, epoch after epoch, in an order that `seed` gives.

    Args:
        source: a manifest, folder, tar, brace pattern, or list of these; or shards already listed.
        group: name of the group; part of the address of the order.
        seed: orders the shards.
        num_streams: how many streams share an epoch.
        stream: which of them this is.
        epochs: how many; None goes on for ever.
        book: its cursor says where to start.
        options: how a store is reached that shards are listed in.
    """
    if isinstance(source, str):
        source = list_shards(source, options=options)
    listed = [
        shard
        for part in source
        for shard in ([part] if isinstance(part, Shard) else list_shards(part, options=options))
    ]
    walk = partial(
        walk_epochs, listed, seed=seed, group=group, num_streams=num_streams, stream=stream, epochs=epochs
    )
    return partial(_shards, walk, book)


def _shards(walk: Callable[..., Iterator[ShardSlice]], book: GroupBook | None) -> Iterator[Sample]:
    for piece in walk(start=book.cursor) if book else walk():
        yield {"url": piece.url, "__slice__": piece}


def read(
    config: BagelDatasetConfig | None = None,
    *,
    book: GroupBook | None = None,
    ahead: ReadAhead | None = None,
) -> Callable[[Iterable[Sample]], Iterator[Sample]]:
    """Tars to samples, in order, each with its place (`__ref__`); takes webdataset's `{"url"}` too.

    Args:
        config: holds `read_ahead_bytes`, `storage`, and the bounds of the shuffle; None reads nothing ahead.
        book: its cursor says where to start, and is kept on the sample that comes next. Where there is an index, what
            its shuffle has room for at the start comes as references, so that the first sample need not wait for them.
            With its `skips`, a shard that cannot be read is left; without, that is an error.
        ahead: what this and other streams of the group may together hold of shards that are not local; None is its own.
    """
    return partial(_read, config=config, book=book, ahead=ahead)


def _read(
    urls: Iterable[Sample],
    *,
    config: BagelDatasetConfig | None,
    book: GroupBook | None,
    ahead: ReadAhead | None,
) -> Iterator[Sample]:
    read_ahead = config.read_ahead_bytes if config else 0
    options = config.storage_options if config else None
    with Lane(ahead or ReadAhead(read_ahead), options) as lane:
        yield from _read_in(lane if read_ahead else None, urls, config, book)


def _read_in(
    lane: Lane | None,
    urls: Iterable[Sample],
    config: BagelDatasetConfig | None,
    book: GroupBook | None,
) -> Iterator[Sample]:
    start = book.cursor if book else Cursor()
    read_ahead = config.read_ahead_bytes if config else 0
    options = config.storage_options if config else None
    room = book.buffer.room(config.shuffle_samples, config.shuffle_bytes) if config and book else Room()
    barren = 0
    for piece, next_url in _with_next(_slices(urls)):
        going_on = start.offset >= 0 and (piece.epoch, piece.piece) == (start.epoch, start.piece)
        at = (start.ordinal, start.offset) if going_on else None
        found = False
        behind = (
            Cursor(piece.epoch, piece.piece, *at) if at else Cursor(piece.epoch, piece.piece, piece.start)
        )
        try:
            for sample, *following in _walk(piece, at, room, read_ahead, next_url, options, lane):
                behind = Cursor(piece.epoch, piece.piece, *following)
                if book:
                    book.cursor = behind
                found = True
                yield sample
        except ShardError as error:
            if book is None or book.skips is None or piece.stop is None:
                raise
            book.cursor = Cursor(piece.epoch, piece.piece + 1)
            lost = Lost(piece.shard, behind.offset, piece.stop - behind.ordinal, piece.epoch)
            book.skips.skip(piece.url, [lost], error)
            continue
        barren = 0 if found else barren + 1
        if barren > MAX_EMPTY_SHARDS:
            raise ShardError(f"{piece.url}: no sample in it, nor in the {MAX_EMPTY_SHARDS} shards before")


def _slices(urls: Iterable[Sample]) -> Iterator[ShardSlice]:
    for number, item in enumerate(urls):
        yield item.get("__slice__") or ShardSlice(number, item["url"], "", None, epoch=0)


def _with_next(slices: Iterator[ShardSlice]) -> Iterator[tuple[ShardSlice, str | None]]:
    """Each slice with the shard that will be read from its start after it."""
    piece = next(slices, None)
    while piece is not None:
        following = next(slices, None)
        yield piece, following.url if following and following.start == 0 and not following.raw else None
        piece = following


def _walk(
    piece: ShardSlice,
    at: tuple[int, int] | None,
    room: Room,
    read_ahead: int,
    next_url: str | None,
    options: StorageOptions | None,
    lane: Lane | None,
) -> Iterator[tuple[Sample, int, int]]:
    """(sample, ordinal and offset behind it) of a slice: references alone while there is room for them, then whole samples."""
    if piece.raw is not None:
        yield from _walk_raw(piece, piece.raw, at)
        return
    bounds = (piece.start, piece.stop, piece.step)
    if room and piece.index_url is not None:
        for ordinal, offset, length in reader.walk_places(piece.index_url, *bounds, at and at[0], options):
            if not room.take(length):
                break
            ref = SampleRef(piece.shard, offset, length, piece.epoch)
            at = (ordinal + 1, offset + length)
            yield reference(ref), *at
        else:
            return
    for sample in reader.walk_slice(
        piece.url, *bounds, piece.index_url, at, read_ahead, next_url, options, lane
    ):
        offset, length = sample["__ref__"]
        ref = SampleRef(piece.shard, offset, length, piece.epoch)
        ordinal = sample.pop("__ordinal__")
        yield placed(sample, ref, piece.dataset), ordinal + 1, offset + length


def _walk_raw(
    piece: ShardSlice, rows: RawRows, at: tuple[int, int] | None
) -> Iterator[tuple[Sample, int, int]]:
    """The same of raw rows."""
    start = piece.start if at is None else at[0] + (piece.start - at[0]) % piece.step
    for sample in rows.walk(start, piece.stop, piece.step):
        row, length = sample["__ref__"]
        ref = SampleRef(piece.shard, row, length, piece.epoch)
        ordinal = sample.pop("__ordinal__")
        yield placed(sample, ref, piece.dataset), ordinal + 1, row + 1


MAX_EMPTY_SHARDS = 10_000
"""So many shards in a row without a sample end a run, rather than leave it searching for ever."""


def placed(sample: Sample, ref: SampleRef, dataset: str) -> Sample:
    """A sample that knows where it lies, for the stages after it."""
    sample["__ref__"] = ref
    sample["__data_indexes__"] = (ref.shard, ref.offset)
    sample["__dataset__"] = dataset
    return sample


def shuffle(
    config: BagelDatasetConfig,
    group: str = "",
    *,
    seed: int = 0,
    stream: int = 0,
    book: GroupBook | None = None,
) -> Callable[[Iterable[Sample]], Iterator[Sample]]:
    """A buffer shuffle bounded by `shuffle_samples` and `shuffle_bytes`; a book's buffer is the one it works in."""
    return partial(
        shuffle_samples,
        draws=KeyedDraws(seed, "shuffle", group, stream),
        max_samples=config.shuffle_samples,
        max_bytes=config.shuffle_bytes,
        buffer=book.buffer if book else None,
    )


def decode(
    config: BagelDatasetConfig, group: str, *, tally: Tally | None = None, group_size: int | None = None
) -> Callable[[Iterable[Sample]], Iterator[RawSample]]:
    """Parse the JSON, wrap the images; no pixel is decoded."""
    return partial(
        _decode, upright=config.fidelity != Fidelity.UPSTREAM, group=group, tally=tally, group_size=group_size
    )


def _decode(
    samples: Iterable[Sample], *, upright: bool, group: str, tally: Tally | None, group_size: int | None
) -> Iterator[RawSample]:
    tally = Tally() if tally is None else tally
    drops = Drops(group, tally, group_size)
    for sample in samples:
        tally[group, "read"] += 1
        try:
            decoded = decode_sample(sample, upright=upright)
        except BadSample as bad:
            drops.drop(_place(sample["__key__"], sample.get("__url__", "")), bad, sample.get("__ref__"))
            continue
        drops.good()
        yield decoded


def _place(key: str, url: str) -> str:
    return f"{key} in {redact(url)}"


def plan(
    config: BagelDatasetConfig,
    group: str,
    tokenizer: PreTrainedTokenizerBase | TextEncoder,
    *,
    seed: int = 0,
    draws: Draws | None = None,
    tally: Tally | None = None,
    group_size: int | None = None,
) -> Callable[[Iterable[RawSample]], Iterator[SamplePlan]]:
    """Apply the group's recipe: what the sample will be in a pack, and its exact length.

    Args:
        config: its mixture must hold the group.
        group: name of the group.
        tokenizer: one that `add_special_tokens` has seen, or an encoder for it that stages have in common.
        seed: of the draws, which are addressed by (seed, group, dataset, epoch, key).
        draws: shared draws in call order; needed, and used, only with `fidelity="upstream"`.
        tally: where drops are counted.
        group_size: samples in the group, to notice an epoch without a usable one.

    Raises:
        ConfigError: if the mixture has no such group, or the encoder treats control tokens otherwise than the settings say.
    """
    settings = _group_of(groups_of(config), group)
    encoder = text_encoder(config, tokenizer)
    return partial(
        _plan,
        planner=planner_of(settings),
        tools=plan_tools(config, group, settings, encoder),
        rates=dropout_rates(config),
        limits=pack_limits(config),
        seed=seed,
        draws=_shared_draws(config, draws),
        tally=tally,
        group_size=group_size,
    )


def _group_of(groups: Mapping[str, GroupConfig], name: str) -> GroupConfig:
    if name not in groups:
        raise ConfigError(f"the mixture has no group {name!r}; it has {', '.join(groups)}")
    return groups[name]


def _shared_draws(config: BagelDatasetConfig, draws: Draws | None) -> Draws | None:
    """The draws in call order that upstream's stages share; None under the corrected fidelity, which needs none."""
    if config.fidelity != Fidelity.UPSTREAM:
        return None
    if draws is None:
        raise ConfigError(
            'fidelity="upstream" draws in call order: pass one CallOrderDraws(seed) to all its stages'
        )
    return draws


def _plan(
    samples: Iterable[RawSample],
    *,
    planner: Planner,
    tools: PlanTools,
    rates: DropoutRates,
    limits: PackLimits,
    seed: int,
    draws: Draws | None,
    tally: Tally | None,
    group_size: int | None,
) -> Iterator[SamplePlan]:
    drops = Drops(tools.group, tally, group_size)
    for sample in samples:
        try:
            if draws is None:
                planned = _plan_one(sample, planner, tools, rates, limits, seed)
            else:
                # BAGEL: settles a plan when it is packed.
                planned = planner(sample, tools, draws)
                check_views(planned)
        except BadSample as bad:
            drops.drop(_place(sample.key, sample.url), bad, sample.ref)
            continue
        drops.good()
        yield planned


def _plan_one(
    sample: RawSample, planner: Planner, tools: PlanTools, rates: DropoutRates, limits: PackLimits, seed: int
) -> SamplePlan:
    epoch = sample.ref.epoch if sample.ref else 0
    draws = KeyedDraws(seed, tools.group, sample.dataset, epoch, sample.key)
    planned = settle(planner(sample, tools, draws), rates, draws)
    if planned.length == 0:
        raise BadSample(Reason.NO_TOKENS, "conditioning dropout left nothing")
    if planned.length > limits.longest_sample:
        raise BadSample(Reason.OVER_LENGTH, f"{planned.length} tokens; the most is {limits.longest_sample}")
    return planned


def mix(
    plans: Mapping[str, Iterable[SamplePlan]],
    config: BagelDatasetConfig,
    *,
    seed: int = 0,
    stream: int = 0,
    draws: Draws | None = None,
) -> Callable[[], Mixture]:
    """Mix groups by their weights; `pack` asks the mixture for the mandatory ones.

    Args:
        plans: for each group of the mixture file, in its order, a pipeline that ends in `plan`.
        config: holds weights and mandatory groups.
        seed: of the draws.
        stream: number of the stream that draws.
        draws: shared draws in call order, only with `fidelity="upstream"`.
    """
    groups = groups_of(config)
    members = {name: (pipeline, _group_of(groups, name)) for name, pipeline in plans.items()}
    return partial(_mix, members, _shared_draws(config, draws) or KeyedDraws(seed, "mix", stream))


def _mix(members: Mapping[str, tuple[Iterable[SamplePlan], GroupConfig]], draws: Draws) -> Mixture:
    return Mixture(
        [
            MixGroup(name, iter(plans), group.weight, group.is_mandatory)
            for name, (plans, group) in members.items()
        ],
        draws,
    )


def pack(
    config: BagelDatasetConfig,
    *,
    stream: int = 0,
    draws: Draws | None = None,
    tally: Tally | None = None,
    book: StreamBook | CallOrderBook | None = None,
) -> Callable[[Iterable[SamplePlan]], Iterator[Pack]]:
    """Choose plans that fill a token budget; takes a `Mixture`, or any iterator of plans as one group.

    Args:
        config: holds the budgets and the rule.
        stream: number of this producer, `worker_id` in `batch_data_indexes`.
        draws: shared draws in call order, only with `fidelity="upstream"`.
        tally: where lost and over-long samples of `fidelity="upstream"` are counted.
        book: what to start with; each pack then carries the state after it. With `fidelity="upstream"`, a `CallOrderBook`.
    """
    return partial(
        _pack,
        limits=pack_limits(config),
        best_fit=config.packing == Packing.BEST_FIT,
        rates=dropout_rates(config),
        draws=_shared_draws(config, draws),
        stream=stream,
        tally=tally,
        book=book,
    )


def _pack(
    plans: Iterable[SamplePlan],
    *,
    limits: PackLimits,
    best_fit: bool,
    rates: DropoutRates,
    draws: Draws | None,
    stream: int,
    tally: Tally | None,
    book: StreamBook | CallOrderBook | None,
) -> Iterator[Pack]:
    supply = (
        plans
        if isinstance(plans, Mixture)
        else Mixture([MixGroup("plans", iter(plans))], draws or KeyedDraws(0))
    )
    counted = Tally() if tally is None else tally
    if draws is not None:
        upstream = UpstreamPacker(
            limits,
            settle=lambda planned: settle(planned, rates, draws, upstream=True),
            gone=lambda planned, why: _count_gone(counted, planned, why),
        )
        at = book if isinstance(book, CallOrderBook) else None
        if at:
            at.restore(upstream)
        while (packed := upstream.next_pack(supply)) is not None:
            yield Pack(packed, stream, at and at.snapshot(upstream))
        return
    if not isinstance(book, StreamBook):
        packer = BestFitPacker(limits) if best_fit else GreedyPacker(limits)
        while (packed := packer.next_pack(supply)) is not None:
            yield Pack(packed, stream)
        return
    yield from _pack_with_states(supply, limits, book, best_fit=best_fit, stream=stream)


def _pack_with_states(
    supply: Mixture, limits: PackLimits, book: StreamBook, *, best_fit: bool, stream: int
) -> Iterator[Pack]:
    packer = BestFitPacker(limits, book.put_away, book.taken_out) if best_fit else GreedyPacker(limits)
    try:
        book.restore(packer, supply)
        while (packed := packer.next_pack(supply)) is not None:
            whole = book.whole(packed)
            if whole:
                yield Pack(whole, stream, book.snapshot(packer, supply))
    finally:
        if isinstance(packer, BestFitPacker):
            for planned in packer.waiting:
                book.taken_out(planned)


def _count_gone(tally: Tally, planned: SamplePlan, why: str) -> None:
    tally.drop(planned.group, Reason.LOST if why == "lost" else Reason.OVER_LENGTH)


def materialize(
    config: BagelDatasetConfig,
    special_tokens: Mapping[str, object],
    *,
    tally: Tally | None = None,
    batches: int = 0,
    memory: PackMemory | None = None,
) -> Callable[[Iterable[Pack]], Iterator[PackedBatch]]:
    """Decode the images of a pack and lay it out as upstream's dict of tensors, with the pack's state as `.state`.

    With `transport="uint8"` the dict has one more key, `pixels`, in place of `padded_images` and `packed_vit_tokens`;
    `collate` and `SimpleCustomBatch` know what to do with it.

    Args:
        config: holds transforms and tables.
        special_tokens: the ids that `add_special_tokens` returned.
        tally: where packed samples, and those that cannot be decoded, are counted.
        batches: how many batches the stream has given before.
        memory: for pixels; the streams of a process can have it in common, as they take turns.
    """
    return partial(
        _materialize,
        rules=layout_rules(config, special_tokens),
        load=view_loader(config),
        transport=Transport(config.transport),
        tally=tally,
        batches=batches,
        memory=memory,
    )


def _materialize(
    packs: Iterable[Pack],
    *,
    rules: LayoutRules,
    load: ViewLoader,
    transport: Transport,
    tally: Tally | None,
    batches: int,
    memory: PackMemory | None,
) -> Iterator[PackedBatch]:
    tally = Tally() if tally is None else tally
    drops: dict[str, Drops] = {}
    memory = PackMemory.here() if memory is None else memory

    def on_bad(planned: SamplePlan, bad: BadSample) -> None:
        drops.setdefault(planned.group, Drops(planned.group, tally)).drop(
            _place(planned.key, planned.url), bad, planned.ref
        )

    for pack_ in packs:
        content = materialize_pack(pack_, rules, load, on_bad, transport, memory)
        if content is None:
            continue
        batches += 1
        for origin in content["batch_data_indexes"]:
            tally[origin["dataset_name"], "packed"] += 1
            if origin["dataset_name"] in drops:
                drops[origin["dataset_name"]].good()
        state = pack_.state
        if isinstance(state, StreamState):
            state = replace(state, batches=batches, counts=tally.as_dict())
        batch = PackedBatch(content, state if isinstance(state, StreamState) else None)
        # While this stream waits for its next turn, only whoever took the batch shall keep its memory.
        content.clear()
        yield batch


def collate() -> Callable[[Iterable[dict[str, Any]]], Iterator[SimpleCustomBatch]]:
    """Wrap each packed dict, as `collate_wrapper()` does inside a DataLoader."""
    return _collate


def _collate(batches: Iterable[dict[str, Any]]) -> Iterator[SimpleCustomBatch]:
    for batch in batches:
        yield SimpleCustomBatch([batch])
