"""What a conversion has finished so far, as small files in a hidden folder: a run that was killed goes on from them.

    OUT/.conversion/lock              held while a process converts into OUT; in a bucket locks/, see `claim`
    OUT/.conversion/000012-000.json   the first shard of slice 12 is whole
    OUT/.conversion/000012.json       slice 12 is done

Each is written after what it speaks of, and is believed only while the shards that it names are there in the size
that it gives. The folder is removed at the end.
"""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds import storage
from bagel_wds.ahead import look_ahead

from .shard_writer import ShardRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MARKS_FOLDER = ".conversion"
LOCK_NAME = "lock"
LOCKS_FOLDER = "locks"


@dataclass
class Outcome:
    """What became of rows: `read == samples of the shards + quarantined rows`.

    Attributes:
        read: how many rows.
        shards: that were written.
        quarantine: an entry of `quarantine.jsonl` for each row left out.
        repaired: rows that were mended, by what was.
    """

    read: int = 0
    shards: list[ShardRecord] = field(default_factory=list)
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    repaired: Counter[str] = field(default_factory=Counter)

    @property
    def num_bytes(self) -> int:
        """Of the shards."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def reasons(self) -> Counter[str]:
        """Rows left out, by reason."""
        return Counter(entry["reason"] for entry in self.quarantine)

    def add(self, more: Outcome) -> None:
        """Add what became of the rows that follow."""
        self.read += more.read
        self.shards += more.shards
        self.quarantine += more.quarantine
        self.repaired.update(more.repaired)


class Marks:
    """The marks of the conversion into one folder."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._folder = storage.join(out, MARKS_FOLDER)

    def shard_done(self, number: int, outcome: Outcome) -> None:
        """One more shard of a slice is whole; `outcome` is that of the rows up to its last sample since the one before."""
        ordinal = int(outcome.shards[-1].name.removesuffix(".tar").rpartition("-")[2])
        self._write(f"{number:06d}-{ordinal:03d}", outcome)

    def slice_done(self, number: int, outcome: Outcome) -> None:
        """Every row of a slice has been read."""
        self._write(f"{number:06d}", outcome)
        self._remove_shard_marks(number, outcome)

    def finished(self, number: int) -> Outcome | None:
        """The outcome of a slice that is done and whose shards are there."""
        outcome = self._read(f"{number:06d}")
        return outcome if outcome is not None and all(map(self._is_there, outcome.shards)) else None

    def all_finished(self, numbers: Sequence[int]) -> Iterator[Outcome | None]:
        """The same of many slices, in order; from a bucket with few requests, many at a time."""
        if storage.is_local(self._out):
            yield from map(self.finished, numbers)
            return
        there = storage.list_sizes(self._out)
        names = (f"{number:06d}" for number in numbers)
        for outcome in look_ahead(lambda name: self._read_listed(name, there), names, storage.AT_A_TIME):
            is_whole = outcome is not None and all(
                there.get(shard.name) == shard.bytes and shard.index in there for shard in outcome.shards
            )
            yield outcome if is_whole else None

    def begun(self, number: int) -> Outcome:
        """The outcome of the rows of an unfinished slice that need not be read again."""
        outcome = Outcome()
        while (more := self._read(f"{number:06d}-{len(outcome.shards):03d}")) is not None:
            if not all(map(self._is_there, more.shards)):
                break
            outcome.add(more)
        return outcome

    def forget_quarantined(self, numbers: Iterable[int]) -> None:
        """Have those slices begun anew of which rows were left out."""
        if not storage.is_folder(self._folder):
            return
        marked = {name.partition("-")[0].removesuffix(".json") for name in storage.list_folder(self._folder)}
        for number in numbers:
            if f"{number:06d}" not in marked:
                continue
            for outcome in (self.finished(number), self.begun(number)):
                if outcome is not None and outcome.quarantine:
                    storage.remove(self._url(f"{number:06d}"))
                    self._remove_shard_marks(number, outcome)

    def look_again(self) -> None:
        """See what other hosts wrote.

        The client of a shared file system may remember for a minute that a name was not there, but not beyond the next
        time that its folder is opened.
        """
        for folder in (self._out, self._folder):
            if storage.is_local(folder) and storage.is_folder(folder):
                storage.list_folder(folder)

    def clear(self) -> None:
        """Remove all that is in the folder but the lock."""
        if storage.is_folder(self._folder):
            names = storage.list_files(self._folder)
            doomed = [name for name in names if name != LOCK_NAME and name.split("/")[0] != LOCKS_FOLDER]
            storage.remove_files(self._folder, doomed)

    def remove(self) -> None:
        """Remove the folder; what a worker that was given up for lost writes meanwhile is left to the next run.

        In a bucket the claim stays until it is given up.
        """
        if not storage.is_local(self._folder):
            self.clear()
            return
        try:
            storage.remove_folder(self._folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise

    def _url(self, name: str) -> str:
        return storage.join(self._folder, f"{name}.json")

    def _is_there(self, shard: ShardRecord) -> bool:
        tar, index = storage.join(self._out, shard.name), storage.join(self._out, shard.index)
        try:
            return storage.size(tar) == shard.bytes and storage.is_file(index)
        except FileNotFoundError:
            return False

    def _remove_shard_marks(self, number: int, outcome: Outcome) -> None:
        names = [f"{number:06d}-{ordinal:03d}.json" for ordinal in range(len(outcome.shards))]
        storage.remove_files(self._folder, names)

    def _write(self, name: str, outcome: Outcome) -> None:
        value = {
            "read": outcome.read,
            "shards": [asdict(shard) for shard in outcome.shards],
            "quarantine": outcome.quarantine,
            "repaired": dict(outcome.repaired),
        }
        storage.write_bytes(self._url(name), orjson.dumps(value))

    def _read_listed(self, name: str, there: Mapping[str, int]) -> Outcome | None:
        is_there = f"{MARKS_FOLDER}/{name}.json" in there
        return self._read(name) if is_there else None

    def _read(self, name: str) -> Outcome | None:
        try:
            value = orjson.loads(storage.read_bytes(self._url(name)))
        except FileNotFoundError:
            return None
        return Outcome(
            value["read"],
            [ShardRecord(**shard) for shard in value["shards"]],
            value["quarantine"],
            Counter(value["repaired"]),
        )
