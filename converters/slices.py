"""One slice of a source to its shards, going on behind those that an earlier run finished."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import BadSample, ShardError
from bagel_wds.sources import Medium, Place, RejectedRow, Slice, Source, SourceSample, read_slice
from bagel_wds.sources.encode import EncodedSample, encode_sample

from .downscale import downscale
from .marks import Marks, Outcome
from .shard_writer import write_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bagel_wds.errors import Reason

    from .claim import Claim
    from .engine import Tell
    from .settings import ShardSettings

_MAX_DETAIL = 300


@dataclass(frozen=True)
class SliceReport:
    """What a worker sends back of a slice; the rest lies in its mark.

    Attributes:
        read: rows.
        num_bytes: of the shards.
        reasons: rows left out, by reason.
        examples: one entry of the quarantine for each reason.
    """

    read: int
    num_bytes: int
    reasons: Mapping[str, int]
    examples: Mapping[str, Mapping[str, Any]]


def report_of(outcome: Outcome) -> SliceReport:
    """The short form of an outcome."""
    examples: dict[str, Mapping[str, Any]] = {}
    for entry in outcome.quarantine:
        examples.setdefault(entry["reason"], entry)
    return SliceReport(
        read=outcome.read,
        num_bytes=outcome.num_bytes,
        reasons=outcome.reasons,
        examples=examples,
    )


def tell_found(outcome: Outcome, tell: Tell) -> None:
    """Tell of rows that need not be read again."""
    if outcome.read:
        tell(outcome.read, outcome.num_bytes, outcome.reasons.total())


@dataclass(frozen=True)
class SliceWork:
    """Converts slices; a callable, so that it can be sent to another process.

    Attributes:
        source: what is read.
        out: the folder that shards and marks are written to.
        settings: how shards are cut.
        number_from: what the number of a slice is counted from in its shards' names.
        claim: on the folder, where it is in a bucket.
    """

    source: Source
    out: str
    settings: ShardSettings
    number_from: int = 0
    claim: Claim | None = None

    def __call__(self, part: Slice, tell: Tell) -> SliceReport:
        """Write the shards of one slice, but for those that are there."""
        number = self.number_from + part.number
        marks = Marks(self.out)
        outcome = marks.finished(number)
        if outcome is not None:
            # It was done before, and nobody heard of it.
            tell_found(outcome, tell)
            return report_of(outcome)
        outcome = marks.begun(number)
        tell_found(outcome, tell)
        rows = SliceRows(self.source, part, self.settings, tell, skip_rows=outcome.read)
        stem = f"{self.source.name}-{number:06d}"
        for shard in write_shards(
            iter(rows), self.out, stem, self.settings, ordinal=len(outcome.shards), claim=self.claim
        ):
            more = rows.take(shard.samples)
            more.shards.append(shard)
            outcome.add(more)
            if rows.goes_on:
                # The last shard ends because the rows do, and whether that is right is seen below.
                marks.shard_done(number, more)
        outcome.add(rows.take_rest())
        if outcome.read != part.num_rows:
            raise ShardError(f"{part.num_rows} rows were planned and {outcome.read} read: did a file change?")
        marks.slice_done(number, outcome)
        return report_of(outcome)


@dataclass
class _Read:
    """What was read up to and including one sample, since the one before."""

    rows: int = 0
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    repaired: tuple[str, ...] = ()


class SliceRows:
    """The samples of a slice, counted as they pass; rows that cannot be used are put aside.

    Args:
        source: that the slice belongs to.
        part: the slice.
        settings: what is done to the rows.
        tell: told each row.
        skip_rows: rows at the start that need not be read.
    """

    def __init__(
        self, source: Source, part: Slice, settings: ShardSettings, tell: Tell, *, skip_rows: int = 0
    ) -> None:
        self._source = source
        self._part = part
        self._settings = settings
        self._tell = tell
        self._skip_rows = skip_rows
        self._passed: list[_Read] = []
        self._now = _Read()

    def __iter__(self) -> Iterator[EncodedSample]:
        for row in read_slice(self._source, self._part, skip_rows=self._skip_rows):
            self._now.rows += 1
            if isinstance(row, RejectedRow):
                self._reject(row.place, row.reason, row.detail)
                continue
            try:
                sample = self._encode(row)
            except BadSample as bad:
                self._reject(row.place, bad.reason, bad.detail)
                continue
            self._now.repaired = row.repaired
            self._passed.append(self._now)
            self._now = _Read()
            self._tell(1, sample.num_bytes, 0)
            yield sample

    def _encode(self, row: SourceSample) -> EncodedSample:
        if self._settings.max_side is not None:
            row = replace(row, media=tuple(map(self._scale_down, row.media)))
        return encode_sample(row, self._source.kind)

    def _scale_down(self, medium: Medium) -> Medium:
        assert self._settings.max_side is not None  # noqa: S101 - see `_encode`
        images = (
            downscale(image, self._settings.max_side, self._settings.encoder) or image
            for image in medium.images
        )
        return replace(medium, images=tuple(images))

    def _reject(self, place: Place, reason: Reason, detail: str) -> None:
        self._now.quarantine.append(quarantine_entry(place, reason, detail))
        self._tell(1, 0, 1)

    @property
    def goes_on(self) -> bool:
        """Whether a sample has been read that was not taken yet."""
        return bool(self._passed)

    def take(self, num_samples: int) -> Outcome:
        """What became of the rows up to and including that many more samples."""
        taken, self._passed = self._passed[:num_samples], self._passed[num_samples:]
        return _outcome(taken)

    def take_rest(self) -> Outcome:
        """What became of the rows behind the last sample."""
        return _outcome([self._now])


def _outcome(reads: list[_Read]) -> Outcome:
    return Outcome(
        read=sum(read.rows for read in reads),
        quarantine=[entry for read in reads for entry in read.quarantine],
        repaired=Counter(what for read in reads for what in read.repaired),
    )


def quarantine_entry(place: Place, reason: Reason, detail: str) -> dict[str, Any]:
    """A line of `quarantine.jsonl`: the row's place, the reason's code, and what was wrong."""
    return {
        **place.as_json(),
        "reason": str(reason),
        # A detail quotes the source, which may hold what is no UTF-8.
        "detail": detail[:_MAX_DETAIL].encode("utf-8", "backslashreplace").decode(),
    }
