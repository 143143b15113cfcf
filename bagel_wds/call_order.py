"""Where a stream of `fidelity="upstream"` is: its draws hang on all before, so their generators are part of the state.

Samples that wait in the packer's buffer were planned with draws that are gone: their plans are in the state, and of their
pictures the places.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from bagel_wds.errors import ConfigError
from bagel_wds.records import Kind, SamplePlan, SampleRef, Segment, View
from bagel_wds.state import GroupState, StreamState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

    def media(self, position: Any) -> Media:
        """The encoded pictures of a row."""


@dataclass(frozen=True)
class CallOrderBook:
    """Where one stream is.

    Attributes:
        start: the state that the stream went on from.
        draws: of the stream.
        groups: where each group in shards is.
        rows: the groups in raw files.
        fetch: the encoded pictures of a sample in shards.
    """

    start: StreamState
    draws: CallOrderDraws
    groups: Mapping[str, GroupBook]
    rows: Mapping[str, Rows]
    fetch: Callable[[str, SampleRef], Media]

    def restore(self, packer: UpstreamPacker) -> None:
        """Give the packer what waited, and the generators what they had.

        Raises:
            ConfigError: if the state is broken.
        """
        saved = self.start.call_order
        if saved is None:
            return
        try:
            packer.buffer.extend(self._plan_of(entry) for entry in saved["buffer"])
            restore_generators(self.draws, saved["generators"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"the state of stream {self.start.stream} is broken: {error!r}") from error

    def snapshot(self, packer: UpstreamPacker) -> StreamState:
        """The state after the pack that was just closed. A sample of a user's class that waits is left out."""
        return StreamState(
            stream=self.start.stream,
            groups={name: GroupState(cursor=book.cursor) for name, book in self.groups.items()},
            call_order={
                "generators": generators_of(self.draws),
                "positions": {name: _plain(rows.position) for name, rows in self.rows.items()},
                "buffer": [
                    plan_to_json(plan)
                    for plan in packer.buffer
                    if plan.group in self.rows or plan.group in self.groups
                ],
            },
        )

    def _plan_of(self, entry: Mapping[str, Any]) -> SamplePlan:
        plan = plan_from_json(entry)
        if plan.ref is not None:
            return replace(plan, media=self.fetch(plan.group, plan.ref))
        return replace(plan, media=self.rows[plan.group].media(entry["indexes"]))


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


_SEGMENT = (
    "num_tokens", "loss", "enable_cfg", "view", "special_token_loss", "special_token_label", "split_start", "split_end",
    "frame_delta",
)  # fmt: skip
"""Of a segment that is not settled, beside its kind and its ids."""


def plan_to_json(plan: SamplePlan) -> dict[str, Any]:
    """A plan that is not settled, without its pictures, as JSON values."""
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
            [str(segment.kind), list(segment.token_ids), *(getattr(segment, name) for name in _SEGMENT)]
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
            Segment(Kind(kind), token_ids=tuple(ids), **dict(zip(_SEGMENT, values, strict=True)))
            for kind, ids, *values in entry["segments"]
        ),
        views=tuple(
            View(medium, frame, Kind(kind), (height, width))
            for medium, frame, kind, height, width in entry["views"]
        ),
        media=(),
        estimate=entry["estimate"],
        ref=None if entry["ref"] is None else SampleRef(*entry["ref"]),
        indexes=tuple(indexes) if isinstance(indexes, list) else indexes,
        url=entry["url"],
    )


def _plain(position: Any) -> Any:
    return list(position) if isinstance(position, tuple) else position
