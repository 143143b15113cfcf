"""A DataLoader that knows what was consumed, and finite passes whose length all ranks agree on."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from bagel_wds import handover
from bagel_wds.batch import SimpleCustomBatch, collate_wrapper
from bagel_wds.config import Transport
from bagel_wds.drops import check_some_packed
from bagel_wds.errors import ConfigError
from bagel_wds.orphans import end_with_parent
from bagel_wds.state import LoaderState, batches_of, merge_states, stats_of
from bagel_wds.streams import check_split

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from bagel_wds.datasets import PackedDataset
    from bagel_wds.state import StreamState

logger = logging.getLogger(__name__)


RESERVED = {"batch_sampler", "batch_size", "collate_fn", "drop_last", "in_order", "sampler", "shuffle"}
"""Options of a DataLoader that would change what a batch is, or the order of batches."""


class Remainder(StrEnum):
    """What a finite pass does when some streams have ended and others have not."""

    PAD = "pad"
    """Streams that have ended give batches without loss until all have: every sample comes once."""
    DROP = "drop"
    """The pass ends with the last round in which every stream had a batch."""
    REPEAT = "repeat"
    """Streams that have ended go on with the next epoch until all have."""


class PackedLoader:
    """Batches of a `PackedDataset` from worker processes, with a state that is right whatever was prefetched.

    A second iteration goes on after the last batch that was consumed.

    Args:
        dataset: built with the rank and world size of this process.
        num_workers: worker processes; 0 loads in this one.
        epochs: passes over each group; None goes on for ever.
        remainder: "pad", "drop" or "repeat": how a finite pass ends. Every rank makes the same number of steps.
        steps: end the pass after so many steps instead, which needs no agreement among ranks.
        device: where the batches are wanted, such as "cuda". Their pixels travel there as uint8, and are finished there;
            None gives batches as the dataset's `transport` says, for you to move.
        multiprocessing_context: how workers start; a script then guards its start with `if __name__ == "__main__"`. See
            `bagel_wds.worker` for a quick start.
        **options: of `torch.utils.data.DataLoader`, such as `prefetch_factor` and `pin_memory`.

    Raises:
        ConfigError: if the workers cannot share the streams.
    """

    def __init__(
        self,
        dataset: PackedDataset,
        num_workers: int = 0,
        *,
        epochs: int | None = None,
        remainder: str = "pad",
        steps: int | None = None,
        device: str | torch.device | None = None,
        multiprocessing_context: str = "forkserver",
        **options: Any,
    ) -> None:
        check_split(dataset.num_streams, dataset.world_size, num_workers)
        if remainder not in list(Remainder):
            raise ConfigError(f"remainder={remainder!r} is none of {', '.join(Remainder)}")
        for name in sorted(RESERVED & options.keys()):
            raise ConfigError(
                f"{name}= is not for PackedLoader: a batch is what the dataset gives, in its order; leave it out"
            )
        if steps is not None and steps < 0:
            raise ConfigError(f"steps={steps} must not be negative")
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs={epochs} must be at least 1, or None to go on for ever")
        self._remainder = Remainder(remainder)
        self._epochs = epochs
        self._steps = steps
        repeat = self._remainder is Remainder.REPEAT
        self._device = None if device is None else torch.device(device)
        if self._device is not None:
            dataset = dataset.with_transport(Transport.UINT8)
        self._dataset = dataset if epochs is None else dataset.finite(epochs, repeat=repeat)
        self._num_workers = num_workers
        self._options = options
        if self._device is not None and self._device.type == "cuda":
            # Only out of pinned memory does the way to the device not hold up the loop.
            options.setdefault("pin_memory", True)
        self._worker_init_fn = options.pop("worker_init_fn", None)
        if num_workers:
            self._options["multiprocessing_context"] = multiprocessing_context
        self._state = self._at_start = LoaderState.from_json(self._dataset.state_dict())
        self._newest: Mapping[int, StreamState] = self._state.streams

    def __iter__(self) -> Iterator[SimpleCustomBatch]:
        if self._state is self._at_start:
            # Nothing is consumed yet, so `set_epoch` may have been called since.
            now = LoaderState.from_json(self._dataset.state_dict())
            self._state = self._at_start = replace(self._at_start, fingerprint=now.fingerprint)
        self._dataset.load_state_dict(self._state.to_json())
        receiver = handover.Receiver()
        batches = self._start(receiver)
        limited = iter(batches) if self._epochs is None else self._until_all_ended(iter(batches))
        try:
            while not self._steps_are_done():
                batch = next(limited, None)
                if batch is None:
                    break
                # Before it is handed out: the consumer may save as soon as it has it.
                self._consumed(batch)
                yield batch if self._device is None else batch.to(self._device)
        finally:
            # The workers end, and the thread that pins what still comes from them, before the receiver does.
            del limited, batches
            receiver.end()
        # The pass is over: the next iteration, or a state saved now, begins another.
        self._state = self._at_start

    def _start(self, receiver: handover.Receiver) -> DataLoader[Any]:
        options = dict(self._options)
        if self._num_workers:
            options["worker_init_fn"] = partial(_start_worker, self._worker_init_fn, receiver.number)
        return DataLoader(
            self._dataset,
            batch_size=1,
            collate_fn=collate_wrapper(),
            num_workers=self._num_workers,
            **options,
        )

    def _steps_are_done(self) -> bool:
        """Whether the pass has had its `steps`, those before a resume counted in."""
        done = (self._state.next_batch - self._at_start.next_batch) // self._dataset.world_size
        return self._steps is not None and done >= self._steps

    def _consumed(self, batch: SimpleCustomBatch) -> None:
        state = batch.state
        if state is None:
            raise ConfigError("a batch came without its state: PackedLoader needs the default fidelity")
        self._state = replace(
            self._state,
            next_batch=self._state.next_batch + self._dataset.world_size,
            streams={**self._state.streams, state.stream: state},
        )
        self._newest = self._state.streams
        if any(group.skipped for group in state.groups.values()):
            self._dataset.check_skipped(self._newest.values())

    def _until_all_ended(self, batches: Iterator[SimpleCustomBatch]) -> Iterator[SimpleCustomBatch]:
        """Whole rounds, one batch of each stream of this rank, as long as the pass goes on for any rank."""
        per_round = self._dataset.num_streams // self._dataset.world_size
        # A pass that goes on in the middle of a round ends that round first: it was agreed on before. (Where ranks
        # changed so that they cannot end it together, rounds begin where the pass goes on.)
        rest = -self._state.next_batch % self._dataset.num_streams
        if rest % self._dataset.world_size == 0:
            yield from islice(batches, rest // self._dataset.world_size)
        while True:
            offered = deque(next(batches) for _ in range(per_round))
            ended = [bool(batch.state and batch.state.ended) for batch in offered]
            stop = all(ended) if self._remainder is not Remainder.DROP else any(ended)
            if self._steps is None and self._agree(stop):
                # What was dropped behind the last batch counts, too.
                last = {batch.state.stream: batch.state for batch in offered if batch.state and stop}
                self._newest = {**self._newest, **last}
                if self._dataset.world_size == 1:
                    # Of many ranks none knows what the others had.
                    check_some_packed(self.stats)
                return
            while offered:
                yield offered.popleft()

    def _agree(self, stop: bool) -> bool:
        """Whether the pass is over for all ranks: drop when one says so, else when all do."""
        if self._dataset.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
            if self._dataset.world_size > 1:
                raise ConfigError(
                    "ranks agree on the end of a finite pass through torch.distributed, which is not initialized; call "
                    "init_process_group, or give steps="
                )
            return stop
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        vote = torch.tensor(int(stop), device=device)
        dist.all_reduce(vote, dist.ReduceOp.MAX if self._remainder is Remainder.DROP else dist.ReduceOp.MIN)
        return bool(vote.item())

    def state_dict(self) -> dict[str, Any]:
        """Where the run is after the last batch that was consumed, as plain JSON values.

        Each rank has the state of the streams that it hosts; the union of all ranks' is the state of the run
        (`merge_states`, or `gather_state` over torch.distributed).
        """
        hosted = {
            (self._state.next_batch + turn) % self._state.num_streams
            for turn in range(self._dataset.rank, self._state.num_streams, self._dataset.world_size)
        }
        streams = {number: state for number, state in self._state.streams.items() if number in hosted}
        return replace(self._state, streams=streams).to_json()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from a state, on any number of ranks and workers that divides its `num_streams`.

        Args:
            state_dict: the run's, or at least that of the streams which this rank will host.
            allow: what may have changed on purpose; see `PackedDataset.load_state_dict`.

        Raises:
            ConfigError: if it is of another run, or no state of one step.
        """
        state = LoaderState.from_json(state_dict)
        for number, stream in state.streams.items():
            expected = batches_of(number, state.num_streams, state.next_batch)
            if stream.batches != expected:
                raise ConfigError(
                    f"stream {number} has given {stream.batches} batches where {expected} belong to {state.next_batch} in "
                    "all; this is no state of one step of all ranks, merge them with merge_states"
                )
        self._dataset.load_state_dict(state_dict, allow=allow)
        check_split(self._dataset.num_streams, self._dataset.world_size, self._num_workers)
        self._newest = state.streams
        now = LoaderState.from_json(self._dataset.state_dict())
        self._at_start = LoaderState(now.fingerprint, now.num_streams)
        self._state = replace(state, fingerprint=now.fingerprint)

    @property
    def stats(self) -> dict[str, Any]:
        """What this rank's streams have read, packed, held back and dropped so far, over all workers; see `stats_of`."""
        return stats_of(self._newest.values())


def _start_worker(own: Callable[[int], None] | None, receiver: int, worker: int) -> None:
    # torch looks at the parent's process number, which under forkserver is the server's.
    end_with_parent()
    handover.begin(receiver)
    if own is not None:
        own(worker)


def gather_state(loader: PackedLoader) -> dict[str, Any]:
    """The state of the run, on every rank: each rank's, gathered over torch.distributed and merged."""
    if not (dist.is_available() and dist.is_initialized()):
        return merge_states([loader.state_dict()])
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    return merge_states(states)


class CheckpointState:
    """A loader's state for `torch.distributed.checkpoint`: `dcp.save({"data": CheckpointState(loader)}, ...)`.

    The whole run's state is one value under one key, the same on every rank, so that a checkpoint loads on another
    number of ranks.

    Args:
        loader: to save or to load into.
        allow: what may have changed on purpose at loading.
    """

    def __init__(self, loader: PackedLoader, *, allow: Collection[str] = ()) -> None:
        self._loader = loader
        self._allow = allow

    def state_dict(self) -> dict[str, Any]:
        """The run's state as one JSON text."""
        return {"bagel_wds": orjson.dumps(gather_state(self._loader)).decode()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from it."""
        self._loader.load_state_dict(orjson.loads(state_dict["bagel_wds"]), allow=self._allow)
