"""Which samples go together: lengths in, packs out. A state machine over plans that never sees a pixel.

A packer asks its `Supply` for plans: one of each mandatory group first, then by weight. What it keeps between packs is
in its attributes. `docs/packing.md` compares the rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Protocol

from bagel_wds.errors import NoUsableSampleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from bagel_wds.records import SamplePlan


class Supply(Protocol):
    """Where plans come from."""

    @property
    def mandatory(self) -> Sequence[str]:
        """Groups of which every pack has a sample, in order."""

    def pick(self) -> str | None:
        """Draw a group by weight; None once every group has ended."""

    def take(self, group: str) -> SamplePlan | None:
        """The next plan of a group; None once it has ended."""


@dataclass(frozen=True, kw_only=True)
class PackLimits:
    """Budgets of a pack and of what waits for one, with the meaning that `BagelDatasetConfig` gives them."""

    expected_num_tokens: int = 32768
    max_num_tokens_per_sample: int = 16384
    max_num_tokens: int = 36864
    prefer_buffer_before: int = 16384
    max_buffer_size: int = 50
    look_ahead: int = 256
    look_ahead_bytes: int = 64 << 20

    @property
    def longest_sample(self) -> int:
        """No sample may need more: it would fit into no pack, or is over its own limit."""
        return min(self.max_num_tokens_per_sample, self.max_num_tokens)


class Packer(ABC):
    """What the rules that lose nothing have in common: how a pack opens, and what waits.

    A pack opens with one sample of each mandatory group, behind them the held samples that fit. A held sample that
    finds no room there opens the next pack, ahead of the mandatory ones, so none waits for ever.

    Args:
        limits: budgets.

    Attributes:
        held: samples that found no room in a pack that should have had them, oldest first.
        overdue: the first held sample opens the next pack.
        deferred: how often a sample had to wait for a later pack.
        packs: how many were given.
        tokens: in all of them.
    """

    def __init__(self, limits: PackLimits) -> None:
        self.limits = limits
        self.held: deque[SamplePlan] = deque()
        self.overdue = False
        self.deferred = self.packs = self.tokens = 0
        self._pack: list[SamplePlan] = []
        self._position = 0

    @property
    @abstractmethod
    def waiting(self) -> Iterable[SamplePlan]:
        """Samples that wait beside the held ones, oldest first."""

    @abstractmethod
    def go_on_with(self, waiting: Iterable[SamplePlan]) -> None:
        """Let these wait, in this order: those of a bookmark."""

    @abstractmethod
    def _fill(self, supply: Supply) -> None:
        """Add samples to a pack that is open."""

    def next_pack(self, supply: Supply) -> tuple[SamplePlan, ...] | None:
        """The plans of the next pack, in order; None when the supply has ended and nothing is left.

        Raises:
            ValueError: for a plan longer than any pack, which the plan stage should have dropped.
        """
        self._pack, self._position = [], 0
        if self.overdue:
            self._add_if_it_fits(self.held.popleft())
        self._open_with_mandatory(supply)
        waiting = deque(plan for plan in self.held if not self._add_if_it_fits(plan))
        self.held, self.overdue = waiting, bool(waiting)
        self._fill(supply)
        if not self._pack:
            return None
        self.packs += 1
        self.tokens += self._position
        return tuple(self._pack)

    def _open_with_mandatory(self, supply: Supply) -> None:
        present = {plan.group for plan in self._pack}
        for group in supply.mandatory:
            if group in present:
                continue
            place = next((place for place, plan in enumerate(self.held) if plan.group == group), None)
            if place is None:
                plan = supply.take(group)
                if plan is not None and not self._add_if_it_fits(plan):
                    self._hold(plan)
            elif self._add_if_it_fits(self.held[place]):
                # One that does not fit keeps its place in the line, or it would never come to its head.
                del self.held[place]

    def _hold(self, plan: SamplePlan) -> None:
        self.held.append(plan)
        self.deferred += 1

    def _add_if_it_fits(self, plan: SamplePlan) -> bool:
        length = self._length_of(plan)
        if self._position + length > self.limits.max_num_tokens:
            return False
        self._pack.append(plan)
        self._position += length
        return True

    def _length_of(self, plan: SamplePlan) -> int:
        length = plan.length
        if length > self.limits.max_num_tokens:
            raise ValueError(
                f"sample {plan.key!r} of group {plan.group!r} needs {length} tokens; a pack has "
                f"{self.limits.max_num_tokens}"
            )
        return length


class GreedyPacker(Packer):
    """Packs samples in the order in which they come; loses none.

    Behind what opens a pack come, while it is under `prefer_buffer_before`, the samples in the buffer, then new ones,
    until it has `expected_num_tokens`. A new sample that does not fit goes to the buffer, or, when that is full, is
    held and closes the pack.

    Attributes:
        buffer: samples set aside while a pack went on, oldest first.
    """

    def __init__(self, limits: PackLimits) -> None:
        super().__init__(limits)
        self.buffer: deque[SamplePlan] = deque()
        self._buffer_served = False

    @property
    def waiting(self) -> Iterable[SamplePlan]:
        """The buffer."""
        return self.buffer

    def go_on_with(self, waiting: Iterable[SamplePlan]) -> None:
        """Put these into the buffer."""
        self.buffer.extend(waiting)

    def _fill(self, supply: Supply) -> None:
        self._buffer_served = False
        while self._position < self.limits.expected_num_tokens and self._fill_one(supply):
            pass
        self._relieve_buffer()

    def _relieve_buffer(self) -> None:
        """Let the oldest sample of a full buffer open the next pack, if this one had no place to look at it.

        BAGEL: where mandatory samples alone reach `prefer_buffer_before`, what is in the buffer never comes.
        """
        if not self._buffer_served and len(self.buffer) >= self.limits.max_buffer_size > 0:
            self.held.appendleft(self.buffer.popleft())
            self.overdue = True

    def _fill_one(self, supply: Supply) -> bool:
        """Place one more sample; False closes the pack."""
        if self.buffer and self._position < self.limits.prefer_buffer_before:
            plan = self.buffer.popleft()
            self._buffer_served = True
            return self._add_or_close(plan)
        room = len(self.buffer) < self.limits.max_buffer_size
        if self.held and not room:
            # Whatever came now and did not fit would have no place to wait.
            return False
        group = supply.pick()
        if group is None:
            return self._drain()
        drawn = supply.take(group)
        if drawn is None:
            return True
        if not room:
            return self._add_or_close(drawn)
        if not self._add_if_it_fits(drawn):
            self.buffer.append(drawn)
            self.deferred += 1
        return True

    def _add_or_close(self, plan: SamplePlan) -> bool:
        if self._add_if_it_fits(plan):
            return True
        self._hold(plan)
        return False

    def _drain(self) -> bool:
        """The supply has ended: take from the buffer whatever the position."""
        if not self.buffer or not self._add_if_it_fits(self.buffer[0]):
            return False
        self.buffer.popleft()
        return True


class LookAhead:
    """Planned samples to choose from: by age, and by length in logarithmic time. Iterates oldest first."""

    def __init__(
        self, put_away: Callable[[SamplePlan], SamplePlan], taken_out: Callable[[SamplePlan], None]
    ) -> None:
        self._put_away = put_away
        self._taken_out = taken_out
        self._plans: dict[int, SamplePlan] = {}
        # (length, minus the arrival): of equal lengths the oldest comes last, where a search from above finds it.
        self._by_length: list[tuple[int, int]] = []
        self._arrivals = count()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[SamplePlan]:
        return iter(self._plans.values())

    def append(self, plan: SamplePlan, length: int) -> None:
        """Put a plan of so many tokens in as the youngest."""
        arrival = next(self._arrivals)
        insort(self._by_length, (length, -arrival))
        self.num_bytes += plan_bytes(plan)
        self._plans[arrival] = self._put_away(plan)

    def take_oldest(self, length: int) -> SamplePlan:
        """Take the oldest plan out, which has so many tokens."""
        return self._take(bisect_left(self._by_length, (length, -next(iter(self._plans)))))

    def oldest(self) -> SamplePlan:
        """The oldest plan."""
        return next(iter(self))

    def take_longest(self, room: int) -> SamplePlan | None:
        """Take out the longest plan of at most `room` tokens, of equal ones the oldest; None if there is none."""
        place = bisect_right(self._by_length, (room, 0)) - 1
        return self._take(place) if place >= 0 else None

    def _take(self, place: int) -> SamplePlan:
        _, arrival = self._by_length.pop(place)
        plan = self._plans.pop(-arrival)
        self.num_bytes -= plan_bytes(plan)
        self._taken_out(plan)
        return plan


def plan_bytes(plan: SamplePlan) -> int:
    """The bytes that a plan keeps in memory: its sample in the tar, where its place is known, else its pictures."""
    if plan.ref is not None:
        return plan.ref.length
    return sum(picture.num_bytes for medium in plan.media for picture in medium)


class BestFitPacker(Packer):
    """Fills each pack as far as a look-ahead of planned samples allows; loses none.

    The look-ahead is filled from the supply, by weight and in order, up to `look_ahead` samples or `look_ahead_bytes`.
    Behind what opens a pack comes the oldest sample of the look-ahead, then always the longest that fits the room that
    is left, until nothing in a full look-ahead fits. So a sample waits for at most twice as many packs as there were
    samples before it. `expected_num_tokens` closes no pack: one with fewer is given only where nothing fits.

    Args:
        limits: budgets.
        put_away: gives a plan as it waits in the look-ahead, of the same length.
        taken_out: told of each plan that waits there no longer, as it waited.

    Attributes:
        look_ahead: what there is to choose from.
    """

    def __init__(
        self,
        limits: PackLimits,
        put_away: Callable[[SamplePlan], SamplePlan] = lambda plan: plan,
        taken_out: Callable[[SamplePlan], None] = lambda _plan: None,
    ) -> None:
        super().__init__(limits)
        self.look_ahead = LookAhead(put_away, taken_out)

    @property
    def waiting(self) -> Iterable[SamplePlan]:
        """The look-ahead."""
        return self.look_ahead

    def go_on_with(self, waiting: Iterable[SamplePlan]) -> None:
        """Put these into the look-ahead."""
        for plan in waiting:
            self.look_ahead.append(plan, self._length_of(plan))

    def _fill(self, supply: Supply) -> None:
        self._top_up(supply)
        self._serve_oldest(supply)
        while self._position < self.limits.max_num_tokens and (
            self._add_longest() or (self._top_up(supply) and self._add_longest())
        ):
            pass

    def _top_up(self, supply: Supply) -> bool:
        """Draw until the look-ahead is full or the supply has ended; tells whether anything came."""
        before = len(self.look_ahead)
        while not self._is_full() and (group := supply.pick()) is not None:
            plan = supply.take(group)
            if plan is not None:
                self.look_ahead.append(plan, self._length_of(plan))
        return len(self.look_ahead) > before

    def _is_full(self) -> bool:
        held = len(self.look_ahead)
        enough = self.look_ahead.num_bytes >= self.limits.look_ahead_bytes
        return held >= self.limits.look_ahead or (held > 0 and enough)

    def _serve_oldest(self, supply: Supply) -> None:
        """Add the oldest sample; where it has no room it is held, as long as no more are than packs can relieve."""
        if not self.look_ahead:
            return
        plan = self.look_ahead.oldest()
        length = plan.length
        if self._add_if_it_fits(plan):
            self.look_ahead.take_oldest(length)
        elif len(self.held) <= len(supply.mandatory):
            self._hold(self.look_ahead.take_oldest(length))
            self.overdue = True

    def _add_longest(self) -> bool:
        plan = self.look_ahead.take_longest(self.limits.max_num_tokens - self._position)
        return plan is not None and self._add_if_it_fits(plan)


MAX_PASSED_OVER = 10_000
"""So many samples in a row that are too long end a run, rather than leave it searching for ever."""


class UpstreamPacker:
    """Packs as upstream does, so that the same draws give the same batches.

    BAGEL: the length estimate, before dropout, decides; a mandatory sample at the limit is passed over and the batch
    limit is not looked at; the sample that closes a pack is lost; a pack may be empty. See docs/divergence.md.

    Args:
        limits: token budgets.
        settle: makes the dropout and timestep draws of a plan, at the moment it is packed.
        gone: told of each sample that leaves unpacked: `overlength_sample`, `overlength_mandatory_sample`, `lost`.
    """

    def __init__(
        self,
        limits: PackLimits,
        settle: Callable[[SamplePlan], SamplePlan],
        gone: Callable[[SamplePlan, str], None] = lambda _plan, _why: None,
    ) -> None:
        self.limits = limits
        self.buffer: deque[SamplePlan] = deque()
        self._settle = settle
        self._gone = gone
        self._pack: list[SamplePlan] = []
        self._position = 0
        self._passed_over = 0

    def next_pack(self, supply: Supply) -> tuple[SamplePlan, ...] | None:
        """The plans of the next batch, settled; None when the supply has ended.

        Raises:
            NoUsableSampleError: if `MAX_PASSED_OVER` samples in a row are too long.
        """
        self._pack, self._position = [], 0
        while True:
            if self._position == 0 and not self._open_with_mandatory(supply):
                return tuple(self._pack) or None
            from_buffer = self._position < self.limits.prefer_buffer_before and bool(self.buffer)
            plan = self.buffer.popleft() if from_buffer else self._draw(supply)
            if plan is None:
                return tuple(self._pack) or None
            if plan.estimate > self.limits.max_num_tokens_per_sample:
                self._pass_over(plan, "overlength_sample")
            elif self._position + plan.estimate <= self.limits.max_num_tokens:
                self._add(plan)
                # Looked at only here: mandatory samples alone do not close a pack.
                if self._position >= self.limits.expected_num_tokens:
                    return tuple(self._pack)
            elif len(self.buffer) < self.limits.max_buffer_size and not from_buffer:
                self.buffer.append(plan)
            else:
                self._gone(plan, "lost")
                return tuple(self._pack)

    def _open_with_mandatory(self, supply: Supply) -> bool:
        for group in supply.mandatory:
            plan = supply.take(group)
            while plan is not None and plan.estimate >= self.limits.max_num_tokens_per_sample:
                self._pass_over(plan, "overlength_mandatory_sample")
                plan = supply.take(group)
            if plan is None:
                return False
            self._add(plan)
        return True

    def _pass_over(self, plan: SamplePlan, why: str) -> None:
        """BAGEL: looks for one that is short enough for ever."""
        self._gone(plan, why)
        self._passed_over += 1
        if self._passed_over >= MAX_PASSED_OVER:
            raise NoUsableSampleError(
                f"{self._passed_over} samples in a row are too long, the last of group {plan.group!r} with {plan.estimate} "
                f"tokens; raise max_num_tokens_per_sample={self.limits.max_num_tokens_per_sample}"
            )

    def _draw(self, supply: Supply) -> SamplePlan | None:
        group = supply.pick()
        return None if group is None else supply.take(group)

    def _add(self, plan: SamplePlan) -> None:
        self._passed_over = 0
        settled = self._settle(plan)
        self._pack.append(settled)
        self._position += settled.length
