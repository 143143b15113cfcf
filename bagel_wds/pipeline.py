"""The pipeline of one stream: the stages in their order, as a `wds.DataPipeline`, from wherever the stream is.

shards -> read -> shuffle -> decode -> plan                              one a group
-> mix -> pack -> materialize one a stream
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import webdataset as wds
import xxhash

from bagel_wds import stages, storage
from bagel_wds.ahead import look_ahead
from bagel_wds.batch import PackedBatch
from bagel_wds.bookmark import GroupBook, StreamBook
from bagel_wds.call_order import CallOrderBook
from bagel_wds.config import Fidelity, OnShardError, Packing
from bagel_wds.decode import decode_sample
from bagel_wds.errors import BadSample, ConfigError, ShardError, Tally
from bagel_wds.groups import groups_of, transforms_of
from bagel_wds.layout import KEY_ORDER, lay_out
from bagel_wds.prefetch import ReadAhead
from bagel_wds.reader import RUNS_AT_ONCE, fetch
from bagel_wds.records import Kind, Lost, SamplePlan, Segment
from bagel_wds.shards import Shard, count_samples
from bagel_wds.shuffle import Memory, ShuffleBuffer, Unshuffled, reference
from bagel_wds.skips import SkipLimit, Skips
from bagel_wds.state import GroupState, StreamState, unpack_refs
from bagel_wds.wiring import dropout_rates, layout_rules, pack_limits, text_encoder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.config import BagelDatasetConfig, GroupConfig
    from bagel_wds.materialize import PackMemory
    from bagel_wds.records import Picture, SampleRef
    from bagel_wds.rng import CallOrderDraws, Draws
    from bagel_wds.storage import StorageOptions
    from bagel_wds.tokens import TextEncoder
    from bagel_wds.upstream.sources import PlannedRows


STRETCHES = 8
"""Of a shuffle whose shards are not local, fetched together where nothing but places is there."""


@dataclass(frozen=True)
class Run:
    """What all streams of a run have in common.

    Attributes:
        config: resolved.
        shards: of each group, in the order of the mixture.
        tokenizer: one that `add_special_tokens` has seen.
        special_tokens: the ids that it returned.
        num_streams: G.
        draw_seed: of every draw.
        order_seed: of the order of shards.
        pass_epochs: of a finite pass; None is a run without end.
        repeat: a stream whose pass is over goes on with the next epoch.
        classes: of each group that is not read from shards, the class that reads it.
        encoder: what the streams of one worker share for texts.
        memory: likewise, for samples that wait.
        ahead: likewise, what they hold of each group's shards before it is wanted.
    """

    config: BagelDatasetConfig
    shards: Mapping[str, tuple[Shard, ...]]
    tokenizer: PreTrainedTokenizerBase
    special_tokens: Mapping[str, object]
    num_streams: int
    draw_seed: int
    order_seed: int
    pass_epochs: int | None = None
    repeat: bool = False
    classes: Mapping[str, str] = field(default_factory=dict)
    encoder: TextEncoder = field(init=False, repr=False, compare=False)
    memory: Memory = field(init=False, repr=False, compare=False)
    ahead: Mapping[str, ReadAhead] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder", text_encoder(self.config, self.tokenizer))
        object.__setattr__(self, "memory", Memory(self.config.memory_bytes))
        ahead = {name: ReadAhead(self.config.read_ahead_bytes) for name in self.shards}
        object.__setattr__(self, "ahead", ahead)

    @property
    def epochs(self) -> int | None:
        """How many epochs a stream reads; None reads for ever."""
        return None if self.repeat else self.pass_epochs


def stream_pipeline(
    run: Run,
    start: StreamState,
    tally: Tally,
    ready: Mapping[str, Iterable[SamplePlan]] | None = None,
    memory: PackMemory | None = None,
) -> wds.DataPipeline:
    """The packed batches of one stream, from a state on; each carries the state after it.

    Args:
        run: what the streams have in common.
        start: where the stream is.
        tally: of samples read, packed and dropped.
        ready: settled plans of the groups of the mixture that are not read from shards; a state knows nothing of them.
        memory: for pixels, in common with the other streams of the process.
    """
    config, seed, stream = run.config, run.draw_seed, start.stream
    books = {name: _open_book(run, name, start.groups.get(name, GroupState()), tally) for name in run.shards}
    groups = {name: _group_pipeline(run, name, stream, tally, book=books[name]) for name in run.shards}
    ready = ready or {}
    skips = {name: book.skips for name, book in books.items()}
    book = StreamBook(
        start,
        books,
        partial(_replan, run, tally, skips),
        partial(_fetch_media, run, skips),
        run.memory,
        unknown=frozenset(ready),
    )
    return wds.DataPipeline(
        stages.mix(_in_order(run, {**groups, **ready}), config, seed=seed, stream=stream),
        stages.pack(config, stream=stream, tally=tally, book=book),
        stages.materialize(config, run.special_tokens, tally=tally, batches=start.batches, memory=memory),
    )


def _in_order(run: Run, groups: Mapping[str, Iterable[SamplePlan]]) -> dict[str, Iterable[SamplePlan]]:
    """The groups in the order of the mixture."""
    return {name: groups[name] for name in groups_of(run.config)}


def upstream_pipeline(
    run: Run,
    start: StreamState,
    worker: int,
    num_workers: int,
    draws: CallOrderDraws,
    tally: Tally,
    rows: Mapping[str, PlannedRows] | None = None,
    ready: Mapping[str, Iterable[SamplePlan]] | None = None,
) -> wds.DataPipeline:
    """The endless batches of `fidelity="upstream"`, from a state on; each carries the state after it.

    Draws are in call order; samples in shards come in the order of the shards.

    Args:
        run: with `fidelity="upstream"`.
        start: where the stream is, whose share of the shards is read.
        worker: number that `batch_data_indexes` gives.
        num_workers: that share the rows; 0 is the process itself.
        draws: in call order.
        tally: of samples read, packed and dropped.
        rows: plans of the groups of the mixture in raw files, in upstream's order.
        ready: plans of those that a user's classes read.
    """
    rows, states = rows or {}, start.groups
    books = {name: GroupBook(states.get(name, GroupState()).cursor, Unshuffled()) for name in run.shards}
    groups: dict[str, Iterable[SamplePlan]] = {
        name: _group_pipeline(run, name, start.stream, tally, book=books[name], draws=draws)
        for name in run.shards
    }
    book = CallOrderBook(start, num_workers, draws, books, rows, partial(_fetch_one, run))
    return wds.DataPipeline(
        stages.mix(_in_order(run, {**groups, **rows, **(ready or {})}), run.config, draws=draws),
        stages.pack(run.config, stream=worker, draws=draws, tally=tally, book=book),
        stages.materialize(run.config, run.special_tokens, tally=tally, batches=start.batches),
    )


def _fetch_one(run: Run, group: str, ref: SampleRef) -> tuple[Sequence[Picture], ...]:
    """The encoded pictures of a sample in shards.

    Raises:
        ShardError: if it is not there any more, or cannot be used.
    """
    [sample] = fetch_samples(run.shards[group], [ref], options=run.config.storage_options)
    try:
        return decode_sample(sample, upright=run.config.fidelity != Fidelity.UPSTREAM).media
    except BadSample as bad:
        raise ShardError(
            f"group {group!r}: the state speaks of sample {sample['__key__']!r} in {run.shards[group][ref.shard].url}, which "
            f"cannot be used now: {bad}; have its shards changed?"
        ) from bad


def _group_pipeline(
    run: Run,
    name: str,
    stream: int,
    tally: Tally,
    *,
    book: GroupBook | None = None,
    draws: Draws | None = None,
) -> wds.DataPipeline:
    """Shards to plans of one group; shuffled where there is a book, and no draws in call order."""
    config, seed, size = run.config, run.draw_seed, count_samples(run.shards[name])
    shuffled = (
        [stages.shuffle(config, name, seed=seed, stream=stream, book=book)] if book and not draws else []
    )
    return wds.DataPipeline(
        stages.shards(
            run.shards[name],
            group=name,
            seed=run.order_seed,
            num_streams=run.num_streams,
            stream=stream,
            epochs=run.epochs,
            book=book,
        ),
        stages.read(config, book=book, ahead=run.ahead[name]),
        *shuffled,
        stages.decode(config, name, tally=tally, group_size=size),
        stages.plan(config, name, run.encoder, seed=seed, draws=draws, tally=tally, group_size=size),
    )


def _open_book(run: Run, group: str, state: GroupState, tally: Tally) -> GroupBook:
    """The book of a group as its state left it; what its shuffle held is fetched when it is let out."""
    held = map(reference, unpack_refs(state.shuffled))
    shards = run.shards[group]
    limit = skip_limits(run).get(group)
    skips = Skips(group, tally, limit, state.skipped) if limit else None
    lose = partial(_lose, shards, skips) if skips else None
    buffer = ShuffleBuffer(
        held,
        state.taken,
        partial(fetch_samples, shards, options=run.config.storage_options),
        run.memory,
        lose,
        1 if storage.is_local(shards[0].url) else STRETCHES,
    )
    return GroupBook(state.cursor, buffer, skips)


def skip_limits(run: Run) -> dict[str, SkipLimit]:
    """How much of each group may be skipped; empty where nothing may be.

    Raises:
        ConfigError: if it is not known how many samples a shard holds, so that what is lost could not be counted.
    """
    if run.config.on_shard_error != OnShardError.SKIP:
        return {}
    for name, listed in run.shards.items():
        unknown = [shard.url for shard in listed if shard.samples is None]
        if unknown:
            raise ConfigError(
                f'on_shard_error="skip" counts what is lost, and nothing says how many samples {len(unknown)} shards of group '
                f"{name!r} hold, such as {unknown[0]}; name a manifest or a wids shard list as its `shards:`"
            )
    return {
        name: SkipLimit(run.config.max_skipped, count_samples(listed) or 0, run.num_streams)
        for name, listed in run.shards.items()
    }


def _lose(
    shards: Sequence[Shard],
    skips: Skips,
    refs: Sequence[SampleRef],
    error: ShardError,
    *,
    were_read: bool = False,
) -> None:
    """Skip samples of one shard that cannot be fetched."""
    lost = [Lost(ref.shard, ref.offset, 1, ref.epoch) for ref in refs]
    skips.skip(shards[refs[0].shard].url, lost, error, were_read=were_read)


def fetch_samples(
    shards: Sequence[Shard], refs: Sequence[SampleRef], options: StorageOptions | None = None
) -> list[dict[str, Any]]:
    """Samples of a group by their references, as `stages.read` gives them."""
    in_tars = [ref for ref in refs if shards[ref.shard].raw is None]
    tars = iter(fetch([(shards[ref.shard].url, ref.offset, ref.length) for ref in in_tars], options))
    raw = {number: iter(found) for number, found in _fetch_raw(shards, refs)}
    return [stages.placed(next(raw.get(ref.shard, tars)), ref, shards[ref.shard].dataset) for ref in refs]


def _fetch_raw(
    shards: Sequence[Shard], refs: Sequence[SampleRef]
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(number of the unit, its samples in the order of their references), each unit gone through once."""
    wanted: dict[int, list[int]] = {}
    for ref in refs:
        if shards[ref.shard].raw is not None:
            wanted.setdefault(ref.shard, []).append(ref.offset)
    at_once = 1 if all(storage.is_local(shards[number].url) for number in wanted) else RUNS_AT_ONCE

    def fetch_rows(item: tuple[int, list[int]]) -> tuple[int, list[dict[str, Any]]]:
        rows = shards[item[0]].raw
        return item[0], rows.fetch(item[1]) if rows else []

    return look_ahead(fetch_rows, wanted.items(), at_once)


def _fetch_again(
    run: Run, group: str, skips: Skips | None, refs: Sequence[SampleRef]
) -> list[dict[str, Any] | None]:
    """Samples that were read before, by their references; None for one that is lost."""
    shards = run.shards[group]
    fetch = partial(fetch_samples, shards, options=run.config.storage_options)
    try:
        return [*fetch(refs)]
    except ShardError:
        if skips is None:
            raise
    found: list[dict[str, Any] | None] = []
    gone: dict[int, tuple[int, ShardError]] = {}
    for ref in refs:
        place, why = gone.get(ref.shard, (None, None))
        sample = None
        if place is None or why is None or ref.offset < place:
            try:
                (sample,) = fetch([ref])
            except ShardError as error:
                why = error
                gone[ref.shard] = (ref.offset, error)
        if sample is None and why is not None:
            # What lies behind it in the shard is not tried any more.
            _lose(shards, skips, [ref], why, were_read=True)
        found.append(sample)
    return found


def _replan(
    run: Run,
    tally: Tally,
    skips: Mapping[str, Skips | None],
    group: str,
    refs: Sequence[SampleRef],
) -> Sequence[SamplePlan]:
    """The plans of samples that were planned before.

    They are not counted as read again. One that is dropped now (the budget was made smaller on purpose) is counted.
    """
    again = Tally()
    decode = stages.decode(run.config, group, tally=again)
    plan = stages.plan(run.config, group, run.encoder, seed=run.draw_seed, tally=again)
    found = _fetch_again(run, group, skips[group], refs)
    plans = list(plan(decode(sample for sample in found if sample is not None)))
    tally.add({group: {"dropped": again.drops(group)}})
    return plans


def _fetch_media(
    run: Run, skips: Mapping[str, Skips | None], group: str, refs: Sequence[SampleRef]
) -> Sequence[tuple[Sequence[Picture], ...] | None]:
    """The encoded pictures of samples that were planned before; None for one that is lost."""
    found = _fetch_again(run, group, skips[group], refs)
    decoded = stages.decode(run.config, group)(sample for sample in found if sample is not None)
    return [None if sample is None else next(decoded).media for sample in found]


def padding_batch(run: Run, state: StreamState) -> PackedBatch:
    """A batch without loss, for ranks that have no sample left: one empty text, its label's weight 0."""
    rules = layout_rules(run.config, run.special_tokens)
    text = SamplePlan("padding", "", (Segment(Kind.TEXT, 2, loss=True),), (), (), estimate=2)
    batch = lay_out([text], rules)
    batch["ce_loss_weights"] = torch.zeros_like(batch["ce_loss_weights"])
    batch["batch_data_indexes"] = []
    return PackedBatch({key: batch[key] for key in KEY_ORDER if key in batch}, state, is_padding=True)


def fingerprint(run: Run) -> dict[str, Any]:
    """What the batches of a run depend on, by part; a state says what it was, and `changes` compares."""
    config, groups = run.config, groups_of(run.config)
    return {
        **({"fidelity": str(config.fidelity)} if config.fidelity == Fidelity.UPSTREAM else {}),
        "pass": None if run.pass_epochs is None else [run.pass_epochs, "repeat" if run.repeat else "end"],
        "draw_seed": run.draw_seed,
        "order_seed": run.order_seed,
        "shuffle": [config.shuffle_samples, config.shuffle_bytes],
        "budget": _budget_of(config),
        "tokenizer": [len(run.tokenizer), *run.special_tokens.values()],
        "order": list(groups),
        "weights": {name: [group.weight, group.is_mandatory] for name, group in groups.items()},
        "recipes": {name: _digest(_recipe_of(config, group)) for name, group in groups.items()},
        "groups": {
            name: _digest([_identity(shard) for shard in listed]) for name, listed in run.shards.items()
        },
        **({"classes": dict(run.classes)} if run.classes else {}),
    }


def _identity(shard: Shard) -> list[Any]:
    if shard.raw is not None:
        return [shard.dataset, shard.raw.identity]
    return [shard.dataset, storage.base_name(shard.url), shard.samples]


def _budget_of(config: BagelDatasetConfig) -> dict[str, Any]:
    """What decides which samples go together."""
    budget = asdict(pack_limits(config))
    if config.packing == Packing.BEST_FIT:
        return {"packing": str(config.packing), **budget}
    return {name: value for name, value in budget.items() if not name.startswith("look_ahead")}


def _recipe_of(config: BagelDatasetConfig, group: GroupConfig) -> list[Any]:
    return [
        group.recipe,
        {str(kind): asdict(transform) for kind, transform in transforms_of(group).items()},
        # A setting that came later and is not given leaves the digests of earlier states as they were.
        {name: value for name, value in asdict(group.frame_sampler_args).items() if value is not None},
        asdict(dropout_rates(config)),
        config.allow_control_tokens,
        config.vae_image_downsample,
        config.vit_patch_size,
    ]


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())
