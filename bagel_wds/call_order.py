"""Where a stream of `fidelity="upstream"` is: its draws hang on all before, so their generators are part of the state.

Samples that wait in the packer's buffer were planned with draws that are gone: their plans are in the state, and of their
pictures the places.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bagel_wds.errors import ConfigError
from bagel_wds.records import Kind, SamplePlan, SampleRef, Segment, View
from bagel_wds.state import GroupState, StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bagel_wds.bookmark import GroupBook
    from bagel_wds.packer import UpstreamPacker
    from bagel_wds.records import Picture
    from bagel_wds.rng import CallOrderDraws

    Media = tuple[Sequence[Picture], ...]


class Rows(Protocol):
    """A group that is read from raw files in upstream's order."""

    @property
    def position(self) -> Any:
        """Of the last row that gave a plan; None at the start."""

    def media(self, positions: Iterable[Any]) -> Mapping[Any, Media]:
        """The encoded pictures of some rows, by position."""


@dataclass(frozen=True)
class CallOrderBook:
    """Where one stream is.

    Attributes:
        start: the state that the stream went on from.
        num_workers: of the DataLoader; only as many can go on.
        draws: of the stream.
        groups: where each group in shards is.
        rows: the groups in raw files.
        fetch: the encoded pictures of a sample in shards.
    """

    start: StreamState
    num_workers: int
    draws: CallOrderDraws
    groups: Mapping[str, GroupBook]
    rows: Mapping[str, Rows]
    fetch: Callable[[str, SampleRef], Media]
    _written: dict[int, tuple[SamplePlan, dict[str, Any]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def restore(self, packer: UpstreamPacker) -> None:
        """Give the packer what waited, and the generators what they had.

        Raises:
            ConfigError: if the state is broken, or speaks of rows that are not there, or cannot be used, any more.
            ShardError: if it speaks of such samples in shards.
        """
        saved = self.start.call_order
        if saved is None:
            return
        try:
            waiting = [plan_from_json(entry) for entry in saved["buffer"]]
            restore_generators(self.draws, saved["generators"])
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ConfigError(f"the state of stream {self.start.stream} is broken: {error!r}") from error
        packer.buffer.extend(self._with_media(waiting))

    def snapshot(self, packer: UpstreamPacker) -> StreamState:
        """The state after the pack that was just closed. A sample of a user's class that waits is left out."""
        return StreamState(
            stream=self.start.stream,
            groups={name: GroupState(cursor=book.cursor) for name, book in self.groups.items()},
            call_order={
                "num_workers": self.num_workers,
                "generators": generators_of(self.draws),
                "positions": {name: _plain(rows.position) for name, rows in self.rows.items()},
                "buffer": self._write(packer.buffer),
            },
        )

    def _write(self, waiting: Iterable[SamplePlan]) -> list[dict[str, Any]]:
        """The plans as JSON values; those that waited before are not written again."""
        known = [plan for plan in waiting if plan.group in self.rows or plan.group in self.groups]
        # A plan is kept beside what is written of it, so that its id stays its own.
        written = {id(plan): self._written.get(id(plan)) or (plan, plan_to_json(plan)) for plan in known}
        self._written.clear()
        self._written.update(written)
        return [entry for _, entry in written.values()]

    def _with_media(self, plans: Sequence[SamplePlan]) -> list[SamplePlan]:
        """The plans with their pictures, as they are in the files now."""
        in_files = {
            name: rows.media(plan.indexes for plan in plans if plan.group == name)
            for name, rows in self.rows.items()
        }
        found = []
        for plan in plans:
            if plan.group in in_files:
                media = in_files[plan.group][plan.indexes]
            elif plan.group in self.groups and plan.ref is not None:
                media = self.fetch(plan.group, plan.ref)
            else:
                raise ConfigError(
                    f"the state of stream {self.start.stream} is broken: it has sample {plan.key!r} of group {plan.group!r}, and "
                    "does not say where it lies"
                )
            missing = [
                view
                for view in plan.views
                if view.medium >= len(media) or view.frame >= len(media[view.medium])
            ]
            if missing:
                raise ConfigError(
                    f"group {plan.group!r}: the state speaks of picture {missing[0].frame} of medium {missing[0].medium} of "
                    f"sample {plan.key!r}, which is not there; have its files changed?"
                )
            found.append(replace(plan, media=media))
        return found


def generators_of(draws: CallOrderDraws) -> dict[str, Any]:
    """Both generators, as JSON values."""
    version, words, gauss = draws.python.getstate()
    state: Any = draws.numpy.get_state(legacy=False)
    return {
        "python": [version, _packed(words), gauss],
        "numpy": [
            _packed(state["state"]["key"]),
            int(state["state"]["pos"]),
            int(state["has_gauss"]),
            float(state["gauss"]),
        ],
    }


def restore_generators(draws: CallOrderDraws, saved: Mapping[str, Any]) -> None:
    """Put both generators where `generators_of` saw them."""
    version, words, gauss = saved["python"]
    draws.python.setstate((version, tuple(_unpacked(words).tolist()), gauss))
    key, pos, has_gauss, cached = saved["numpy"]
    draws.numpy.set_state(("MT19937", _unpacked(key), pos, has_gauss, cached))


def _packed(words: Any) -> str:
    return base64.b64encode(np.asarray(words, "<u4").tobytes()).decode()


def _unpacked(text: str) -> Any:
    return np.frombuffer(base64.b64decode(text), "<u4").astype(np.uint32)


def plan_to_json(plan: SamplePlan) -> dict[str, Any]:
    """A plan without its pictures, as JSON values; of a segment what is not as a segment has it by default."""
    ref = plan.ref
    return {
        "key": plan.key,
        "group": plan.group,
        "url": plan.url,
        "estimate": plan.estimate,
        "indexes": _plain(plan.indexes),
        "ref": None if ref is None else [ref.shard, ref.offset, ref.length, ref.epoch],
        "views": [[view.medium, view.frame, str(view.kind), *view.size_hw] for view in plan.views],
        "segments": [
            {
                own.name: _plain(value)
                for own in fields(Segment)
                if (value := getattr(segment, own.name)) != own.default
            }
            for segment in plan.segments
        ],
    }


def plan_from_json(entry: Mapping[str, Any]) -> SamplePlan:
    """The plan of `plan_to_json`."""
    indexes = entry["indexes"]
    return SamplePlan(
        key=entry["key"],
        group=entry["group"],
        segments=tuple(
            Segment(
                **{**segment, "kind": Kind(segment["kind"]), "token_ids": tuple(segment.get("token_ids", ()))}
            )
            for segment in entry["segments"]
        ),
        views=tuple(
            View(medium, frame, Kind(kind), (height, width))
            for medium, frame, kind, height, width in entry["views"]
        ),
        media=(),
        estimate=entry["estimate"],
        ref=None if entry["ref"] is None else SampleRef(*entry["ref"]),
        indexes=tuple(map(int, indexes)) if isinstance(indexes, list) else int(indexes),
        url=entry["url"],
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Kind):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
