"""Upstream's way to share out paths: sorted, shuffled by a seed, cut into equal runs for ranks, and those for workers."""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset, get_worker_info

from bagel_wds.errors import BadSample, ConfigError, NoUsableSampleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Self

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One row of a source, before anything of it is decoded.

    Attributes:
        position: the resume position of upstream's `data_status`.
        place: how a message names it.
        value: what the file holds.
    """

    position: int | tuple[int, ...]
    place: str
    value: Any

    @property
    def status(self) -> Any:
        """The position as upstream writes it."""
        return list(self.position) if isinstance(self.position, tuple) else self.position


class DistributedIterableDataset(IterableDataset[dict[str, Any]]):
    """A dataset whose paths are shared out over ranks and workers. Subclasses fill `data_paths`, and iterate.

    Paths that do not divide by ranks, and then by workers, are left out, and told of. In a worker of a DataLoader a run of
    paths comes in reverse. The private `rng` orders paths and nothing else.

    Args:
        dataset_name: `dataset_name` in the `data_indexes` of each sample.
        local_rank: of this process among all (upstream's name for it).
        world_size: number of processes.
        num_workers: of the DataLoader.
    """

    _knows_other_ranks = True

    def __init__(
        self, dataset_name: str, local_rank: int = 0, world_size: int = 1, num_workers: int = 8
    ) -> None:
        self.dataset_name = dataset_name
        self.local_rank = local_rank
        self.world_size = world_size
        self.num_workers = num_workers
        self.rng = random.Random()  # noqa: S311 - orders paths
        self.data_paths: list[Any] | None = None
        self.data_paths_per_rank: list[Any] = []
        self.num_files_per_rank = 0
        self.data_status: Any = None
        self._resume_data_status: Any = None
        self._drop_counters: dict[str, int] = {}

    def get_data_paths(self, *args: Any, **kwargs: Any) -> list[Any]:
        """All paths, whoever will read them: strings, or tuples that begin with two values to sort by."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples without end."""
        raise NotImplementedError

    def set_epoch(self, seed: int = 42) -> None:
        """Order the paths by a seed, and take this rank's share of them.

        Raises:
            ConfigError: if there are fewer paths than ranks; in a worker process, which has its rank's share alone.
        """
        if self.data_paths is None:
            return
        if not self._knows_other_ranks:
            raise ConfigError(
                f"dataset {self.dataset_name!r}: a worker has the paths of its rank alone, and cannot order them anew; call "
                "set_epoch where the DataLoader is made"
            )
        paths = self._sorted(self.data_paths)
        self.rng.seed(seed)
        self.rng.shuffle(paths)
        self.num_files_per_rank, left = divmod(len(paths), self.world_size)
        if not self.num_files_per_rank:
            raise ConfigError(
                f"dataset {self.dataset_name!r} has {len(paths)} paths for world_size={self.world_size}, and each rank needs "
                "one; take fewer ranks, split the files, or name a larger num_used_data, which repeats them"
            )
        self._tell_of(left, self.world_size, "ranks")
        start = self.local_rank * self.num_files_per_rank
        self.data_paths_per_rank = paths[start : start + self.num_files_per_rank]

    def of_this_rank(self) -> Self:
        """A copy that has this rank's share of the paths alone, in the order that it has now."""
        other = copy.copy(self)
        vars(other).update(data_paths=[], _knows_other_ranks=False)
        return other

    def _sorted(self, paths: Sequence[Any]) -> list[Any]:
        if not paths:
            raise ConfigError(
                f"dataset {self.dataset_name!r} has no data paths; see what its folders and files hold"
            )
        if isinstance(paths[0], tuple):
            return sorted(paths, key=lambda path: path[:2])
        if isinstance(paths[0], str):
            return sorted(paths)
        raise ConfigError(
            f"dataset {self.dataset_name!r}: a data path is {type(paths[0]).__name__}, neither a string nor a tuple"
        )

    def get_data_paths_per_worker(self) -> tuple[list[Any], int] | None:
        """The paths that this worker reads, in order, and its number; None where there are no paths at all.

        Raises:
            ConfigError: if there are fewer paths than workers.
        """
        if self.data_paths is None:
            return None
        info = get_worker_info()
        return self.share_of(info.id, info.num_workers) if info else self.share_of(0, 0)

    def share_of(self, worker: int, num_workers: int) -> tuple[list[Any], int]:
        """The paths of one of so many workers, in order, and its number; no workers is the process itself.

        Raises:
            ConfigError: if there are fewer paths than workers.
        """
        if not num_workers:
            return self.data_paths_per_rank, 0
        each, left = divmod(self.num_files_per_rank, num_workers)
        if not each:
            raise ConfigError(
                f"dataset {self.dataset_name!r} has {self.num_files_per_rank} paths on rank {self.local_rank} for "
                f"{num_workers} workers, and each worker needs one; take fewer workers, split the files, or name a larger "
                "num_used_data, which repeats them"
            )
        if worker == 0:
            self._tell_of(left, num_workers, "workers")
        return self.data_paths_per_rank[each * worker : each * (worker + 1)][::-1], worker

    def _tell_of(self, left: int, among: int, who: str) -> None:
        if left:
            logger.warning(
                "dataset %r: %d paths are left out, as upstream does, since they do not divide by %d %s",
                self.dataset_name,
                left,
                among,
                who,
            )

    def set_data_status(self, data_status: Sequence[Any] | None) -> None:
        """Go on from these positions, one a worker; None is the start."""
        self.data_status = copy.deepcopy(data_status)
        self._resume_data_status = copy.deepcopy(data_status)

    def _get_worker_data_status(self, worker_id: int) -> Any:
        """The position behind which a worker goes on; None is the start."""
        if self.data_status is None:
            return None
        if worker_id >= len(self.data_status):
            raise ConfigError(
                f"dataset {self.dataset_name!r}: data_status has {len(self.data_status)} positions, and none for worker "
                f"{worker_id}; go on with as many workers as saved it"
            )
        return self.data_status[worker_id]

    def status_of(self, worker: int) -> Any:
        """The position behind which a worker goes on, as `set_data_status` gave it."""
        return self._get_worker_data_status(worker)

    def _set_worker_resume_data_status(self, worker_id: int, status: Any) -> None:
        """Keep the position of the sample that a worker gives."""
        known = list(self._resume_data_status or ())
        missing = max(int(self.num_workers), worker_id + 1) - len(known)
        self._resume_data_status = [*known, *[None] * missing]
        self._resume_data_status[worker_id] = copy.deepcopy(status)

    def state_dict(self) -> dict[str, Any]:
        """`data_status`: the position of the last sample that each worker of this process has given."""
        return {"data_status": copy.deepcopy(self._resume_data_status)}

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Go on from a state of `state_dict`."""
        self.set_data_status(None if state_dict is None else state_dict.get("data_status"))

    def _log_drop(
        self, reason: str, message: str, *args: Any, every: int = 100, exc_info: bool = False
    ) -> None:
        """Count a drop, and tell of the first three of a reason and of each `every`-th."""
        count = self._drop_counters[reason] = self._drop_counters.get(reason, 0) + 1
        if count <= 3 or count % every == 0:
            logging.getLogger(type(self).__module__).warning(
                f"%s drop[%s]=%d: {message}",  # noqa: G004 - the message is a pattern for args
                self.dataset_name,
                reason,
                count,
                *args,
                exc_info=exc_info,
            )

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """How many rows this process has left out, by reason."""
        return dict(self._drop_counters)

    def walk(
        self,
        rows: Callable[[Sequence[Any], Any], Iterable[Row]],
        use: Callable[[Row, int], T | None],
        drop: Callable[[Row, BadSample], None],
    ) -> Iterator[T]:
        """What is made of the rows of this worker, pass after pass, from where `data_status` says; positions are kept.

        Args:
            rows: one pass over some paths, behind a position or from the start.
            use: what becomes of a row in a worker; None is left out without a word.
            drop: told of a row for which `use` raised BadSample.

        Raises:
            NoUsableSampleError: if a whole pass gives nothing.
        """
        share = self.get_data_paths_per_worker()
        if share is None:
            raise ConfigError(
                f"dataset {self.dataset_name!r} has no data paths; set data_paths in its constructor"
            )
        paths, worker = share
        behind = self._get_worker_data_status(worker)
        for row, made in self.passes(rows, use, drop, paths, worker, behind):
            self._set_worker_resume_data_status(worker, row.status)
            yield made

    def passes(
        self,
        rows: Callable[[Sequence[Any], Any], Iterable[Row]],
        use: Callable[[Row, int], T | None],
        drop: Callable[[Row, BadSample], None],
        paths: Sequence[Any],
        worker: int,
        behind: Any,
    ) -> Iterator[tuple[Row, T]]:
        """The same of some paths from behind a position on, each with its row; no position is kept.

        Raises:
            NoUsableSampleError: if a whole pass gives nothing.
        """
        while True:
            given, refused = 0, Counter[str]()
            last = ""
            for row in rows(paths, behind):
                try:
                    made = use(row, worker)
                except BadSample as bad:
                    refused[str(bad.reason)] += 1
                    last = f"{row.place}: {bad.detail}"
                    drop(row, bad)
                    continue
                if made is None:
                    continue
                given += 1
                yield row, made
            if not given and behind is None:
                reasons = ", ".join(f"{reason} {count}" for reason, count in refused.items())
                raise NoUsableSampleError(
                    f"group {self.dataset_name!r} ({type(self).__name__}): no usable sample in a whole pass over "
                    f"{len(paths)} paths; dropped: {reasons or 'nothing, there is no row'}"
                    + (f"; the last was {last}" if last else "")
                )
            behind = None
