"""What a conversion has finished so far, as small files in a hidden folder: a run that was killed goes on from them.

    OUT/.conversion/lock              held while a process converts into OUT
    OUT/.conversion/000012-000.json   the first shard of slice 12 is whole
    OUT/.conversion/000012.json       slice 12 is done

Each is written after what it speaks of, and is believed only while the shards that it names are there in the size
that it gives. The folder is removed at the end.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from filelock import FileLock, Timeout

from bagel_wds import storage
from bagel_wds.errors import ConfigError

from .shard_writer import ShardRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

MARKS_FOLDER = ".conversion"
LOCK_NAME = "lock"


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
        for ordinal in range(len(outcome.shards)):
            storage.remove(self._url(f"{number:06d}-{ordinal:03d}"))

    def finished(self, number: int) -> Outcome | None:
        """The outcome of a slice that is done and whose shards are there."""
        outcome = self._read(f"{number:06d}")
        return outcome if outcome is not None and all(map(self._is_there, outcome.shards)) else None

    def begun(self, number: int) -> Outcome:
        """The outcome of the rows of an unfinished slice that need not be read again."""
        outcome = Outcome()
        while (more := self._read(f"{number:06d}-{len(outcome.shards):03d}")) is not None:
            if not all(map(self._is_there, more.shards)):
                break
            outcome.add(more)
        return outcome

    def forget_quarantined(self, number: int) -> None:
        """Have a slice begun anew if rows of it were left out."""
        for outcome in (self.finished(number), self.begun(number)):
            if outcome is not None and outcome.quarantine:
                storage.remove(self._url(f"{number:06d}"))
                for ordinal in range(len(outcome.shards)):
                    storage.remove(self._url(f"{number:06d}-{ordinal:03d}"))

    def clear(self) -> None:
        """Remove all that is in the folder but the lock."""
        if storage.is_folder(self._folder):
            for name in storage.list_files(self._folder):
                if name != LOCK_NAME:
                    storage.remove(storage.join(self._folder, name))

    def remove(self) -> None:
        """Remove the folder."""
        storage.remove_folder(self._folder)

    def _url(self, name: str) -> str:
        return storage.join(self._folder, f"{name}.json")

    def _is_there(self, shard: ShardRecord) -> bool:
        tar, index = storage.join(self._out, shard.name), storage.join(self._out, shard.index)
        return storage.exists(tar) and storage.size(tar) == shard.bytes and storage.exists(index)

    def _write(self, name: str, outcome: Outcome) -> None:
        value = {
            "read": outcome.read,
            "shards": [asdict(shard) for shard in outcome.shards],
            "quarantine": outcome.quarantine,
            "repaired": dict(outcome.repaired),
        }
        storage.write_bytes(self._url(name), orjson.dumps(value))

    def _read(self, name: str) -> Outcome | None:
        if not storage.exists(self._url(name)):
            return None
        value = orjson.loads(storage.read_bytes(self._url(name)))
        return Outcome(
            value["read"],
            [ShardRecord(**shard) for shard in value["shards"]],
            value["quarantine"],
            Counter(value["repaired"]),
        )


@contextmanager
def hold_output(out: str) -> Iterator[None]:
    """Be the one process that converts into a folder; the lock ends with the process, however that ends.

    Raises:
        ConfigError: if another process is at it.
    """
    lock = storage.local_path(storage.join(out, f"{MARKS_FOLDER}/{LOCK_NAME}"))
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=0):
            yield
    except Timeout as error:
        raise ConfigError(
            f"{out}: another process is converting into this folder; wait for it, or give another folder"
        ) from error
