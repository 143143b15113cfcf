"""Where a run is, as values: the state of each stream, and that of a loader, to and from plain JSON.

A state holds cursors and references, no bytes and no generator: a few tens of kilobytes a stream. It travels on the
batch that it resumes after, so it is right whatever was prefetched.

    {"version": 1, "fingerprint": {...}, "num_streams": 8, "next_batch": 37, "streams": {"0": {...}, ...}}

Streams that have not given a batch are absent. The states of several ranks are merged by `merge_states`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bagel_wds.errors import ConfigError, Tally
from bagel_wds.records import Cursor, Lost, SampleRef

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    Refs = np.ndarray[Any, np.dtype[np.int64]]

STATE_VERSION = 1
"""Of the JSON form. Any change of order, draws or digests that a state depends on is a new version."""

_REF = ("shard", "offset", "length", "epoch")


def pack_refs(refs: Iterable[SampleRef]) -> Refs:
    """References as an int64 array (n, 4): shard, offset, length, epoch."""
    rows = [(ref.shard, ref.offset, ref.length, ref.epoch) for ref in refs]
    return np.array(rows, dtype=np.int64).reshape(-1, len(_REF))


def unpack_refs(rows: Refs) -> list[SampleRef]:
    """The references of such an array."""
    return [SampleRef(*row) for row in rows.tolist()]


@dataclass(frozen=True)
class GroupState:
    """Where one group is in one stream.

    Attributes:
        cursor: the next sample to read.
        shuffled: references of the samples in the shuffle buffer, in its order, int64 (n, 4).
        taken: how many draws the shuffle has made.
        ended: the group has no sample left, in a finite pass.
        skipped: what was left out lately, since its shard cannot be read. The cursor and the references stand behind it:
            a run that goes on from here goes on without it, as the run did that lost it.
    """

    cursor: Cursor = field(default_factory=Cursor)
    shuffled: Refs = field(default_factory=lambda: pack_refs([]))
    taken: int = 0
    ended: bool = False
    skipped: tuple[Lost, ...] = ()


@dataclass(frozen=True)
class StreamState:
    """Where one stream is, after a batch.

    Attributes:
        stream: its number.
        batches: how many batches it has given.
        groups: where each group is.
        picks: how many draws of a group there were.
        held: (group, references) of what found no room in a pack, oldest first.
        buffer: likewise of what waits in the packer's buffer or look-ahead.
        overdue: the first held sample opens the next pack.
        deferred: how often a sample had to wait.
        packs, tokens: how many packs were closed, and how many tokens they had.
        counts: samples read, packed and dropped so far, as `Tally.as_dict()` gives them.
        ended: in a finite pass, the stream had ended before this batch, which is padding or a repetition.
        call_order: what `fidelity="upstream"` needs beside, see `CallOrderBook`; None under the default one.
    """

    stream: int
    batches: int = 0
    groups: Mapping[str, GroupState] = field(default_factory=dict)
    picks: int = 0
    held: tuple[tuple[str, ...], Refs] = ((), pack_refs([]))
    buffer: tuple[tuple[str, ...], Refs] = ((), pack_refs([]))
    overdue: bool = False
    deferred: int = 0
    packs: int = 0
    tokens: int = 0
    counts: Mapping[str, Any] = field(default_factory=dict)
    ended: bool = False
    call_order: Mapping[str, Any] | None = None

    def drained(self) -> StreamState:
        """The same stream with nothing left to read, and nothing held back."""
        groups = {
            name: replace(group, ended=True, shuffled=pack_refs([])) for name, group in self.groups.items()
        }
        return replace(
            self, groups=groups, held=((), pack_refs([])), buffer=((), pack_refs([])), overdue=False
        )

    def covers(self, epochs: int) -> bool:
        """Whether every sample of the first epochs has been in a batch, or was dropped."""
        if not self.groups:
            return False
        waiting = (self.held[1], self.buffer[1], *(group.shuffled for group in self.groups.values()))
        cursors = [group.cursor.epoch for group in self.groups.values() if not group.ended]
        return min(cursors, default=epochs) >= epochs and all(
            (refs[:, 3] >= epochs).all() for refs in waiting
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "batches": self.batches,
            "picks": self.picks,
            "overdue": self.overdue,
            "deferred": self.deferred,
            "packs": self.packs,
            "tokens": self.tokens,
            "ended": self.ended,
            "held": _waiting_to_json(self.held),
            "buffer": _waiting_to_json(self.buffer),
            "groups": {
                name: {
                    "cursor": [
                        group.cursor.epoch,
                        group.cursor.piece,
                        group.cursor.ordinal,
                        group.cursor.offset,
                    ],
                    "taken": group.taken,
                    "ended": group.ended,
                    "shuffled": group.shuffled.T.tolist(),
                    **({"skipped": [list(astuple(lost)) for lost in group.skipped]} if group.skipped else {}),
                }
                for name, group in self.groups.items()
            },
            "counts": dict(self.counts),
            **({"call_order": dict(self.call_order)} if self.call_order is not None else {}),
        }

    @classmethod
    def from_json(cls, stream: int, value: Mapping[str, Any]) -> StreamState:
        """The state that `to_json` wrote.

        Raises:
            ConfigError: if it is none.
        """
        try:
            return cls(
                stream=stream,
                batches=int(value["batches"]),
                picks=int(value["picks"]),
                overdue=bool(value["overdue"]),
                deferred=int(value["deferred"]),
                packs=int(value.get("packs", 0)),
                tokens=int(value.get("tokens", 0)),
                ended=bool(value["ended"]),
                held=_waiting_from_json(value["held"]),
                buffer=_waiting_from_json(value["buffer"]),
                groups={
                    name: GroupState(
                        cursor=Cursor(*map(int, group["cursor"])),
                        taken=int(group["taken"]),
                        ended=bool(group["ended"]),
                        shuffled=_refs_from_json(group["shuffled"]),
                        skipped=tuple(Lost(*map(int, lost)) for lost in group.get("skipped", ())),
                    )
                    for name, group in value["groups"].items()
                },
                counts=dict(value["counts"]),
                call_order=value.get("call_order"),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the state of stream {stream} is broken: {error!r}") from error


def _waiting_to_json(waiting: tuple[Sequence[str], Refs]) -> dict[str, Any]:
    return {"groups": list(waiting[0]), "refs": waiting[1].T.tolist()}


def _waiting_from_json(value: Mapping[str, Any]) -> tuple[tuple[str, ...], Refs]:
    groups, refs = tuple(value["groups"]), _refs_from_json(value["refs"])
    if len(groups) != len(refs):
        raise ValueError(f"{len(groups)} groups for {len(refs)} references")
    return groups, refs


def _refs_from_json(columns: Sequence[Sequence[int]]) -> Refs:
    array = np.array(columns, dtype=np.int64)
    if array.shape[:1] != (len(_REF),):
        raise ValueError(f"references have {array.shape[:1]} columns, not {len(_REF)}")
    return array.reshape(len(_REF), -1).T


@dataclass(frozen=True)
class LoaderState:
    """Where a run is.

    Attributes:
        fingerprint: of what the streams depend on, by part.
        num_streams: G.
        next_batch: number of the next global batch: what all ranks together have consumed.
        streams: states of the streams that have given a batch, by number.
    """

    fingerprint: Mapping[str, Any]
    num_streams: int
    next_batch: int = 0
    streams: Mapping[int, StreamState] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "version": STATE_VERSION,
            "fingerprint": dict(self.fingerprint),
            "num_streams": self.num_streams,
            "next_batch": self.next_batch,
            "streams": {str(number): self.streams[number].to_json() for number in sorted(self.streams)},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LoaderState:
        """The state that `to_json` wrote, or that `merge_states` made.

        Raises:
            ConfigError: if it is none, or of another version.
        """
        if "grouped_dataset_states" in value:
            raise ConfigError(
                "this is a state of upstream's own loader (its keys are "
                f"{', '.join(map(str, value))}), which holds no bookmark; start the data anew, see docs/migrating.md"
            )
        version = value.get("version")
        if version != STATE_VERSION:
            raise ConfigError(
                f"this state has version {version!r}, and version {STATE_VERSION} is read; load it with the release that "
                "wrote it, or start a new run"
            )
        try:
            return cls(
                fingerprint=dict(value["fingerprint"]),
                num_streams=int(value["num_streams"]),
                next_batch=int(value["next_batch"]),
                streams={
                    int(number): StreamState.from_json(int(number), stream)
                    for number, stream in value["streams"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the state is broken: {error!r}") from error


def batches_of(stream: int, num_streams: int, next_batch: int) -> int:
    """How many of the global batches before `next_batch` come from a stream."""
    return max(0, (next_batch - stream + num_streams - 1) // num_streams)


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One global state out of those that several ranks saved, as `PackedLoader.state_dict()` gave them.

    Of a stream that several know, the state with more batches counts.

    Raises:
        ConfigError: if they are of different runs, or not of the same step.
    """
    if not states:
        raise ConfigError("no state to merge")
    parsed = [LoaderState.from_json(state) for state in states]
    first = parsed[0]
    for other in parsed[1:]:
        if other.num_streams != first.num_streams or other.fingerprint != first.fingerprint:
            raise ConfigError("the states are of different runs: " + "; ".join(changes(first, other)))
    steps = sorted({state.next_batch for state in parsed})
    if len(steps) > 1:
        raise ConfigError(
            f"the states are not of one step: their next batches are {' and '.join(map(str, steps))}; save on every rank after "
            "the same step"
        )
    next_batch = steps[0]
    streams: dict[int, StreamState] = {}
    for state in parsed:
        for number, stream in state.streams.items():
            if number not in streams or stream.batches > streams[number].batches:
                streams[number] = stream
    merged = LoaderState(first.fingerprint, first.num_streams, next_batch, streams)
    for number in range(first.num_streams):
        given = streams[number].batches if number in streams else 0
        expected = batches_of(number, first.num_streams, next_batch)
        if given != expected:
            raise ConfigError(
                f"stream {number} has given {given} batches where {expected} belong to {next_batch} in all; merge the states of "
                "all ranks, saved after the same step"
            )
    return merged.to_json()


def stats_of(states: Iterable[StreamState]) -> dict[str, Any]:
    """What the streams together have done, by group.

    `read` samples became `packed`, `dropped` (by reason) or are `waiting` in the packer; `epochs` is how many the
    slowest stream has read to the end, and `deferred` (of all groups) how often a sample had to wait for a later pack.
    The fill of a pack is `tokens / packs / max_num_tokens`: tokens as packed, those of undecodable samples counted in.
    """
    listed = list(states)
    tally = Tally()
    for state in listed:
        tally.add(state.counts)
    groups: dict[str, Any] = {}
    for name, counts in tally.as_dict().items():
        waiting = sum((*state.held[0], *state.buffer[0]).count(name) for state in listed)
        places = [state.groups[name] for state in listed if name in state.groups]
        cursors = [group.cursor.epoch + group.ended for group in places]
        groups[name] = {
            "read": 0,
            "packed": 0,
            **counts,
            "waiting": waiting,
            "epochs": min(cursors, default=0),
        }
    return {
        "groups": groups,
        "batches": sum(state.batches for state in listed),
        "deferred": sum(state.deferred for state in listed),
        "packs": sum(state.packs for state in listed),
        "tokens": sum(state.tokens for state in listed),
    }


ALLOWED = ("budget", "groups", "recipes", "weights")
"""Parts of the fingerprint that may change on purpose."""


def changes(saved: LoaderState, now: LoaderState, allow: Collection[str] = ()) -> list[str]:
    """What differs between the runs of two states, one sentence a part; nothing that is allowed.

    Args:
        saved: the state to go on from.
        now: of the run that would.
        allow: parts that may differ: `budget` (token budgets), `weights` (of groups, and which are mandatory),
            `recipes` (transforms, dropout, frames) and `groups` (one may be added).
    """
    found: list[str] = []
    if saved.num_streams != now.num_streams:
        found.append(f"num_streams was {saved.num_streams} and is {now.num_streams}")
    for part in dict.fromkeys([*saved.fingerprint, *now.fingerprint]):
        before, after = saved.fingerprint.get(part), now.fingerprint.get(part)
        if before == after or (part in allow and part != "groups"):
            continue
        if part == "order" and isinstance(before, list) and isinstance(after, list):
            # Groups that are gone or new are told of as such.
            common = [
                [name for name in order if name in before and name in after] for order in (before, after)
            ]
            if common[0] != common[1]:
                found.append(f"the order of groups was {', '.join(before)} and is {', '.join(after)}")
        elif part == "groups" and isinstance(before, dict) and isinstance(after, dict):
            found += _group_changes(before, after, may_be_new="groups" in allow)
        elif isinstance(before, dict) and isinstance(after, dict):
            # Groups that are gone or new are told of as such; a budget that one side lacks is not in force there.
            names = [
                name for name in {**before, **after} if part == "budget" or (name in before and name in after)
            ]
            found += [
                f"{part} of {name!r} was {before.get(name)} and is {after.get(name)}"
                for name in names
                if before.get(name) != after.get(name)
            ]
        else:
            found.append(f"{part} was {before} and is {after}")
    return found


def _group_changes(before: Mapping[str, Any], after: Mapping[str, Any], *, may_be_new: bool) -> list[str]:
    gone = [f"group {name!r} is gone" for name in before if name not in after]
    new = [f"group {name!r} is new" for name in after if name not in before and not may_be_new]
    other = [
        f"the shards or raw files of group {name!r} changed"
        for name in before
        if name in after and before[name] != after[name]
    ]
    return gone + new + other
