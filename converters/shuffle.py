"""The second pass of a conversion that shuffles: samples from the shards of the first, in another order.

The first pass writes shards in the order of the source into a hidden folder. This one fetches each sample by its place
in them, one at a time, so that memory does not grow with the dataset; disk space for both is needed until the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.errors import ShardError
from bagel_wds.reader import fetch
from bagel_wds.schema import RESERVED, media_fields

from .encode import EncodedSample
from .engine import run_slices
from .marks import Marks, Outcome
from .permutation import permute
from .progress import Step
from .shard_writer import write_shards
from .slices import SliceReport, report_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .engine import Tell
    from .planning import ConversionPlan
    from .progress import Report
    from .settings import ShardSettings
    from .shard_writer import ShardRecord

PLACES_NAME = "places.npy"
"""Of each sample: number of its shard, offset, length. It lies on disk, and what is needed of it is mapped into memory."""


@dataclass(frozen=True)
class ShuffledSlice:
    """Samples `first` up to, not including, `stop` of the new order."""

    number: int
    first: int
    stop: int

    def __str__(self) -> str:
        return f"slice {self.number} (shuffled samples {self.first} to {self.stop - 1})"


def shuffle_rows(
    plan: ConversionPlan, between: str, shards: Sequence[ShardRecord], processes: int, report: Report
) -> list[ShardRecord]:
    """Write all samples of some shards into new ones, in the order that the seed gives.

    Args:
        plan: of the conversion.
        between: the folder that the shards lie in.
        shards: in the order of the source.
        processes: how many slices are written at a time.
        report: told how far it is.

    Returns:
        the new shards, in order.
    """
    total = sum(shard.samples for shard in shards)
    slices = _cut(plan.settings, total, sum(shard.bytes for shard in shards))
    _write_places(between, shards, total)
    work = ShuffleWork(
        name=plan.source.name,
        out=plan.out,
        between=between,
        shards=tuple(shard.name for shard in shards),
        settings=plan.settings,
        total=total,
        number_from=plan.number_from,
    )
    marks = Marks(plan.out)
    todo = [part for part in slices if marks.finished(plan.number_from + part.number) is None]
    step = Step(f"{plan.source.name}, shuffling", total)
    step = step.after(rows=total - sum(part.stop - part.first for part in todo), num_bytes=0, quarantined=0)
    report(step)
    for _ in run_slices(
        work,
        todo,
        processes,
        lambda rows, num_bytes, _: report(step.after(rows=rows, num_bytes=num_bytes, quarantined=0)),
    ):
        pass
    written: list[ShardRecord] = []
    for part in slices:
        outcome = marks.finished(plan.number_from + part.number)
        if outcome is None:
            raise ShardError(f"{part}: its shards are not there any more; run the same command again")
        written += outcome.shards
    return written


def _cut(settings: ShardSettings, total: int, num_bytes: int) -> list[ShuffledSlice]:
    """Slices of equally many samples, of about the size of a shard."""
    rows = max(1, min(settings.shard_samples, total * settings.slice_bytes // max(1, num_bytes)))
    return [
        ShuffledSlice(number, first, min(first + rows, total))
        for number, first in enumerate(range(0, total, rows))
    ]


def _write_places(between: str, shards: Sequence[ShardRecord], total: int) -> None:
    url = storage.join(between, PLACES_NAME)
    if storage.exists(url):
        return
    with storage.open_write(url) as file:
        header = {"descr": "<i8", "fortran_order": False, "shape": (total, 3)}
        np.lib.format.write_array_header_1_0(file, header)
        for number, shard in enumerate(shards):
            with storage.open_read(storage.join(between, shard.index)) as index:
                table = pq.read_table(index, columns=["offset", "length"])
            columns = [
                np.full(len(table), number, "<i8"),
                table["offset"].to_numpy(),
                table["length"].to_numpy(),
            ]
            file.write(np.stack(columns, axis=1).astype("<i8").tobytes())


@dataclass(frozen=True)
class ShuffleWork:
    """Writes slices of the new order; a callable, so that it can be sent to another process.

    Attributes:
        name: of the dataset.
        out: the folder that shards and marks are written to.
        between: the folder that the samples lie in.
        shards: tars in it, in order.
        settings: how shards are cut.
        total: samples in all.
        number_from: what the number of a slice is counted from in its shards' names.
    """

    name: str
    out: str
    between: str
    shards: tuple[str, ...]
    settings: ShardSettings
    total: int
    number_from: int

    def __call__(self, part: ShuffledSlice, tell: Tell) -> SliceReport:
        """Write the shards of one slice, but for those that are there."""
        number = self.number_from + part.number
        marks = Marks(self.out)
        outcome = marks.begun(number)
        samples = self._samples(part.first + outcome.read, part.stop, tell)
        stem = f"{self.name}-{number:06d}"
        for shard in write_shards(samples, self.out, stem, self.settings, ordinal=len(outcome.shards)):
            more = Outcome(read=shard.samples, shards=[shard])
            marks.shard_done(number, more)
            outcome.add(more)
        marks.slice_done(number, outcome)
        return report_of(outcome)

    def _samples(self, first: int, stop: int, tell: Tell) -> Iterator[EncodedSample]:
        assert self.settings.shuffle is not None  # noqa: S101 - there is no second pass without
        places = np.load(storage.local_path(storage.join(self.between, PLACES_NAME)), mmap_mode="r")
        for number in permute(np.arange(first, stop), self.total, self.settings.shuffle):
            shard, offset, length = map(int, places[number])
            (sample,) = fetch([(storage.join(self.between, self.shards[shard]), offset, length)])
            encoded = _encoded(sample)
            tell(1, encoded.num_bytes, 0)
            yield encoded


def _encoded(sample: dict[str, object]) -> EncodedSample:
    """A sample as it was written."""
    key = str(sample["__key__"])
    members = {name: data for name, data in sample.items() if isinstance(data, bytes)}
    described = orjson.loads(members["json"])[RESERVED]["media"]
    return EncodedSample(
        key=key,
        members=tuple((f"{key}.{name}", data) for name, data in members.items()),
        media=tuple(
            {
                "ext": entry["ext"],
                "width": entry["width"],
                "height": entry["height"],
                "frames": len(names),
                "bytes": sum(len(members[name]) for name in names),
            }
            for entry, (_, names) in zip(described, media_fields(members), strict=True)
        ),
    )
