"""Which samples go together: lengths in, packs out. A state machine over plans that never sees a pixel.

A packer asks its `Supply` for plans: one of each mandatory group first, then by weight. What it keeps between packs is
in its attributes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Token budgets of a pack, with the meaning that `BagelDatasetConfig` gives them."""

    expected_num_tokens: int = 32768
    max_num_tokens_per_sample: int = 16384
    max_num_tokens: int = 36864
    prefer_buffer_before: int = 16384
    max_buffer_size: int = 50

    @property
    def longest_sample(self) -> int:
        """No sample may need more: it would fit into no pack, or is over its own limit."""
        return min(self.max_num_tokens_per_sample, self.max_num_tokens)


class GreedyPacker:
    """Packs samples in the order in which they come; loses none.

    A pack opens with one sample of each mandatory group. Then come the held samples (those that closed an earlier
    pack), then, while the pack is under `prefer_buffer_before`, those in the buffer, then new ones. A new sample
    that does not fit goes to the buffer, or, when that is full, is held and closes the pack. A held sample that
    finds no room behind the mandatory ones opens the next pack ahead of them, so none waits for ever.

    Args:
        limits: token budgets.

    Attributes:
        held: samples that closed a pack, oldest first.
        buffer: samples set aside while a pack went on, oldest first.
        overdue: the first held sample opens the next pack, ahead of the mandatory ones.
        deferred: how often a sample had to wait for a later pack.
    """

    def __init__(self, limits: PackLimits) -> None:
        self.limits = limits
        self.held: deque[SamplePlan] = deque()
        self.buffer: deque[SamplePlan] = deque()
        self.deferred = 0
        self._pack: list[SamplePlan] = []
        self._position = 0
        self._buffer_served = False
        self.overdue = False

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
        self._buffer_served = False
        while self._position < self.limits.expected_num_tokens and self._fill_one(supply):
            pass
        self._relieve_buffer()
        return tuple(self._pack) or None

    def _relieve_buffer(self) -> None:
        """Let the oldest sample of a full buffer open the next pack, if this one had no place to look at it.

        BAGEL: where mandatory samples alone reach `prefer_buffer_before`, what is in the buffer never comes.
        """
        if not self._buffer_served and len(self.buffer) >= self.limits.max_buffer_size > 0:
            self.held.appendleft(self.buffer.popleft())
            self.overdue = True

    def _open_with_mandatory(self, supply: Supply) -> None:
        present = {plan.group for plan in self._pack}
        for group in supply.mandatory:
            if group in present:
                continue
            plan = next((plan for plan in self.held if plan.group == group), None)
            if plan is not None:
                self.held.remove(plan)
            else:
                plan = supply.take(group)
            if plan is not None and not self._add_if_it_fits(plan):
                self._hold(plan)

    def _fill_one(self, supply: Supply) -> bool:
        """Place one more sample; False closes the pack."""
        if self.buffer and self._position < self.limits.prefer_buffer_before:
            plan = self.buffer.popleft()
            self._buffer_served = True
            return self._add_if_it_fits(plan) or self._hold(plan)
        room = len(self.buffer) < self.limits.max_buffer_size
        if self.held and not room:
            # Whatever came now and did not fit would have no place to wait.
            return False
        group = supply.pick()
        if group is None:
            return self._drain()
        drawn = supply.take(group)
        if drawn is None or self._add_if_it_fits(drawn):
            return True
        if room:
            self.buffer.append(drawn)
            self.deferred += 1
            return True
        return self._hold(drawn)

    def _drain(self) -> bool:
        """The supply has ended: take from the buffer whatever the position."""
        if not self.buffer or not self._add_if_it_fits(self.buffer[0]):
            return False
        self.buffer.popleft()
        return True

    def _hold(self, plan: SamplePlan) -> bool:
        self.held.append(plan)
        self.deferred += 1
        return False

    def _add_if_it_fits(self, plan: SamplePlan) -> bool:
        if plan.length > self.limits.max_num_tokens:
            raise ValueError(
                f"sample {plan.key!r} of group {plan.group!r} needs {plan.length} tokens; a pack has "
                f"{self.limits.max_num_tokens}"
            )
        if self._position + plan.length > self.limits.max_num_tokens:
            return False
        self._pack.append(plan)
        self._position += plan.length
        return True


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

    def next_pack(self, supply: Supply) -> tuple[SamplePlan, ...] | None:
        """The plans of the next batch, settled; None when the supply has ended."""
        self._pack, self._position = [], 0
        while True:
            if self._position == 0 and not self._open_with_mandatory(supply):
                return tuple(self._pack) or None
            from_buffer = self._position < self.limits.prefer_buffer_before and bool(self.buffer)
            plan = self.buffer.popleft() if from_buffer else self._draw(supply)
            if plan is None:
                return tuple(self._pack) or None
            if plan.estimate > self.limits.max_num_tokens_per_sample:
                self._gone(plan, "overlength_sample")
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
                self._gone(plan, "overlength_mandatory_sample")
                plan = supply.take(group)
            if plan is None:
                return False
            self._add(plan)
        return True

    def _draw(self, supply: Supply) -> SamplePlan | None:
        group = supply.pick()
        return None if group is None else supply.take(group)

    def _add(self, plan: SamplePlan) -> None:
        settled = self._settle(plan)
        self._pack.append(settled)
        self._position += settled.length
