"""The second pass of a conversion that shuffles: samples from the shards of the first, in another order.

The first pass writes shards in the order of the source into a hidden folder. This one fetches each sample by its place
in them, one at a time (from a bucket a few ahead), so that memory does not grow with the dataset; space for both is needed
until the end.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pyarrow.parquet as pq

from bagel_wds import storage
from bagel_wds.ahead import look_ahead
from bagel_wds.errors import ShardError
from bagel_wds.reader import fetch
from bagel_wds.schema import RESERVED, media_fields
from bagel_wds.sources import absolute
from bagel_wds.sources.encode import EncodedSample

from .marks import Marks, Outcome
from .permutation import permute
from .progress import Step
from .shard_writer import write_shards
from .slices import SliceReport, report_of, tell_found

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .claim import Claim
    from .engine import Engine, Tell
    from .planning import ConversionPlan
    from .progress import Report
    from .settings import ShardSettings
    from .shard_writer import ShardRecord

PLACES_NAME = "places.npy"
"""Of each sample: number of its shard, offset, length. It is never in memory whole."""

_PLACE_BYTES = 3 * 8
_HEAD_BYTES = 128
"""Of a `.npy` file of three columns, whatever its number of rows."""
_ROWS_AT_ONCE = 1 << 18
"""Places that are read together from a bucket: 6 MiB."""

AHEAD_BYTES = 32 << 20
"""So much of the samples to come is fetched from a bucket meanwhile, or `storage.AT_A_TIME` samples if that is less."""


@dataclass(frozen=True)
class ShuffledSlice:
    """Samples `first` up to, not including, `stop` of the new order."""

    number: int
    first: int
    stop: int

    def __str__(self) -> str:
        return f"slice {self.number} (shuffled samples {self.first} to {self.stop - 1})"


def shuffle_rows(
    plan: ConversionPlan,
    claim: Claim | None,
    between: str,
    shards: Sequence[ShardRecord],
    run: Engine,
    report: Report,
) -> list[ShardRecord]:
    """Write all samples of some shards into new ones, in the order that the seed gives.

    Args:
        plan: of the conversion.
        claim: on its folder, where it is in a bucket.
        between: the folder that the shards lie in.
        shards: in the order of the source.
        run: where slices are written.
        report: told how far it is.

    Returns:
        the new shards, in order.
    """
    total = sum(shard.samples for shard in shards)
    slices = _cut(plan.settings, total, sum(shard.bytes for shard in shards))
    _write_places(between, shards, total)
    work = ShuffleWork(
        name=plan.source.name,
        out=absolute(plan.out),
        between=absolute(between),
        shards=tuple(shard.name for shard in shards),
        settings=plan.settings,
        total=total,
        number_from=plan.number_from,
        claim=claim,
    )
    marks = Marks(plan.out)
    numbers = [plan.number_from + part.number for part in slices]
    todo = [
        part for part, outcome in zip(slices, marks.all_finished(numbers), strict=True) if outcome is None
    ]
    step = Step(f"{plan.source.name}, shuffling", total)
    step = step.after(rows=total - sum(part.stop - part.first for part in todo), num_bytes=0, quarantined=0)
    report(step)
    for _ in run(
        work,
        todo,
        lambda rows, num_bytes, _: report(step.after(rows=rows, num_bytes=num_bytes, quarantined=0)),
    ):
        pass
    marks.look_again()
    written: list[ShardRecord] = []
    for part, outcome in zip(slices, marks.all_finished(numbers), strict=True):
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
        urls = (storage.join(between, shard.index) for shard in shards)
        for number, places in enumerate(look_ahead(_read_spans, urls, storage.AT_A_TIME)):
            columns = [np.full(len(places), number, "<i8"), places]
            file.write(np.column_stack(columns).astype("<i8").tobytes())


def _read_spans(index_url: str) -> NDArray[np.int64]:
    """int64 (samples, 2): offset and length of each sample of a shard."""
    table = pq.read_table(io.BytesIO(storage.read_bytes(index_url)), columns=["offset", "length"])
    return np.stack([table["offset"].to_numpy(), table["length"].to_numpy()], axis=1)


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
        claim: on the folder, where it is in a bucket.
    """

    name: str
    out: str
    between: str
    shards: tuple[str, ...]
    settings: ShardSettings
    total: int
    number_from: int
    claim: Claim | None = None

    def __call__(self, part: ShuffledSlice, tell: Tell) -> SliceReport:
        """Write the shards of one slice, but for those that are there."""
        number = self.number_from + part.number
        marks = Marks(self.out)
        outcome = marks.finished(number)
        if outcome is not None:
            tell_found(outcome, tell)
            return report_of(outcome)
        outcome = marks.begun(number)
        tell_found(outcome, tell)
        samples = self._samples(part.first + outcome.read, part.stop, tell)
        stem = f"{self.name}-{number:06d}"
        for shard in write_shards(
            samples, self.out, stem, self.settings, ordinal=len(outcome.shards), claim=self.claim
        ):
            more = Outcome(read=shard.samples, shards=[shard])
            marks.shard_done(number, more)
            outcome.add(more)
        marks.slice_done(number, outcome)
        return report_of(outcome)

    def _samples(self, first: int, stop: int, tell: Tell) -> Iterator[EncodedSample]:
        assert self.settings.shuffle is not None  # noqa: S101 - there is no second pass without
        url = storage.join(self.between, PLACES_NAME)
        numbers = permute(np.arange(first, stop), self.total, self.settings.shuffle)
        places = (
            (storage.join(self.between, self.shards[shard]), offset, length)
            for shard, offset, length in _read_places(url, numbers, self.total).tolist()
        )
        at_once = 1 if storage.is_local(self.between) else storage.AT_A_TIME
        for (sample,) in look_ahead(
            lambda place: fetch([place]), places, at_once, weigh=lambda place: place[2], most=AHEAD_BYTES
        ):
            encoded = _encoded(sample)
            tell(1, encoded.num_bytes, 0)
            yield encoded


def _read_places(url: str, numbers: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    """int64 (len(numbers), 3): the places of some samples, in that order."""
    if storage.is_local(url):
        mapped: NDArray[np.int64] = np.load(storage.local_path(url), mmap_mode="r")
        return mapped[numbers]
    order = np.argsort(numbers)
    wanted = numbers[order]
    places = np.empty((len(numbers), 3), np.int64)
    for first in range(0, total, _ROWS_AT_ONCE):
        begin, end = np.searchsorted(wanted, (first, first + _ROWS_AT_ONCE))
        if begin < end:
            # Only from the first to the last that is wanted.
            low, high = int(wanted[begin]), int(wanted[end - 1]) + 1
            data = storage.read_range(url, _HEAD_BYTES + low * _PLACE_BYTES, (high - low) * _PLACE_BYTES)
            places[order[begin:end]] = np.frombuffer(data, "<i8").reshape(-1, 3)[wanted[begin:end] - low]
    return places


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
                "frames": entry.get("frames", 1),
                "bytes": sum(len(members[name]) for name in names),
            }
            for entry, (_, names) in zip(described, media_fields(members), strict=True)
        ),
    )
