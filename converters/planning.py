"""What a conversion will do, decided before it writes anything: begin, go on, add, or refuse."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import MANIFEST_NAME, QUARANTINE_NAME, Manifest, read_manifest
from bagel_wds.sources import Place, Slice, Source, describe_files, list_files, plan_rows, plan_source
from bagel_wds.sources.places import reads_lines
from bagel_wds.sources.rows import check_max_units

from .marks import MARKS_FOLDER
from .output import check_name, check_no_foreign_tars, check_output
from .record import ConversionRecord, Mode, Part, as_text, read_record, settings_of, tell_apart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bagel_wds.sources import SourceFile

    from .settings import ShardSettings

QUARANTINE_BEFORE = f"{MARKS_FOLDER}/quarantine-before.jsonl"
"""While rows are added to a dataset: its quarantine as it was."""

_ANOTHER = "pass --overwrite to replace what is there, or give another folder"
_JUDGES = ("verify", "placeholders", "allow_outside")
"""Settings that decide which rows are taken, and not what becomes of them."""
_SLICE_NUMBER = re.compile(r"-(\d{6,})-\d{3,}\.tar$")


@dataclass(frozen=True)
class ConversionPlan:
    """A conversion that has been checked and cut up, and has not begun.

    Attributes:
        source: what is read.
        out: the folder that is written to.
        settings: how shards are cut.
        mode: what is done with what lies there.
        before: the record that lies there.
        record: the one that will; its last part is this conversion's. None where there is nothing to do.
        slices: to convert.
        manifest: of the dataset that this conversion adds to, or that is complete.
        notes: what a person should know before the first row is read.
    """

    source: Source
    out: str
    settings: ShardSettings
    mode: Mode
    before: ConversionRecord | None
    record: ConversionRecord | None
    slices: tuple[Slice, ...] = ()
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows to read."""
        return sum(part.num_rows for part in self.slices)

    @property
    def number_from(self) -> int:
        """What shards' slices are numbered from: behind all that are there."""
        shards = self.manifest.shards if self.manifest else ()
        numbers = [int(found.group(1)) for shard in shards if (found := _SLICE_NUMBER.search(shard.url))]
        return max(numbers, default=-1) + 1


def plan_conversion(source: Source, out: str, *, settings: ShardSettings, mode: Mode) -> ConversionPlan:
    """Check a conversion and cut it into slices, without writing anything.

    Raises:
        ConfigError: if the source or the folder will not do.
    """
    check_name(source.name)
    check_max_units(source)
    check_output(out, source)
    if mode is Mode.OVERWRITE:
        return replace(_plan_first(source, out, settings), mode=mode)
    before = read_record(out)
    if before is None:
        if mode is not Mode.CONVERT:
            raise ConfigError(
                f"{out}: no conversion to go on with ({mode} needs one that this version finished); convert first"
            )
        check_no_foreign_tars(out)
        return _plan_first(source, out, settings)
    if (before.name, before.kind) != (source.name, source.kind):
        named = f"pass --name {before.name} to go on with it, " if before.kind == source.kind else ""
        raise ConfigError(
            f"{out} holds the {before.kind} dataset {before.name!r}, not the {source.kind} dataset {source.name!r}; "
            f"{named}{_ANOTHER}"
        )
    return _PLANNERS[mode](source, out, settings, before)


def is_finished(out: str, record: ConversionRecord) -> bool:
    """Whether the manifest speaks of every part."""
    url = storage.join(out, MANIFEST_NAME)
    return storage.exists(url) and read_manifest(url).parts == len(record.parts)


def _plan_first(source: Source, out: str, settings: ShardSettings) -> ConversionPlan:
    cut = plan_source(source, slice_bytes=settings.slice_bytes, slice_rows=settings.slice_rows)
    plan = ConversionPlan(
        source, out, settings, Mode.CONVERT, before=None, record=None, slices=cut.slices, notes=cut.notes
    )
    if plan.num_rows == 0:
        raise ConfigError(f"dataset {source.name!r}: {_where(source)} has no row")
    record = ConversionRecord(source.name, source.kind)
    part = Part(Mode.CONVERT, cut.files, len(cut.slices), plan.num_rows, settings_of(source, settings))
    return replace(plan, record=record.with_part(part))


def _plan_again(
    source: Source, out: str, settings: ShardSettings, before: ConversionRecord
) -> ConversionPlan:
    """The same conversion once more: it is finished, or goes on."""
    _refuse_other_settings(source, out, settings, before.parts[0])
    if is_finished(out, before):
        _refuse_lost_shards(out)
        _refuse_other_files(source, out, before)
        return _nothing_to_do(source, out, settings, before)
    if len(before.parts) > 1:
        mode = before.parts[-1].mode
        raise ConfigError(f"{out}: adding to this dataset was not finished; pass --{mode} to go on with that")
    fresh = _plan_first(source, out, settings)
    assert fresh.record is not None  # noqa: S101 - a first plan has one
    _refuse_changed_input(source, out, before.parts[0], fresh.record.parts[0])
    return replace(fresh, before=before, record=before)


def _plan_append(
    source: Source, out: str, settings: ShardSettings, before: ConversionRecord
) -> ConversionPlan:
    """The files of the source that the dataset does not have."""
    if source.max_units is not None:
        raise ConfigError(
            f"dataset {source.name!r}: a source of which num_used_data={source.max_units} are taken cannot be appended "
            "to; convert it to another folder without that limit"
        )
    _refuse_other_settings(source, out, settings, before.parts[0])
    going_on = not is_finished(out, before)
    if going_on:
        _refuse_other_mode(out, before, Mode.APPEND)
    prior = before.without_last() if going_on else before
    found = _files_by_text(source)
    _refuse_changed_files(source, out, prior, [text for text in found if text in prior.files])
    wanted = {file.name for file in before.parts[-1].files} if going_on else found.keys() - prior.files.keys()
    new = [file for text, file in found.items() if text in wanted]
    if not new:
        return _nothing_to_do(source, out, settings, before)
    cut = plan_source(source, slice_bytes=settings.slice_bytes, slice_rows=settings.slice_rows, files=new)
    plan = ConversionPlan(
        source,
        out,
        settings,
        Mode.APPEND,
        before,
        before,
        cut.slices,
        read_manifest(storage.join(out, MANIFEST_NAME)),
        cut.notes,
    )
    _refuse_doubled_files(out, prior, cut.files)
    part = Part(Mode.APPEND, cut.files, len(cut.slices), plan.num_rows, settings_of(source, settings))
    if going_on:
        _refuse_changed_input(source, out, before.parts[-1], part)
    return replace(plan, record=prior.with_part(part))


def _plan_retry(
    source: Source, out: str, settings: ShardSettings, before: ConversionRecord
) -> ConversionPlan:
    """The rows that were left out; what judges a row may be set otherwise this time."""
    going_on = not is_finished(out, before)
    if going_on:
        _refuse_other_mode(out, before, Mode.RETRY)
    prior = before.without_last() if going_on else before
    listed = _read_places(out, going_on=going_on)
    if not listed:
        return _nothing_to_do(source, out, settings, before)
    files = sorted({place.file for place in listed})
    _refuse_changed_files(source, out, prior, files)
    found = _files_by_text(source)
    places = [replace(place, file=found[place.file]) for place in listed]
    slices = plan_rows(source, places, slice_bytes=settings.slice_bytes, slice_rows=settings.slice_rows)
    known = prior.files
    part = Part(
        Mode.RETRY,
        tuple(known[file] for file in files),
        len(slices),
        sum(piece.num_rows for piece in slices),
        settings_of(source, settings),
    )
    if going_on:
        _refuse_other_settings(source, out, settings, before.parts[-1])
        _refuse_changed_input(source, out, before.parts[-1], part)
    manifest = read_manifest(storage.join(out, MANIFEST_NAME))
    return ConversionPlan(source, out, settings, Mode.RETRY, before, prior.with_part(part), slices, manifest)


_PLANNERS = {Mode.CONVERT: _plan_again, Mode.APPEND: _plan_append, Mode.RETRY: _plan_retry}


def _nothing_to_do(
    source: Source, out: str, settings: ShardSettings, before: ConversionRecord
) -> ConversionPlan:
    manifest = read_manifest(storage.join(out, MANIFEST_NAME))
    return ConversionPlan(source, out, settings, Mode.CONVERT, before, None, (), manifest)


def _read_places(out: str, *, going_on: bool) -> list[Place]:
    """The rows of the quarantine; while a retry is under way, those of the quarantine that it began with."""
    before = storage.join(out, QUARANTINE_BEFORE)
    url = before if going_on and storage.exists(before) else storage.join(out, QUARANTINE_NAME)
    if not storage.exists(url):
        raise ConfigError(f"{url} is not there: which rows were left out is not known; pass --overwrite")
    with storage.open_read(url) as lines:
        entries: list[Mapping[str, Any]] = [orjson.loads(line) for line in lines]
    return [Place(entry["file"], entry["row"], entry.get("row_group")) for entry in entries]


def _refuse_other_settings(source: Source, out: str, settings: ShardSettings, part: Part) -> None:
    now, then = settings_of(source, settings), part.settings
    for name in now | dict(then):
        if now.get(name) != then.get(name):
            anew = ", pass --retry to judge the rows anew that were left out" if name in _JUDGES else ""
            raise ConfigError(
                f"{out} was begun with {name}={then.get(name)!r}, this is {name}={now.get(name)!r}: shards of both "
                f"would be mixed; set it as it was{anew}, {_ANOTHER}"
            )


def _refuse_other_mode(out: str, before: ConversionRecord, mode: Mode) -> None:
    last = before.parts[-1].mode
    if last is not mode:
        how = "the same command without --append and --retry" if last is Mode.CONVERT else f"--{last}"
        raise ConfigError(f"{out}: the last run was not finished; go on with it first, by {how}")


def _refuse_other_files(source: Source, out: str, before: ConversionRecord) -> None:
    """The source of a finished dataset must have just the files that it was made from."""
    found = _files_by_text(source)
    new = [file for text, file in found.items() if text not in before.files]
    if new:
        raise ConfigError(
            f"{out} is complete, and {_where(source)} has {_counted(new)} that it does not hold, the first is {new[0]}; "
            f"pass --append to add them, or {_ANOTHER}"
        )
    _refuse_changed_files(source, out, before, list(before.files))


def _refuse_doubled_files(out: str, prior: ConversionRecord, files: Sequence[SourceFile]) -> None:
    """A file that the dataset has under another name: the source is seen from another folder now."""
    held = {(file.bytes, file.digest): file.name for file in prior.files.values()}
    for file in files:
        if name := held.get((file.bytes, file.digest)):
            raise ConfigError(
                f"{out} holds {file.name} already, as {name}: names are relative to the folder that all places have in "
                "common, and that is another one now; give the same place as before, or the new files alone"
            )


def _refuse_lost_shards(out: str) -> None:
    """A dataset that is complete has all its shards."""
    sizes = storage.list_sizes(out)
    for shard in read_manifest(storage.join(out, MANIFEST_NAME)).shards:
        if sizes.get(shard.url) != shard.bytes and not _has_size(storage.join(out, shard.url), shard.bytes):
            raise ConfigError(
                f"{out} is complete, but for {shard.url}, which is not there in the size of {shard.bytes} bytes; copy it "
                "back, or pass --overwrite to convert anew"
            )


def _has_size(url: str, num_bytes: int | None) -> bool:
    return storage.is_file(url) and storage.size(url) == num_bytes


def _refuse_changed_files(source: Source, out: str, before: ConversionRecord, files: Sequence[str]) -> None:
    """Files by the names that the record has for them."""
    known = before.files
    _refuse_difference(source, out, changed_since(source, [known[text] for text in files]))


def changed_since(source: Source, files: Sequence[SourceFile]) -> str | None:
    """In which of some files that were read a source differs from what it was; None if in none."""
    found = _files_by_text(source)
    texts = [as_text(file.name) for file in files]
    return tell_apart(files, describe_files(source, [found[text] for text in texts if text in found]))


def _files_by_text(source: Source) -> dict[str, str]:
    """The files that are converted, by the names that a record has for them."""
    files = list_files(source)
    return {
        as_text(file): file for file in (files if reads_lines(source.kind) else files[: source.max_units])
    }


def _refuse_changed_input(source: Source, out: str, then: Part, now: Part) -> None:
    difference = tell_apart(then.files, now.files)
    if difference is None and (then.num_slices, then.num_rows) != (now.num_slices, now.num_rows):
        difference = (
            f"it was {then.num_rows} rows in {then.num_slices} slices, now {now.num_rows} in {now.num_slices}"
        )
    _refuse_difference(source, out, difference)


def _refuse_difference(source: Source, out: str, difference: str | None) -> None:
    if difference is not None:
        raise ConfigError(
            f"{out} was made from another input than {_where(source)} is now: {difference}; bring it back, {_ANOTHER}"
        )


def _where(source: Source) -> str:
    return source.path if isinstance(source.path, str) else ", ".join(source.path)


def _counted(files: Sequence[str]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"
