"""One source to one dataset of shards: plan, convert slice by slice, and end with the sidecars."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bagel_wds import storage
from bagel_wds.errors import ConfigError, QuarantineLimitError, ShardError
from bagel_wds.manifest import MANIFEST_NAME, QUARANTINE_NAME, RECORD_NAME, Counts, Manifest, read_manifest
from bagel_wds.sources import absolute, absolute_source

from .claim import hold_output
from .engine_pool import pool_engine
from .manifest import write_manifest, write_quarantine
from .marks import MARKS_FOLDER, Marks, Outcome
from .output import clear_output, clear_partials
from .planning import QUARANTINE_BEFORE, ConversionPlan, changed_since, plan_conversion
from .progress import no_report
from .record import Mode, read_record, write_record
from .settings import ShardSettings
from .shuffle import shuffle_rows
from .slices import SliceWork, report_of
from .watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bagel_wds.sources import Slice, Source

    from .claim import Claim
    from .engine import Engine
    from .progress import Report
    from .quarantine import Limit
    from .shard_writer import ShardRecord

UNSHUFFLED = f"{MARKS_FOLDER}/unshuffled"
"""Where the rows of a conversion that shuffles lie in between."""


@dataclass(frozen=True)
class ConversionSummary:
    """What a conversion did.

    Attributes:
        name: of the dataset.
        kind: of its samples.
        manifest: its URL.
        counts: rows read, written, and left out by reason, of the whole dataset.
        num_shards: shards that it has.
        num_bytes: in them.
        was_complete: whether there was nothing to do.
        notes: what a person should know of the source.
    """

    name: str
    kind: str
    manifest: str
    counts: Counts
    num_shards: int
    num_bytes: int
    was_complete: bool = False
    notes: tuple[str, ...] = ()


def convert_source(
    source: Source,
    out: str,
    *,
    settings: ShardSettings | None = None,
    mode: Mode = Mode.CONVERT,
    processes: int = 1,
    engine: Engine | None = None,
    limit: Limit | None = None,
    report: Report = no_report,
) -> ConversionSummary:
    """Convert a source to shards, an index beside each, `quarantine.jsonl` and, last, `manifest.json`.

    The same source and settings give the same bytes, whatever the engine and the number of processes, and however often
    it was killed and run again on the way.

    Args:
        source: what to convert.
        out: folder to write to; made if it is not there.
        settings: how shards are cut.
        mode: what to do with a dataset that lies there.
        processes: how many slices are converted at a time.
        engine: where slices are converted, if not in processes of this machine; `processes` is then not looked at.
        limit: how many rows may be left out.
        report: told how far the conversion is.

    Raises:
        ConfigError: if the source or the folder will not do, or not one row could be written.
        QuarantineLimitError: if more rows were left out than `limit` allows. What is finished is kept.
        ShardError: if a slice failed. No manifest is written then; the same call goes on with what is missing.
        OSError: if the disk or the store of the output fails otherwise; likewise.
    """
    plan = plan_conversion(source, out, settings=settings or ShardSettings(), mode=mode)
    return run_conversion(plan, processes=processes, engine=engine, limit=limit, report=report)


def run_conversion(
    plan: ConversionPlan,
    *,
    processes: int = 1,
    engine: Engine | None = None,
    limit: Limit | None = None,
    report: Report = no_report,
) -> ConversionSummary:
    """Do what was planned; see `convert_source`."""
    if processes < 1:
        raise ConfigError(f"processes={processes} must be at least 1")
    if plan.record is None:
        assert plan.manifest is not None  # noqa: S101 - there is nothing to do since it is complete
        if storage.exists(storage.join(plan.out, MARKS_FOLDER)):
            # A run was killed after its last word.
            with hold_output(plan.out):
                Marks(plan.out).remove()
        return replace(_summary(plan, plan.manifest), was_complete=True)
    with hold_output(plan.out) as claim:
        _prepare(plan)
        shards = _convert(plan, claim, engine or pool_engine(processes), limit, report)
        # What is left of workers that were lost on the way.
        clear_partials(plan.out, plan.source.name)
        return _finish(plan, claim, shards)


def begin_overwriting(plan: ConversionPlan) -> ConversionPlan:
    """Clear the folder of a conversion that overwrites; gives the plan of what is then to do, which can be gone on with."""
    with hold_output(plan.out):
        _prepare(plan)
    return replace(plan, mode=Mode.CONVERT, before=plan.record)


def _prepare(plan: ConversionPlan) -> None:
    """Leave in the folder what this conversion goes on with, and nothing else of its names."""
    assert plan.record is not None  # noqa: S101 - see `run_conversion`
    if plan.mode is not Mode.OVERWRITE and read_record(plan.out) != plan.before:
        raise ConfigError(f"{plan.out} was changed by another process meanwhile; run the same command again")
    marks = Marks(plan.out)
    if plan.mode is Mode.OVERWRITE:
        clear_output(plan.out, plan.source.name)
    clear_partials(plan.out, plan.source.name)
    if plan.record == plan.before and plan.mode is not Mode.OVERWRITE:
        return
    marks.clear()
    if plan.manifest is not None:
        write_quarantine(
            storage.join(plan.out, QUARANTINE_BEFORE), storage.join(plan.out, QUARANTINE_NAME), ()
        )
    write_record(plan.out, plan.record)


def _first_pass(plan: ConversionPlan) -> tuple[str, int]:
    """Where the rows of the source are written to, and what the slices are numbered from there."""
    if plan.settings.shuffle is None:
        return plan.out, plan.number_from
    return storage.join(plan.out, UNSHUFFLED), 0


def _convert(
    plan: ConversionPlan, claim: Claim | None, run: Engine, limit: Limit | None, report: Report
) -> list[ShardRecord]:
    """Write the shards that are not there yet; gives all that this conversion adds, in order."""
    out, number_from = _first_pass(plan)
    work = SliceWork(absolute_source(plan.source), absolute(out), plan.settings, number_from, claim)
    _convert_slices(plan, work, run, limit, report)
    shards = [shard for outcome in _outcomes(plan) for shard in outcome.shards]
    return shards if plan.settings.shuffle is None else shuffle_rows(plan, claim, out, shards, run, report)


def _convert_slices(
    plan: ConversionPlan, work: SliceWork, run: Engine, limit: Limit | None, report: Report
) -> None:
    """Write the shards of each slice that is not done yet."""
    marks = Marks(work.out)
    watcher = Watcher(plan, limit, report)
    todo: list[Slice] = []
    numbers = [work.number_from + part.number for part in plan.slices]
    try:
        for part, outcome in zip(plan.slices, marks.all_finished(numbers), strict=True):
            if outcome is None:
                todo.append(part)
            else:
                watcher.count(report_of(outcome))
        watcher.begin()
        for result in run(work, todo, watcher.watch):
            watcher.count(result)
    except QuarantineLimitError:
        # Once what is missing has come, the rows that were left out are to be read again.
        marks.forget_quarantined(numbers)
        raise
    marks.look_again()
    watcher.end()


def _outcomes(plan: ConversionPlan) -> Iterator[Outcome]:
    """The outcome of each slice of the source, in order."""
    out, number_from = _first_pass(plan)
    numbers = [number_from + part.number for part in plan.slices]
    for part, outcome in zip(plan.slices, Marks(out).all_finished(numbers), strict=True):
        if outcome is None:
            raise ShardError(
                f"{part}: the shards that were written are not there any more; run the same command again"
            )
        yield outcome


def _finish(plan: ConversionPlan, claim: Claim | None, shards: Sequence[ShardRecord]) -> ConversionSummary:
    """Check the sums, and write the sidecars."""
    _refuse_mixed_input(plan)
    if claim is not None:
        claim.confirm()
    tally = _PartTally()
    keep = plan.mode is Mode.APPEND
    write_quarantine(
        storage.join(plan.out, QUARANTINE_NAME),
        storage.join(plan.out, QUARANTINE_BEFORE) if keep else None,
        tally.entries(_outcomes(plan)),
    )
    written = sum(shard.samples for shard in shards)
    if not tally.read == written + tally.reasons.total() == plan.num_rows:
        raise ShardError(
            f"dataset {plan.source.name!r}: {plan.num_rows} rows were planned and {tally.read} read, of which {written} "
            f"were written and {tally.reasons.total()} left out; did a file change? convert again, with --overwrite"
        )
    if written == 0 and plan.manifest is None:
        _give_up(plan, tally)
    if claim is not None:
        claim.confirm()
    counts = _add_counts(plan, tally, written)
    record = plan.record
    assert record is not None  # noqa: S101 - see `run_conversion`
    before = plan.manifest.shards if plan.manifest else ()
    if plan.mode is Mode.RETRY and written == 0:
        # It added nothing, and leaves no trace but the reasons as they are now. Until the record says so, it goes on.
        record = record.without_last()
        write_manifest(plan.out, record, counts, before, shards)
        write_record(plan.out, record)
    else:
        write_manifest(plan.out, record, counts, before, shards)
    Marks(plan.out).remove()
    return _summary(plan, read_manifest(storage.join(plan.out, MANIFEST_NAME)))


def _refuse_mixed_input(plan: ConversionPlan) -> None:
    """A source that changed while it was read may have given rows of both."""
    assert plan.record is not None  # noqa: S101 - see `run_conversion`
    difference = changed_since(plan.source, plan.record.parts[-1].files)
    if difference is not None:
        Marks(plan.out).clear()
        raise ConfigError(
            f"dataset {plan.source.name!r}: {difference}, while it was being converted; run it again once the source stays "
            "as it is, with --overwrite if it shall stay changed"
        )


@dataclass
class _PartTally:
    """The outcomes of all slices added up, but for their quarantine, which passes by."""

    read: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def entries(self, outcomes: Iterator[Outcome]) -> Iterator[Mapping[str, Any]]:
        """The quarantine of each outcome, which is then added."""
        for outcome in outcomes:
            yield from outcome.quarantine
            self.read += outcome.read
            self.reasons.update(outcome.reasons)
            self.repaired.update(outcome.repaired)
            if outcome.quarantine and not self.example:
                self.example = outcome.quarantine[0]["detail"]


def _give_up(plan: ConversionPlan, tally: _PartTally) -> None:
    """Not one row could be written: leave the quarantine alone, so that the next run begins anew."""
    storage.remove(storage.join(plan.out, RECORD_NAME))
    Marks(plan.out).remove()
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(tally.reasons.items()))
    raise ConfigError(
        f"dataset {plan.source.name!r}: no sample was written, each of the {tally.read} rows was left out: {reasons}; "
        f"{storage.join(plan.out, QUARANTINE_NAME)} tells of each, for example: {tally.example}"
    )


def _add_counts(plan: ConversionPlan, tally: _PartTally, written: int) -> Counts:
    """Of the whole dataset, with what this conversion adds."""
    before = plan.manifest.counts if plan.manifest and plan.manifest.counts else Counts()
    retried = plan.mode is Mode.RETRY
    reasons = tally.reasons if retried else tally.reasons + Counter(before.reasons)
    return Counts(
        read=before.read + (0 if retried else tally.read),
        written=before.written + written,
        reasons=dict(sorted(reasons.items())),
        repaired=dict(sorted((tally.repaired + Counter(before.repaired)).items())),
    )


def _summary(plan: ConversionPlan, manifest: Manifest) -> ConversionSummary:
    return ConversionSummary(
        name=plan.source.name,
        kind=plan.source.kind,
        manifest=storage.join(plan.out, MANIFEST_NAME),
        counts=manifest.counts or Counts(),
        num_shards=len(manifest.shards),
        num_bytes=sum(shard.bytes or 0 for shard in manifest.shards),
        notes=plan.notes,
    )
