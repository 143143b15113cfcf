"""The engine of a cluster: each slice is a Ray task on whatever node has room, and runs again when its node dies.

Why a slice may run twice, even at the same time. A node that does not answer any more counts as dead, and its slices begin
again elsewhere; if it lives, and only the network was down, both write. That does no harm:

* Which rows a slice has, what its shards are called and where each one ends follows from source and settings alone, so
  both write the same bytes to the same names.
* Each writes under a hidden name of its own (`storage.open_write`: 64 random bits) and renames it when it is whole. Who
  is second replaces a file by an equal one, and a reader that has it open keeps what it has. In a bucket an object appears
  whole, and both have the claim of the one conversion that they are of (`claim`).
* A mark is written after the shard that it speaks of, and says the same whoever writes it. One that a slower twin writes
  once the slice is done is not looked at, for the mark of the whole slice comes first; the end of the conversion, or
  else the beginning of the next, removes it.
* Only the process that was started by hand holds the folder, adds the marks up, and writes manifest and quarantine. It
  counts a slice once: by the one result that it took.

A twin that outlives its conversion could do harm only to one that overwrites the same folder on a disk with other settings
meanwhile. Ray ends what runs on a node that has lost the cluster, usually within a minute.
"""

from __future__ import annotations

import logging
import platform
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import TYPE_CHECKING, Any, Generic

from bagel_wds.console import format_size
from bagel_wds.errors import ConfigError, ShardError

from .engine import GO_ON, TICK_SECONDS, Engine, Part, Result, Tell, Work, explain
from .ray_cluster import import_ray, joined_cluster

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from concurrent.futures import Future

logger = logging.getLogger(__name__)

TRIES = 4
"""So often a slice is begun whose node or worker is lost each time."""

_STOP_SECONDS = 30.0
"""So long a slice that is stopped has to remove its unfinished shard."""

_QUEUE = 2
"""Tasks for each that the nodes have room for: the next one waits where the last one ends, and an autoscaler sees it."""

_DECIDERS = ("bagel-wds", "orjson", "pillow", "pyarrow")
"""Packages whose versions decide the bytes of a shard, an index or a verdict."""

Sums = tuple[int, int, int]
"""Rows, bytes, rows left out."""
Place = tuple[int, int]
"""Number of a run, and of a slice in it."""


@dataclass(frozen=True)
class ClusterShare:
    """How much of a cluster a conversion takes.

    Attributes:
        processes: slices at a time at most; None takes all that the nodes have room for.
        memory_bytes: that a slice is counted as, beside its one CPU, when Ray looks for room. It is no limit.
        patience_seconds: how long to wait for a node that has room for one slice at all.
    """

    processes: int | None = None
    memory_bytes: int = 512 << 20
    patience_seconds: float = 600.0

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"processes={self.processes} must be at least 1")


@contextmanager
def ray_engine(address: str | None = None, share: ClusterShare | None = None) -> Iterator[Engine]:
    """An engine that works on the nodes of a Ray cluster, to be used inside the block.

    Sources and output must be reachable from each node under the same absolute path or URL, and this package and its
    libraries be installed there in the same versions.

    Args:
        address: of the cluster, see `joined_cluster`.
        share: how much of it to take.

    Raises:
        ConfigError: if Ray is not installed, or the cluster cannot be reached.
    """
    with joined_cluster(address) as ray, _board(ray) as board:
        runs = count()

        def run(work: Work[Part, Result], slices: Sequence[Part], watch: Tell, /) -> Iterator[Result]:
            sums = _RunSums(ray, board, next(runs))
            return _run(ray, share or ClusterShare(), sums, work, slices, watch)

        yield run


@dataclass(frozen=True)
class _Trial(Generic[Part]):
    """A slice that is to be begun, or has been.

    Attributes:
        number: its place among the slices.
        part: the slice.
        tries: how often it was begun.
    """

    number: int
    part: Part
    tries: int = 0


@dataclass(frozen=True)
class _Done(Generic[Result]):
    """What a task sends back.

    Attributes:
        result: of the work.
        failure: what went wrong instead.
        sums: what was done.
    """

    result: Result | None
    failure: ConfigError | ShardError | None
    sums: Sums


def _run(
    ray: Any,
    share: ClusterShare,
    sums: _RunSums,
    work: Work[Part, Result],
    slices: Sequence[Part],
    watch: Tell,
) -> Iterator[Result]:
    room = _Room(ray, share)
    # Ray does not begin a slice again by itself: it would do so for ever where memory runs out.
    task = ray.remote(num_cpus=1, memory=share.memory_bytes, max_retries=0)(_work_on)
    shared = ray.put(work)
    waiting = deque(_Trial(number, part) for number, part in enumerate(slices))
    running: dict[Any, _Trial[Part]] = {}
    try:
        while waiting or running:
            for _ in range(min(len(waiting), room.at_once() - len(running))):
                trial = waiting.popleft()
                trial = replace(trial, tries=trial.tries + 1)
                running[task.remote(shared, trial.part, sums.teller(trial.number), _versions())] = trial
            ready, _ = ray.wait(list(running), num_returns=1, timeout=TICK_SECONDS)
            for ref in ready:
                trial = running.pop(ref)
                done = _collect(ray, ref, trial)
                if done is None:
                    waiting.append(trial)
                    continue
                room.was_used()
                sums.end(trial.number, done.sums)
                yield _result_of(done)
            watch(*sums.in_all())
    finally:
        _stop(ray, sums, {trial.number: ref for ref, trial in running.items()})


def _result_of(done: _Done[Result]) -> Result:
    if done.failure is not None:
        raise done.failure
    return done.result  # type: ignore[return-value] # there is one where nothing failed


def _collect(ray: Any, ref: Any, trial: _Trial[Part]) -> _Done[Any] | None:
    """What a task sent back; None if it is to be begun again, since its node or its process was lost.

    Raises:
        ShardError: if it was lost too often, or could not be begun.
    """
    try:
        done: _Done[Any] = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        # What goes wrong in the work comes back as a value: this is what was needed to begin it.
        cause = error.cause or error
        raise ShardError(
            f"{trial.part}: a node could not begin it ({type(cause).__name__}: {_first_line(cause)}): install the same "
            f"bagel-wds and libraries on every node; {GO_ON}"
        ) from error
    except ray.exceptions.RayError as error:
        cause = f"{type(error).__name__}: {_first_line(error)}"
        if trial.tries >= TRIES:
            raise ShardError(
                f"{trial.part}: its worker was lost {trial.tries} times, at last by {cause}; {GO_ON}, with fewer --processes "
                "or on nodes with more memory if that ran out"
            ) from error
        logger.warning("%s: its worker was lost (%s); it is begun again", trial.part, cause)
        return None
    return done


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


def _stop(ray: Any, sums: _RunSums, running: Mapping[int, Any]) -> None:
    """Have the slices stop that are under way, and wait until they have put away their unfinished shards.

    They are asked, by the board. `ray.cancel` would do it too, but a task that ends just then may end this process: Ray
    2.60 aborts with "Tried to complete task that was not pending".
    """
    if not running:
        return
    with suppress(ray.exceptions.RayError):
        begun = sums.stop(_STOP_SECONDS)
        refs = [ref for number, ref in running.items() if number in begun]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=_STOP_SECONDS)


class _Room:
    """How many tasks are in flight at most."""

    def __init__(self, ray: Any, share: ClusterShare) -> None:
        self._ray = ray
        self._share = share
        self._looked = -TICK_SECONDS
        self._size = 0
        self._seen = time.monotonic()

    def at_once(self) -> int:
        """As many as the nodes that are there have room for, and some that wait; at least one, so that nodes come.

        Raises:
            ShardError: if no node has had room for one for too long.
        """
        now = time.monotonic()
        if now - self._looked >= TICK_SECONDS:
            self._looked = now
            self._size = sum(self._room_of(node) for node in self._ray.nodes())
        if self._size:
            self._seen = now
        elif now - self._seen >= self._share.patience_seconds:
            raise ShardError(
                f"for {now - self._seen:.0f} seconds no node of the Ray cluster had 1 CPU and "
                f"{format_size(self._share.memory_bytes)} of memory to give to a slice; add nodes, or lower --batch-bytes if "
                f"it is memory; {GO_ON}"
            )
        most = max(1, _QUEUE * self._size)
        return most if self._share.processes is None else min(self._share.processes, most)

    def was_used(self) -> None:
        """A slice was done."""
        self._seen = time.monotonic()

    def _room_of(self, node: Mapping[str, Any]) -> int:
        """Tasks that a node can hold, if nobody else is on it."""
        if not node["Alive"]:
            return 0
        resources = node["Resources"]
        return int(min(resources.get("CPU", 0), resources.get("memory", 0) // self._share.memory_bytes))


class _Board:
    """An actor: what each slice that is under way has done so far, until somebody asks for it, and which runs are to stop."""

    def __init__(self) -> None:
        self._news: dict[Place, Sums] = {}
        self._begun: set[Place] = set()
        self._stopped: set[int] = set()

    def tell(self, place: Place, sums: Sums) -> bool:
        """So much of a slice is done; gives whether to go on with it."""
        if place[0] in self._stopped:
            return False
        self._news[place] = sums
        self._begun.add(place)
        return True

    def take(self) -> dict[Place, Sums]:
        """What was told since the last time."""
        news, self._news = self._news, {}
        return news

    def stop(self, run: int) -> set[int]:
        """Let no slice of a run go on, nor begin; gives those that have begun."""
        self._stopped.add(run)
        return {number for own, number in self._begun if own == run}


@contextmanager
def _board(ray: Any) -> Iterator[Any]:
    """The actor, which takes no CPU from slices; where it is asked, if there is room. One that is lost begins anew."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415 - an extra

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    actor = ray.remote(_Board).options(**options).remote()
    try:
        yield actor
    finally:
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)


class _RunSums:
    """What the slices of one run have done: those that ended by their results, the others by what they told.

    Telling is by the way: what is lost of it comes with the result.
    """

    def __init__(self, ray: Any, board: Any, run: int) -> None:
        self._ray = ray
        self._board = board
        self._run = run
        self._asked: Any = None
        self._ended: Sums = (0, 0, 0)
        self._numbers: set[int] = set()
        self._told: dict[int, Sums] = {}

    def teller(self, number: int) -> _Teller:
        """What tells how far a slice is."""
        return _Teller(self._board, (self._run, number))

    def end(self, number: int, sums: Sums) -> None:
        """A slice is done."""
        self._told.pop(number, None)
        self._numbers.add(number)
        self._ended = _add(self._ended, sums)

    def stop(self, timeout: float) -> set[int]:
        """Have its slices stop; gives those that have begun."""
        begun: set[int] = self._ray.get(self._board.stop.remote(self._run), timeout=timeout)
        return begun

    def in_all(self) -> Sums:
        """What is done so far; it never grows less."""
        if self._asked is None:
            self._asked = self._board.take.remote()
        elif self._ray.wait([self._asked], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError):
                self._hear(self._ray.get(self._asked))
            self._asked = self._board.take.remote()
        return _add(self._ended, *self._told.values())

    def _hear(self, news: Mapping[Place, Sums]) -> None:
        for (run, number), (rows, num_bytes, quarantined) in news.items():
            if run == self._run and number not in self._numbers:
                # One that was begun again comes to where it was.
                before = self._told.get(number, (0, 0, 0))
                self._told[number] = (
                    max(before[0], rows),
                    max(before[1], num_bytes),
                    max(before[2], quarantined),
                )


def _add(*sums: Sums) -> Sums:
    rows, num_bytes, quarantined = map(sum, zip(*sums, strict=True))
    return rows, num_bytes, quarantined


class _Teller:
    """On a node: what was done of one slice, passed on about once a second, and whether it is to stop."""

    def __init__(self, board: Any, place: Place) -> None:
        self._board = board
        self._place = place
        self._told = time.monotonic()
        self._answer: Future[bool] | None = None
        self.sums: Sums = (0, 0, 0)

    def begin(self) -> bool:
        """Whether the slice is to begin at all. A board that cannot be reached for the moment does not keep it.

        Raises:
            ShardError: if the board is gone, as it is once the conversion has ended.
        """
        ray = import_ray()
        try:
            # A future's wait, unlike `ray.get`, does not have Ray give this task's place to another meanwhile.
            answer: bool = self._board.tell.remote(self._place, self.sums).future().result(_STOP_SECONDS)
        except ray.exceptions.ActorDiedError as error:
            raise ShardError("the conversion that it is a part of has ended") from error
        except (ray.exceptions.RayError, TimeoutError):
            return True
        return answer

    def add(self, rows: int, num_bytes: int, quarantined: int) -> None:
        """Add what is new.

        Raises:
            KeyboardInterrupt: if the slice is to stop.
        """
        self.sums = _add(self.sums, (rows, num_bytes, quarantined))
        if self._answer is not None and self._answer.done():
            # What went wrong in telling is told the next time.
            if self._answer.exception() is None and not self._answer.result():
                raise KeyboardInterrupt
            self._answer = None
        now = time.monotonic()
        # Another host's clock reads otherwise, earlier or later.
        if self._answer is None and not 0 <= now - self._told < TICK_SECONDS:
            self._told = now
            self._answer = self._board.tell.remote(self._place, self.sums).future()


def _work_on(
    work: Work[Part, Result], part: Part, teller: _Teller, versions: Mapping[str, str]
) -> _Done[Result]:
    """On a node: do the work of one slice, and tell now and then how far it is."""
    try:
        _check_versions(versions)
        result = work(part, teller.add) if teller.begin() else None
        return _Done(result, None, teller.sums)
    except KeyboardInterrupt:
        # It was asked to stop, and nobody waits for what it has.
        return _Done(None, None, teller.sums)
    except Exception as error:  # noqa: BLE001 - it is raised where the conversion was started
        return _Done(None, explain(part, error), teller.sums)


@cache
def _versions() -> Mapping[str, str]:
    """Of the packages that decide the bytes, as they are installed here."""
    return {name: _version(name) for name in _DECIDERS}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _check_versions(wanted: Mapping[str, str]) -> None:
    here = _versions()
    if here != wanted:
        name = next(name for name in wanted if here[name] != wanted[name])
        raise ConfigError(
            f"node {platform.node()} has {name} {here[name]}, and the conversion was started with {wanted[name]}: shards "
            "would not be the same on every node; install one version everywhere"
        )
