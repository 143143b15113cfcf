"""Groups mixed by weight: an iterator of plans that a packer can also ask for one group's next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.records import SamplePlan
    from bagel_wds.rng import Draws


@dataclass(frozen=True)
class MixGroup:
    """One group of a mixture.

    Attributes:
        name: of the group.
        plans: its plans, in order.
        weight: its share of the draws, relative to the others.
        mandatory: whether every pack opens with one of its samples.
    """

    name: str
    plans: Iterator[SamplePlan]
    weight: float = 1.0
    mandatory: bool = False


class Mixture:
    """Draws groups by weight. As an iterator it gives plans so drawn; `take` gives the next of one group.

    A group that has ended leaves the mixture; the weights of the others keep their proportion.

    Args:
        groups: in the order of the mixture file.
        draws: where the choice of a group comes from; draw n has the purpose `group:n`.
    """

    def __init__(self, groups: Sequence[MixGroup], draws: Draws) -> None:
        self._groups = {group.name: group for group in groups}
        self._draws = draws
        self.picks = 0
        self._reweigh()

    def _reweigh(self) -> None:
        self._names = list(self._groups)
        self._cumulative = list(accumulate(group.weight for group in self._groups.values()))

    @property
    def mandatory(self) -> list[str]:
        """Groups of which every pack has a sample, in order."""
        return [group.name for group in self._groups.values() if group.mandatory]

    def pick(self) -> str | None:
        """Draw a group: the first whose cumulative share exceeds the draw. None when none with a weight is left."""
        if not self._cumulative or self._cumulative[-1] <= 0:
            return None
        draw = self._draws.random(f"group:{self.picks}")
        self.picks += 1
        total = self._cumulative[-1]
        for name, cumulative in zip(self._names, self._cumulative, strict=True):
            if draw < cumulative / total:
                return name
        return self._names[0]

    def take(self, group: str) -> SamplePlan | None:
        """The next plan of a group; None if it has ended, and then it leaves the mixture."""
        member = self._groups.get(group)
        plan = next(member.plans, None) if member else None
        if plan is None:
            self.leave(group)
        return plan

    def leave(self, group: str) -> None:
        """Take a group out of the mixture."""
        if self._groups.pop(group, None):
            self._reweigh()

    def has(self, group: str) -> bool:
        """Whether a group is still in the mixture."""
        return group in self._groups

    def __iter__(self) -> Mixture:
        return self

    def __next__(self) -> SamplePlan:
        while (group := self.pick()) is not None:
            plan = self.take(group)
            if plan is not None:
                return plan
        raise StopIteration
