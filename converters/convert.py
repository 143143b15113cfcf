"""One source to one dataset of shards: plan, convert slice by slice, and end with the sidecars."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, ConfigError, ShardError
from bagel_wds.manifest import QUARANTINE_NAME, Counts
from bagel_wds.sources import RejectedRow, Slice, Source, plan_slices, read_slice

from .encode import EncodedSample, encode_sample
from .engine import run_slices
from .manifest import write_manifest, write_quarantine
from .output import check_name, check_output, clear_output
from .progress import Step, no_report
from .settings import ShardSettings
from .shard_writer import ShardRecord, write_shards

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .progress import Report


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that has been checked and cut up, and has not begun.

    Attributes:
        source: what is read.
        out: the folder that is written to.
        settings: how shards are cut.
        slices: of the source.
        overwrite: whether what lies in the folder is replaced.
    """

    source: Source
    out: str
    settings: ShardSettings
    slices: tuple[Slice, ...]
    overwrite: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the source."""
        return sum(part.num_rows for part in self.slices)


@dataclass(frozen=True)
class SliceResult:
    """What became of the rows of one slice: `read == samples of the shards + quarantined rows`."""

    number: int
    read: int
    shards: tuple[ShardRecord, ...]
    quarantine: tuple[RejectedRow, ...]


@dataclass(frozen=True)
class ConversionSummary:
    """What a conversion did.

    Attributes:
        name: of the dataset.
        kind: of its samples.
        manifest: its URL.
        counts: rows read, written, and left out by reason.
        num_shards: shards written.
        num_bytes: in them.
    """

    name: str
    kind: str
    manifest: str
    counts: Counts
    num_shards: int
    num_bytes: int


def convert_source(
    source: Source,
    out: str,
    *,
    settings: ShardSettings | None = None,
    processes: int = 1,
    overwrite: bool = False,
    report: Report = no_report,
) -> ConversionSummary:
    """Convert a source to shards, an index beside each, `quarantine.jsonl` and, last, `manifest.json`.

    The same source and settings give the same bytes, whatever the number of processes.

    Args:
        source: what to convert.
        out: folder to write to; made if it is not there.
        settings: how shards are cut.
        processes: how many slices are converted at a time.
        overwrite: replace a dataset that lies there.
        report: told how far the conversion is.

    Raises:
        ConfigError: if the source or the folder will not do, or not one row could be written.
        ShardError: if a slice failed. No manifest is written then.
    """
    plan = plan_conversion(source, out, settings=settings or ShardSettings(), overwrite=overwrite)
    return run_conversion(plan, processes=processes, report=report)


def plan_conversion(
    source: Source, out: str, *, settings: ShardSettings, overwrite: bool = False
) -> ConversionPlan:
    """Check a conversion and cut it into slices, without writing anything.

    Raises:
        ConfigError: if the source or the folder will not do.
    """
    check_name(source.name)
    if source.max_units is not None and source.max_units < 1:
        raise ConfigError(
            f"dataset {source.name!r}: num_used_data={source.max_units} must be at least 1; leave it out to take all"
        )
    check_output(out, source.path, overwrite=overwrite)
    slices = plan_slices(source, slice_bytes=settings.slice_bytes, slice_rows=settings.slice_rows)
    plan = ConversionPlan(source, out, settings, tuple(slices), overwrite)
    if plan.num_rows == 0:
        raise ConfigError(f"dataset {source.name!r}: {source.path} has no row")
    return plan


def run_conversion(
    plan: ConversionPlan, *, processes: int = 1, report: Report = no_report
) -> ConversionSummary:
    """Do what was planned; see `convert_source`."""
    if processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1")
    if plan.overwrite:
        clear_output(plan.out, plan.source.name)
    work = partial(convert_slice, plan.source, plan.out, plan.settings)
    results: list[SliceResult] = []
    step = Step(plan.source.name, plan.num_rows)
    report(step)
    for result in run_slices(work, plan.slices, processes):
        results.append(result)
        step = step.after(
            rows=result.read,
            num_bytes=sum(shard.bytes for shard in result.shards),
            quarantined=len(result.quarantine),
        )
        report(step)
    results.sort(key=lambda result: result.number)
    return _finish(plan, results)


def convert_slice(source: Source, out: str, settings: ShardSettings, part: Slice) -> SliceResult:
    """Write the shards of one slice."""
    rows = _SliceRows(source, part)
    shards = write_shards(iter(rows), out, f"{source.name}-{part.number:06d}", settings)
    return SliceResult(part.number, rows.read, tuple(shards), tuple(rows.quarantine))


class _SliceRows:
    """The samples of a slice, counted as they pass; rows that cannot be used are put aside."""

    def __init__(self, source: Source, part: Slice) -> None:
        self._source = source
        self._part = part
        self.read = 0
        self.quarantine: list[RejectedRow] = []

    def __iter__(self) -> Iterator[EncodedSample]:
        for row in read_slice(self._source, self._part):
            self.read += 1
            if isinstance(row, RejectedRow):
                self.quarantine.append(row)
                continue
            try:
                sample = encode_sample(row, self._source.kind)
            except BadSample as bad:
                self.quarantine.append(RejectedRow(row.place, bad.reason, bad.detail))
            else:
                yield sample


def _finish(plan: ConversionPlan, results: list[SliceResult]) -> ConversionSummary:
    """Check the sums, and write the sidecars."""
    source = plan.source
    shards = [shard for result in results for shard in result.shards]
    quarantine = [row for result in results for row in result.quarantine]
    counts = Counts(
        read=sum(result.read for result in results),
        written=sum(shard.samples for shard in shards),
        reasons=dict(sorted(Counter(str(row.reason) for row in quarantine).items())),
    )
    if not counts.read == counts.written + counts.quarantined == plan.num_rows:
        raise ShardError(
            f"dataset {source.name!r}: {plan.num_rows} rows were planned and {counts.read} read, of which "
            f"{counts.written} were written and {counts.quarantined} left out; did a file change? convert again"
        )
    write_quarantine(plan.out, quarantine)
    if counts.written == 0:
        reasons = ", ".join(f"{reason} {count}" for reason, count in counts.reasons.items())
        raise ConfigError(
            f"dataset {source.name!r}: no sample was written, each of the {counts.read} rows was left out: {reasons}; "
            f"{plan.out}/{QUARANTINE_NAME} tells of each, for example: {quarantine[0].detail}"
        )
    manifest = write_manifest(plan.out, source, plan.settings, counts, shards)
    return ConversionSummary(
        name=source.name,
        kind=source.kind,
        manifest=manifest,
        counts=counts,
        num_shards=len(shards),
        num_bytes=sum(shard.bytes for shard in shards),
    )
