"""The dataset that a training script sees: upstream's names over the streams of this project."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

from bagel_wds.config import BagelDatasetConfig, Fidelity
from bagel_wds.errors import ConfigError, Tally
from bagel_wds.groups import find_shards, groups_of, resolve, streams_for
from bagel_wds.materialize import PackMemory
from bagel_wds.pipeline import (
    Run,
    fingerprint,
    padding_batch,
    skip_limits,
    stream_pipeline,
    upstream_pipeline,
)
from bagel_wds.ranks import find_rank
from bagel_wds.rng import CallOrderDraws, KeyedDraws, upstream_iter_seed
from bagel_wds.shards import count_samples
from bagel_wds.skips import check_together
from bagel_wds.state import ALLOWED, LoaderState, StreamState, batches_of, changes, stats_of
from bagel_wds.streams import check_split, streams_of, worker_of
from bagel_wds.tokens import check_tokenizer, control_ids
from bagel_wds.upstream import registry, sequence
from bagel_wds.upstream.draws import OwnGenerators
from bagel_wds.upstream.groups import check_status, groups_of_classes, identity_of, read_info, read_mixture
from bagel_wds.upstream.sources import PlannedRows, ready_plans, settled_plans
from bagel_wds.wiring import dropout_rates, layout_rules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.batch import PackedBatch
    from bagel_wds.layout import LayoutRules
    from bagel_wds.records import SamplePlan

logger = logging.getLogger(__name__)


class PackedDataset(IterableDataset[dict[str, Any]]):
    """Packed batches from weighted groups, without end.

    Each item is one batch: upstream's dict of lists and tensors. Give it to a `torch.utils.data.DataLoader` with
    `batch_size=1` and `collate_fn=collate_wrapper()`.

    Args:
        data_config: the settings.
        tokenizer: a Qwen2 tokenizer that `add_special_tokens` has seen.
        special_tokens: the ids that it returned.
        local_rank: of this process among all (upstream's name for it); None finds rank and world size.
        world_size: number of processes.
        num_workers: of the DataLoader.
        expected_num_tokens, max_num_tokens_per_sample, max_num_tokens, prefer_buffer_before, max_buffer_size,
            interpolate_pos, use_flex: as in the settings, and instead of what is there.
        data_status: with `fidelity="upstream"`, for groups in raw files the positions behind which their workers go on.
        dataset_info: where the datasets lie, instead of what the settings say.
        global_seed: of every draw; None is the settings' `data_seed`.

    Raises:
        ConfigError: if the settings cannot work; nothing is left for a worker to find out.
    """

    def __init__(
        self,
        data_config: BagelDatasetConfig,
        tokenizer: PreTrainedTokenizerBase,
        special_tokens: Mapping[str, object],
        local_rank: int | None,
        world_size: int | None,
        num_workers: int,
        expected_num_tokens: int = 32768,
        max_num_tokens_per_sample: int = 16384,
        max_num_tokens: int = 36864,
        prefer_buffer_before: int = 16384,
        max_buffer_size: int = 50,
        interpolate_pos: bool = False,
        use_flex: bool = False,
        data_status: object | None = None,
        dataset_info: Mapping[str, object] | None = None,
        global_seed: int | None = None,
    ) -> None:
        super().__init__()
        if local_rank is None or world_size is None:
            local_rank, world_size = find_rank()
        if not 0 <= local_rank < world_size:
            raise ConfigError(f"rank {local_rank} is not in 0..{world_size - 1} (world_size={world_size})")
        config = replace(
            data_config,
            expected_num_tokens=expected_num_tokens,
            max_num_tokens_per_sample=max_num_tokens_per_sample,
            max_num_tokens=max_num_tokens,
            prefer_buffer_before=prefer_buffer_before,
            max_buffer_size=max_buffer_size,
            interpolate_pos=interpolate_pos,
            use_flex=use_flex,
        )
        if dataset_info is not None:
            config = replace(config, dataset_info=dataset_info, dataset_info_path=None)
        ids = control_ids(special_tokens)
        check_tokenizer(tokenizer, ids)
        mixture = read_mixture(config)
        config = resolve(replace(config, grouped_datasets=mixture, grouped_datasets_path=None))
        self.rank = local_rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.global_seed = global_seed
        self.tokenizer = tokenizer
        self._config = config
        of_classes = groups_of_classes(config, mixture)
        check_status(data_status, config, of_classes)
        others = {name: group for name, group in groups_of(config).items() if name not in of_classes}
        shards = find_shards(replace(config, grouped_datasets=others)) if others else {}
        datasets, _, _ = self.build_datasets(of_classes, data_status)
        self._classes: dict[str, Any] = dict(zip(of_classes, datasets, strict=True))
        num_streams = streams_for(config, world_size, num_workers)
        self._run = Run(
            config=config,
            shards=shards,
            tokenizer=tokenizer,
            special_tokens=ids,
            num_streams=num_streams,
            draw_seed=config.data_seed if global_seed is None else global_seed,
            order_seed=config.data_seed,
            classes={name: identity_of(dataset) for name, dataset in self._classes.items()},
        )
        self._order_classes(config.data_seed)
        self._skip_limits = skip_limits(self._run)
        self._state = LoaderState(fingerprint(self._run), num_streams)
        self._latest: dict[int, StreamState] = {}
        logger.info(
            "rank %d of %d, %d workers, %d streams%s; groups: %s",
            local_rank,
            world_size,
            num_workers,
            num_streams,
            ""
            if config.num_streams or config.fidelity == Fidelity.UPSTREAM
            else " (set num_streams to the largest ranks times workers you will ever want)",
            ", ".join(
                f"{name} ({count_samples(shards[name])} samples in {len(shards[name])} shards)"
                if name in shards
                else f"{name} (read by {type(self._classes[name]).__name__})"
                for name in groups_of(config)
            ),
        )

    @property
    def num_streams(self) -> int:
        """G: how many streams the run has."""
        return self._run.num_streams

    @property
    def class_datasets(self) -> dict[str, Any]:
        """The datasets of the groups that classes read, by group: a user's classes; and of raw files, upstream's, under its fidelity."""
        return dict(self._classes)

    def __getstate__(self) -> dict[str, Any]:
        """All of it; for a process that is being started, without what other ranks read of raw files."""
        state = dict(vars(self))
        if get_spawning_popen() is not None:
            state["_classes"] = {
                name: dataset.of_this_rank() if type(dataset) in registry.RECIPE_OF_CLASS else dataset
                for name, dataset in self._classes.items()
            }
        return state

    def set_epoch(self, seed: int) -> None:
        """Order the shards by another seed than the settings' `data_seed`; call it before iteration.

        Raises:
            ConfigError: once iteration has begun: the order of a run is fixed then.
        """
        if self._latest or self._state.streams:
            raise ConfigError(
                "set_epoch after iteration has begun would change the order of a running epoch; build anew"
            )
        self._run = replace(self._run, order_seed=seed)
        self._state = LoaderState(fingerprint(self._run), self._run.num_streams)
        self._order_classes(seed)

    def _order_classes(self, seed: int) -> None:
        for dataset in self._classes.values():
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(seed)

    def build_datasets(
        self, datasets_metainfo: Mapping[str, Any], data_status: object | None
    ) -> tuple[list[Any], list[bool], list[float]]:
        """The datasets of some groups as upstream builds them, each by its class in `DATASET_REGISTRY`.

        Args:
            datasets_metainfo: groups of a mixture; their datasets must lie in raw files. It stays as it is.
            data_status: for a group the positions behind which its workers go on.

        Returns:
            The datasets, whether each group is mandatory, and its weight; all in the order of the groups.

        Raises:
            ConfigError: naming the group, if it has no class, or lies in no raw files.
        """
        entries = {name: registry.entry_of(name, entry) for name, entry in datasets_metainfo.items()}
        info, folder = read_info(self._config) if entries else ({}, "")
        status = data_status if isinstance(data_status, dict) else {}
        datasets = [
            registry.build_class(
                name,
                entry,
                info,
                folder,
                tokenizer=self.tokenizer,
                local_rank=self.rank,
                world_size=self.world_size,
                num_workers=self.num_workers,
                data_status=status.get(name),
            )
            for name, entry in entries.items()
        ]
        return (
            datasets,
            [bool(entry.get("is_mandatory", False)) for entry in entries.values()],
            [float(entry.get("weight", 0.0)) for entry in entries.values()],
        )

    def set_sequence_status(self) -> dict[str, Any]:
        """A pack with nothing in it, in upstream's form: `curr`, the next position, and a list for each key."""
        return sequence.empty_status()

    def pack_sequence(self, sample: Mapping[str, Any], sequence_status: dict[str, Any]) -> dict[str, Any]:
        """Put a sample, in upstream's form, behind those of a pack; gives the same pack.

        Dropout and timesteps are drawn from the process-wide `random` and `numpy.random`. The sample stays as it is.

        Raises:
            ConfigError: if the sample is not of upstream's form.
        """
        return sequence.pack_into(
            sequence_status, sample, self._layout_rules(), dropout_rates(self._run.config)
        )

    def to_tensor(self, sequence_status: Mapping[str, Any]) -> dict[str, Any]:
        """The batch of a pack, without `batch_data_indexes`. The pack stays as it is."""
        return sequence.batch_of(sequence_status, self._layout_rules())

    def _layout_rules(self) -> LayoutRules:
        return layout_rules(self._run.config, self._run.special_tokens)

    def finite(self, epochs: int, *, repeat: bool = False) -> PackedDataset:
        """The same dataset with so many epochs of each group instead of no end.

        A stream that has ended gives batches without loss (`is_padding`), for ever; with `repeat=True` it goes on with
        the next epoch. A group that a class reads has no end; the others decide.

        Raises:
            ConfigError: if there are no others; under `fidelity="upstream"`, which has no end.
        """
        if self._run.config.fidelity == Fidelity.UPSTREAM:
            raise ConfigError(
                'fidelity="upstream" reads files over and over, and knows no end of an epoch; leave epochs out'
            )
        if not self._run.shards:
            raise ConfigError(
                f"no group of {', '.join(self._classes)} has an end that is known, as classes read them all; leave epochs out"
            )
        other = copy.copy(self)
        run = replace(self._run, pass_epochs=epochs, repeat=repeat)
        vars(other).update(_run=run, _latest={}, _state=LoaderState(fingerprint(run), run.num_streams))
        return other

    def with_transport(self, transport: str) -> PackedDataset:
        """The same dataset, of whose batches the pixels travel so; see the setting `transport`."""
        other = copy.copy(self)
        config = replace(self._run.config, transport=transport)
        vars(other).update(_run=replace(self._run, config=config), _latest={})
        return other

    def state_dict(self) -> dict[str, Any]:
        """Where this process is in the streams that it hosts, as plain JSON values.

        It counts what this process has *given*. A DataLoader with workers gives ahead of what is consumed: use
        `PackedLoader`, or the newest `batch.state` of each stream, for what was consumed.
        """
        return replace(self._state, streams={**self._state.streams, **self._latest}).to_json()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from a state: one of `PackedLoader.state_dict()`, of `merge_states`, or of `state_dict()`.

        Any number of ranks and workers that divides `num_streams` may go on; under `fidelity="upstream"` as many as saved it.
        Where the settings name no `num_streams`, the state's is taken.

        Args:
            state_dict: may hold more streams than this rank hosts.
            allow: what may differ from the run that saved it: `budget`, `weights`, `recipes`, and `groups` (one may be
                added).

        Raises:
            ConfigError: if the state is of another run; the message says what changed.
        """
        unknown = set(allow) - set(ALLOWED)
        if unknown:
            raise ConfigError(f"allow={sorted(unknown)}: only {', '.join(ALLOWED)} may change")
        state = LoaderState.from_json(state_dict)
        run = self._run if self._run.config.num_streams else replace(self._run, num_streams=state.num_streams)
        found = changes(state, LoaderState(fingerprint(run), run.num_streams), allow)
        if found:
            raise ConfigError("this state is of another run: " + "; ".join(found))
        check_split(run.num_streams, self.world_size, self.num_workers)
        own = [
            name for name, dataset in self._classes.items() if type(dataset) not in registry.RECIPE_OF_CLASS
        ]
        if own and state.streams:
            logger.warning(
                "a state says nothing of what a user's class has given: group %s starts anew", ", ".join(own)
            )
        self._run, self._latest = run, {}
        self._state = replace(state, fingerprint=fingerprint(run))

    def check_skipped(self, streams: Iterable[StreamState]) -> None:
        """Refuse to go on once these streams have together skipped more than the settings' `max_skipped` of a group.

        Raises:
            ShardError: naming the group and the figures.
        """
        check_together(self._skip_limits, streams)

    def stats(self) -> dict[str, Any]:
        """What the streams of this process have read, packed, held back and dropped, by group."""
        return stats_of({**self._state.streams, **self._latest}.values())

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            hosted = streams_of(
                self._run.num_streams,
                rank=self.rank,
                world_size=self.world_size,
                worker=worker,
                num_workers=num_workers,
                first=self._state.next_batch,
            )
        except ConfigError as error:
            raise ConfigError(
                f"the dataset was built for num_workers={self.num_workers}, and the DataLoader has {num_workers}: {error}"
            ) from error
        if self._run.config.fidelity == Fidelity.UPSTREAM:
            yield from self._upstream(hosted, info.num_workers if info else 0)
            return
        self._latest = {}
        states = {number: self._state_of(number) for number in hosted}
        tallies = {number: Tally() for number in hosted}
        for number, state in states.items():
            tallies[number].add(state.counts)
        # What a class reads is shared out by workers, so the streams of one share what it gives.
        ready = self._settled(worker, tallies[hosted[0]])
        memory = PackMemory.here()
        streams = {number: self._batches(states[number], tallies[number], ready, memory) for number in hosted}
        while True:
            # The stream whose next global batch has the lowest number: they take turns.
            number = min(streams, key=lambda own: self._given(own) * self._run.num_streams + own)
            batch = next(streams[number])
            if batch.state is not None:
                self._latest[number] = batch.state
            yield batch.move()

    def _given(self, stream: int) -> int:
        state = self._latest.get(stream) or self._state.streams.get(stream)
        return state.batches if state else 0

    def _state_of(self, stream: int) -> StreamState:
        state = self._state.streams.get(stream)
        if state is None and batches_of(stream, self._run.num_streams, self._state.next_batch):
            raise ConfigError(
                f"the state lacks stream {stream}, which this worker hosts now; merge the states of all ranks with "
                "merge_states before loading"
            )
        return state or StreamState(stream)

    def _settled(self, worker: int, tally: Tally) -> dict[str, Iterator[SamplePlan]]:
        """The plans of groups that classes read, in a worker."""
        run = self._run
        ready = {}
        for name, dataset in self._classes.items():
            address = (run.draw_seed, "class", name, self.rank, worker)
            seed = KeyedDraws(*address).randint(0, 1 << 32, "generators")
            generators = OwnGenerators.seeded(CallOrderDraws(seed), seed)
            plans = ready_plans(dataset, name, run.config, generators, tally)
            ready[name] = settled_plans(plans, name, run.config, address, tally)
        return ready

    def _batches(
        self,
        state: StreamState,
        tally: Tally,
        ready: Mapping[str, Iterator[SamplePlan]],
        memory: PackMemory,
    ) -> Iterator[PackedBatch]:
        """The batches of one stream; behind the last one of a finite pass, padding or repetitions."""
        epochs, ended = self._run.pass_epochs, state.ended
        batches: Iterable[Any] = ()
        if not (ended and self._run.epochs):
            batches = stream_pipeline(self._run, state, tally, ready, memory)
        for batch in batches:
            ended = ended or (epochs is not None and state.covers(epochs))
            state = replace(batch.state, ended=ended)
            batch.state = state
            yield batch
        while True:
            state = replace(state.drained(), batches=state.batches + 1, ended=True, counts=tally.as_dict())
            yield padding_batch(self._run, state)

    def _upstream(self, hosted: Sequence[int], num_workers: int) -> Iterator[dict[str, Any]]:
        if len(hosted) != 1:
            raise ConfigError(
                f'fidelity="upstream" was built for num_workers={self.num_workers} and the DataLoader has {num_workers}; '
                "give both the same number"
            )
        start = self._state_of(hosted[0])
        # Behind a resume another worker may host the stream; it goes on as the one that began it.
        worker = worker_of(start.stream, self.world_size)
        saved = start.call_order or {}
        if saved and saved.get("num_workers") != num_workers:
            raise ConfigError(
                f'fidelity="upstream" shares out files by workers: this state is of {saved.get("num_workers")} workers, and the '
                f"DataLoader has {num_workers}; give it as many"
            )
        seed = upstream_iter_seed(
            self.global_seed,
            self._run.order_seed,
            rank=self.rank,
            world_size=self.world_size,
            worker_id=worker,
            num_workers=num_workers,
        )
        tally, draws = Tally(), CallOrderDraws(seed)
        tally.add(start.counts)
        generators = OwnGenerators.seeded(draws, seed)
        rows: dict[str, PlannedRows] = {}
        ready: dict[str, Iterator[SamplePlan]] = {}
        for name, dataset in self._classes.items():
            if type(dataset) in registry.RECIPE_OF_CLASS:
                position = saved.get("positions", {}).get(name)
                rows[name] = PlannedRows(
                    dataset, name, self._run.config, self._run.encoder, draws, tally,
                    worker=worker, num_workers=num_workers, position=position,
                )  # fmt: skip
            else:
                ready[name] = ready_plans(dataset, name, self._run.config, generators, tally)
        for batch in upstream_pipeline(self._run, start, worker, num_workers, draws, tally, rows, ready):
            self._latest[start.stream] = batch.state
            yield batch.move()


def make_bagel_multimodal_dataset(  # noqa: D417 - the fields are described where they live
    tokenizer: PreTrainedTokenizerBase,
    special_tokens: Mapping[str, object],
    grouped_datasets: Mapping[str, object],
    local_rank: int = 0,
    world_size: int = 1,
    num_workers: int = 4,
    expected_num_tokens: int = 32768,
    max_num_tokens_per_sample: int = 16384,
    max_num_tokens: int = 36864,
    prefer_buffer_before: int = 16384,
    max_buffer_size: int = 50,
    interpolate_pos: bool = False,
    use_flex: bool = False,
    data_status: object | None = None,
    data_seed: int = 42,
    text_cond_dropout_prob: float = 0.1,
    vit_cond_dropout_prob: float = 0.4,
    vae_cond_dropout_prob: float = 0.1,
    vae_image_downsample: int = 16,
    max_latent_size: int = 32,
    vit_patch_size: int = 14,
    max_num_patch_per_side: int = 70,
    dataset_info: Mapping[str, object] | None = None,
    fidelity: str = "corrected",
) -> PackedDataset:
    """Build a packed dataset in one call. Arguments that are not named below are fields of `BagelDatasetConfig`.

    Args:
        tokenizer: a Qwen2 tokenizer that `add_special_tokens` has seen.
        special_tokens: the ids that it returned.
        grouped_datasets: the mixture.
        local_rank: of this process among all.
        world_size: number of processes.
        num_workers: of the DataLoader.
        data_status: with `fidelity="upstream"`, positions in upstream's form to go on behind.
        dataset_info: where each dataset of each group lies; needed.
        fidelity: "corrected" or "upstream".

    Raises:
        ConfigError: if the settings cannot work.
    """
    config = BagelDatasetConfig(
        grouped_datasets=grouped_datasets,
        dataset_info=dataset_info,
        expected_num_tokens=expected_num_tokens,
        max_num_tokens_per_sample=max_num_tokens_per_sample,
        max_num_tokens=max_num_tokens,
        prefer_buffer_before=prefer_buffer_before,
        max_buffer_size=max_buffer_size,
        interpolate_pos=interpolate_pos,
        use_flex=use_flex,
        data_seed=data_seed,
        text_cond_dropout_prob=text_cond_dropout_prob,
        vit_cond_dropout_prob=vit_cond_dropout_prob,
        vae_cond_dropout_prob=vae_cond_dropout_prob,
        vae_image_downsample=vae_image_downsample,
        max_latent_size=max_latent_size,
        vit_patch_size=vit_patch_size,
        max_num_patch_per_side=max_num_patch_per_side,
        fidelity=fidelity,
    )
    return config.build(
        tokenizer,
        special_tokens,
        local_rank,
        world_size,
        num_workers,
        global_seed=data_seed,
        data_status=data_status,
    )
