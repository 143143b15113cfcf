"""Where a stream is, while it runs: its stages write here, and a bookmark is read off between two packs.

Between two packs every stage stands still at a sample, so that a few numbers and references say all: the cursor of each
group, what its shuffle holds, what the packer holds back, and how many draws of a group there were.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bagel_wds.errors import ConfigError
from bagel_wds.records import Cursor, SamplePlan, SampleRef
from bagel_wds.shuffle import Memory, ShuffleBuffer
from bagel_wds.state import GroupState, StreamState, pack_refs, unpack_refs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bagel_wds.mixture import Mixture
    from bagel_wds.packer import Packer
    from bagel_wds.records import Picture
    from bagel_wds.skips import Skips
    from bagel_wds.state import Refs

    Replan = Callable[[str, Sequence[SampleRef]], Sequence[SamplePlan]]
    FetchMedia = Callable[[str, Sequence[SampleRef]], Sequence[tuple[Sequence[Picture], ...] | None]]


@dataclass
class GroupBook:
    """Where one group is.

    Attributes:
        cursor: the next sample to read; at the start, where to go on from.
        buffer: of the shuffle.
        skips: what was left out, since its shard cannot be read; None where that is an error.
    """

    cursor: Cursor = field(default_factory=Cursor)
    buffer: ShuffleBuffer = field(default_factory=ShuffleBuffer)
    skips: Skips | None = None


@dataclass
class StreamBook:
    """Where one stream is.

    Attributes:
        start: the state that the stream went on from.
        groups: where each group is.
        replan: plans of samples of a group by their references.
        fetch_media: their encoded pictures; None for a sample that is lost.
        memory: of the worker.
        unknown: groups whose samples have no references: a bookmark says nothing of them.
        batches: how many batches the stream has given.
    """

    start: StreamState
    groups: Mapping[str, GroupBook]
    replan: Replan
    fetch_media: FetchMedia
    memory: Memory = field(default_factory=Memory)
    unknown: frozenset[str] = frozenset()
    batches: int = 0

    def __post_init__(self) -> None:
        self.batches = self.start.batches

    def restore(self, packer: Packer, mixture: Mixture) -> None:
        """Give packer and mixture what they had."""
        packer.held.extend(self._plans(*self.start.held))
        packer.go_on_with(self._plans(*self.start.buffer))
        packer.overdue = self.start.overdue and bool(packer.held)
        packer.deferred, packer.packs, packer.tokens = (
            self.start.deferred,
            self.start.packs,
            self.start.tokens,
        )
        mixture.picks = self.start.picks
        for name, group in self.start.groups.items():
            if group.ended:
                mixture.leave(name)

    def _plans(self, groups: Sequence[str], refs: Refs) -> Iterable[SamplePlan]:
        listed = unpack_refs(refs)
        by_group = {
            name: [ref for ref, own in zip(listed, groups, strict=True) if own == name] for name in groups
        }
        plans = {name: iter(self.replan(name, own)) for name, own in by_group.items()}
        # A sample may be gone that planned well before: the budget, or the recipe, was changed on purpose, or its shard
        # cannot be read any more.
        return [plan for name in groups if (plan := next(plans[name], None)) is not None]

    def put_away(self, plan: SamplePlan) -> SamplePlan:
        """A plan as it waits in a look-ahead: without its pictures, if there is no memory for them."""
        if not plan.media or plan.ref is None or self.memory.take(plan.ref.length):
            return plan
        return replace(plan, media=())

    def taken_out(self, plan: SamplePlan) -> None:
        """Told that a plan, as `put_away` gave it, waits no longer."""
        if plan.media and plan.ref is not None:
            self.memory.give_back(plan.ref.length)

    def whole(self, plans: Sequence[SamplePlan]) -> tuple[SamplePlan, ...]:
        """The plans with their pictures; those that were put away without are fetched, of each group together.

        A plan whose pictures are lost is left out.
        """
        bare: dict[str, list[SampleRef]] = {}
        for plan in plans:
            if plan.views and not plan.media:
                bare.setdefault(plan.group, []).append(_ref_of(plan.ref))
        media = {group: iter(self.fetch_media(group, refs)) for group, refs in bare.items()}
        found = [
            (plan, next(media[plan.group]) if plan.views and not plan.media else plan.media) for plan in plans
        ]
        return tuple(replace(plan, media=own) for plan, own in found if own is not None)

    def snapshot(self, packer: Packer, mixture: Mixture) -> StreamState:
        """The state after the pack that was just closed.

        Raises:
            ConfigError: if a reader among the stages gives no references.
        """
        return StreamState(
            stream=self.start.stream,
            groups={
                name: GroupState(
                    cursor=book.cursor,
                    shuffled=book.buffer.refs(),
                    taken=book.buffer.taken,
                    ended=not mixture.has(name),
                    skipped=book.skips.lost if book.skips else (),
                )
                for name, book in self.groups.items()
            },
            picks=mixture.picks,
            held=self._waiting(packer.held),
            buffer=self._waiting(packer.waiting),
            overdue=packer.overdue,
            deferred=packer.deferred,
            packs=packer.packs,
            tokens=packer.tokens,
        )

    def _waiting(self, plans: Iterable[SamplePlan]) -> tuple[tuple[str, ...], Refs]:
        listed = [plan for plan in plans if plan.group not in self.unknown]
        return tuple(plan.group for plan in listed), pack_refs(_ref_of(plan.ref) for plan in listed)


def _ref_of(ref: object) -> SampleRef:
    if not isinstance(ref, SampleRef):
        raise ConfigError(
            "a sample has no reference: bookmarks need the stage `read` of this project as the reader"
        )
    return ref
