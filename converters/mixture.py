"""All datasets of a mixture file to shards, and the dataset info that points at them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import yaml

from bagel_wds import storage
from bagel_wds.config import load_mapping, parse_groups
from bagel_wds.errors import ConfigError
from bagel_wds.manifest import INFO_NAME
from bagel_wds.raw_info import InfoEntry, parse_entry, source_of
from bagel_wds.sources import Placeholders, Source, Verify, absolute

from .convert import ConversionSummary, begin_overwriting, run_conversion
from .output import check_name
from .planning import ConversionPlan, plan_conversion
from .progress import no_report
from .record import Mode, read_record
from .settings import ShardSettings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bagel_wds.config import GroupConfig

    from .engine import Engine
    from .progress import Report
    from .quarantine import Limit


@dataclass(frozen=True)
class MixtureSummary:
    """What the conversion of a mixture did.

    Attributes:
        datasets: what was converted, in the order of the mixture file.
        info_path: of the new dataset info.
    """

    datasets: tuple[ConversionSummary, ...]
    info_path: str


def convert_mixture(
    config_path: str,
    info_path: str,
    out: str,
    *,
    rules: RowRules | None = None,
    settings: ShardSettings | None = None,
    mode: Mode = Mode.CONVERT,
    processes: int = 1,
    engine: Engine | None = None,
    limit: Limit | None = None,
    report: Report = no_report,
) -> MixtureSummary:
    """Convert each dataset that a mixture file names to `OUT/GROUP/NAME/`, and write `OUT/dataset_info.yaml`.

    `num_used_data`, `shuffle_lines` and `shuffle_seed` of a group apply here, once; the shards hold what they leave.
    Everything is checked before the first dataset is converted.

    Args:
        config_path: the mixture file, YAML or JSON.
        info_path: the dataset info that goes with it.
        out: folder to write to.
        rules: which rows are taken.
        settings: how shards are cut.
        mode: what to do with datasets that lie there; those that do not are converted in any mode but retry.
        processes: how many slices are converted at a time.
        engine: where slices are converted, see `convert_source`.
        limit: how many rows of a dataset may be left out.
        report: told how far each dataset is.

    Raises:
        ConfigError: if one of the files, a source or the folder will not do.
        QuarantineLimitError: if more rows of a dataset were left out than `limit` allows.
        ShardError: if a slice failed.
    """
    target = absolute(storage.join(out, INFO_NAME))
    was_there = storage.is_file(target)
    if was_there and _is_same(target, absolute(info_path)):
        raise ConfigError(f"{target} is the dataset info that is read; give another folder")
    groups = parse_groups(load_mapping(config_path))
    new_info: dict[str, dict[str, Any]] = {group: {} for group in groups}
    plans: dict[tuple[str, str], ConversionPlan] = {}
    for group, name, source in find_sources(groups, info_path, rules or RowRules()):
        if not isinstance(source, Source):
            new_info[group][name] = source
            continue
        place = storage.join(storage.join(out, check_name(group)), name)
        adds = mode is Mode.APPEND and read_record(place) is None
        plans[group, name] = plan_conversion(
            source,
            place,
            settings=settings or ShardSettings(),
            mode=Mode.CONVERT if adds else mode,
        )
        new_info[group][name] = {}
    if was_there and mode is not Mode.OVERWRITE:
        _refuse_other_info(target, new_info)
    if mode is Mode.OVERWRITE:
        # All at once, so that a run that is stopped can be gone on with, without overwriting.
        plans = {place: begin_overwriting(plan) for place, plan in plans.items()}
    summaries = []
    for (group, name), plan in plans.items():
        summary = run_conversion(plan, processes=processes, engine=engine, limit=limit, report=report)
        new_info[group][name] |= {
            "shards": absolute(summary.manifest),
            "num_total_samples": summary.counts.written,
        }
        summaries.append(summary)
    text = yaml.safe_dump(new_info, sort_keys=False, allow_unicode=True)
    storage.write_bytes(target, text.encode())
    return MixtureSummary(tuple(summaries), target)


def _is_same(first: str, second: str) -> bool:
    """Whether two URLs, or paths from the root, name one file."""
    if storage.is_local(first) and storage.is_local(second):
        return storage.local_path(first).samefile(storage.local_path(second))
    return first == second


def _refuse_other_info(target: str, new_info: Mapping[str, Mapping[str, Any]]) -> None:
    """A dataset info that this conversion would write shorter is not its own."""
    for group, entries in load_mapping(target).items():
        for name in entries if isinstance(entries, dict) else ():
            if name not in new_info.get(group, {}):
                raise ConfigError(
                    f"{target} is there already and names {group}.{name}, which is not converted now; pass --overwrite to "
                    "replace it, or give another folder"
                )


@dataclass(frozen=True)
class RowRules:
    """Which rows of the sources are taken; see `Source`."""

    verify: Verify = Verify.FULL
    placeholders: Placeholders = Placeholders.STRICT
    allow_outside: bool = False
    batch_bytes: int = Source.batch_bytes


def find_sources(
    groups: Mapping[str, GroupConfig], info_path: str, rules: RowRules
) -> Iterator[tuple[str, str, Source | dict[str, Any]]]:
    """(group, dataset, its source) of each dataset of a mixture; one that is shards already has its entry instead.

    Raises:
        ConfigError: if the info lacks one, or names a place where there is nothing.
    """
    info = load_mapping(info_path)
    for group, name, max_units in _datasets(groups):
        entry = _parse_entry(info, group, name, f"{info_path}: {group}.{name}")
        if entry.shards is not None:
            yield group, name, _pass_on(entry)
            continue
        source = source_of(entry, groups[group], name, f"{group}.{name}", storage.parent(info_path))
        yield (
            group,
            name,
            replace(
                source,
                max_units=max_units,
                verify=rules.verify,
                placeholders=entry.placeholders or rules.placeholders,
                allow_outside=entry.allow_outside or rules.allow_outside,
                batch_bytes=rules.batch_bytes,
            ),
        )


def _datasets(groups: Mapping[str, GroupConfig]) -> Iterator[tuple[str, str, int | None]]:
    """(group, dataset, cap) of each dataset, once; one that a group names twice is mixed twice, not converted twice.

    Raises:
        ConfigError: if a group names a dataset twice, under different caps.
    """
    for group, config in groups.items():
        caps: dict[str, int | None] = {}
        for name, cap in zip(
            config.dataset_names, config.num_used_data or [None] * len(config.dataset_names), strict=True
        ):
            if caps.setdefault(name, cap) != cap:
                raise ConfigError(
                    f"group {group!r} names {name!r} twice, with num_used_data {caps[name]} and {cap}; give one value"
                )
        yield from ((group, name, cap) for name, cap in caps.items())


def _parse_entry(info: Mapping[str, Any], group: str, name: str, where: str) -> InfoEntry:
    entries = info.get(group)
    if not isinstance(entries, dict) or name not in entries:
        known = [f"{key}.{item}" for key, value in info.items() if isinstance(value, dict) for item in value]
        close = difflib.get_close_matches(f"{group}.{name}", known, n=1)
        raise ConfigError(
            f"{where} is not there; "
            + (f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}")
        )
    return parse_entry(entries[name], where)


def _pass_on(entry: InfoEntry) -> dict[str, Any]:
    total = {} if entry.num_total_samples is None else {"num_total_samples": entry.num_total_samples}
    return {"shards": entry.shards, **total}
