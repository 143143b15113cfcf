"""The groups of a run: their settings, checked against the model's tables, and the shards of each.

Nothing here needs torch, so that a run can be looked at without it.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from bagel_wds import storage
from bagel_wds.config import (
    BagelDatasetConfig,
    Fidelity,
    GroupConfig,
    TransformConfig,
    parse_groups,
    resolve_mapping,
)
from bagel_wds.errors import ConfigError
from bagel_wds.parquet_info import check_parquet_info
from bagel_wds.planners.registry import BUILT_IN, PLANNERS, find_planner
from bagel_wds.raw import list_units
from bagel_wds.raw_info import RAW_KEYS, find_place, parse_entry, source_of
from bagel_wds.records import Kind
from bagel_wds.shards import Shard, count_samples, list_shards
from bagel_wds.sources import Placeholders, Verify
from bagel_wds.streams import check_split

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bagel_wds.planners import Planner
    from bagel_wds.storage import StorageOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OwnGroup(GroupConfig):
    """A group whose recipe is a user's own.

    Attributes:
        planner: what the recipe names, found where the run was configured; workers need not know the name.
    """

    planner: Planner


def groups_of(config: BagelDatasetConfig) -> dict[str, GroupConfig]:
    """The groups of the mixture, checked against the model's tables; those of a resolved config as they are.

    Raises:
        ConfigError: if a group's settings cannot work.
    """
    mixture = resolve_mapping(
        config.grouped_datasets, config.grouped_datasets_path, "grouped_datasets", config.storage_options
    )
    groups = parse_groups(mixture)
    for name, group in groups.items():
        if not isinstance(group, OwnGroup) and group.recipe not in BUILT_IN:
            groups[name] = _with_planner(name, group)
        if group.weight == 0 and not group.is_mandatory and config.fidelity == Fidelity.CORRECTED:
            raise ConfigError(
                f"group {name!r} has weight 0 and is not mandatory, so none of its samples would come; give it a weight or "
                "take it out of the mixture"
            )
        if mixture[name] is group:
            continue
        check_tables(config, name, group)
        if config.fidelity == Fidelity.CORRECTED:
            _check_named_once(name, group)
    return groups


def _check_named_once(name: str, group: GroupConfig) -> None:
    dataset, times = Counter(group.dataset_names).most_common(1)[0] if group.dataset_names else ("", 1)
    if times > 1:
        raise ConfigError(
            f"group {name!r}: dataset_names has {dataset!r} {times} times, so that an epoch would give each of its samples "
            "so often, each time with the same draws; name it once"
        )


def _with_planner(name: str, group: GroupConfig) -> OwnGroup:
    settings = {f.name: getattr(group, f.name) for f in fields(group)}
    return OwnGroup(**settings, planner=find_planner(str(group.recipe), name))


def planner_of(group: GroupConfig) -> Planner:
    """The group's recipe."""
    return group.planner if isinstance(group, OwnGroup) else PLANNERS[str(group.recipe)]


def resolve(config: BagelDatasetConfig) -> BagelDatasetConfig:
    """The same settings with the mixture read and checked, so that workers need not read it again."""
    return replace(config, grouped_datasets=groups_of(config), grouped_datasets_path=None)


def transforms_of(group: GroupConfig) -> dict[Kind, TransformConfig]:
    """Which transform makes each kind of view of a group."""
    match group.recipe:
        case "vlm":
            transforms = {Kind.VIT_IMAGE: group.image_transform_args}
        case "t2i":
            transforms = {Kind.VAE_IMAGE: group.image_transform_args}
        case _:
            transforms = {
                Kind.VAE_IMAGE: group.image_transform_args,
                Kind.VIT_IMAGE: group.vit_image_transform_args,
            }
    return {kind: transform for kind, transform in transforms.items() if transform is not None}


def check_tables(config: BagelDatasetConfig, name: str, group: GroupConfig) -> None:
    """Refuse a group whose largest image has no place in the model's tables of positions.

    Upstream runs such a group until an index is out of range on the GPU; under its fidelity it is only warned of.

    Raises:
        ConfigError: naming the group, the setting and the smallest value that works.
    """
    tables = {
        Kind.VAE_IMAGE: (
            "vae_image_downsample",
            config.vae_image_downsample,
            "max_latent_size",
            config.max_latent_size,
        ),
        Kind.VIT_IMAGE: (
            "vit_patch_size",
            config.vit_patch_size,
            "max_num_patch_per_side",
            config.max_num_patch_per_side,
        ),
    }
    for kind, transform in transforms_of(group).items():
        patch_name, patch, side_name, side = tables[kind]
        if transform.image_stride % patch:
            raise ConfigError(
                f"group {name!r}: image_stride={transform.image_stride} of its {kind} is no multiple of "
                f"{patch_name}={patch}; set them equal"
            )
        needed = transform.resize.largest_edge() // patch
        if needed <= side or config.interpolate_pos:
            continue
        message = (
            f"group {name!r}: max_image_size={transform.max_image_size} gives {needed} patches of {patch} pixels along "
            f"an edge, but the model's table has {side_name}={side}; set {side_name} to {needed} or more (the model's "
            f"too), or max_image_size to {side * patch}"
        )
        if config.fidelity == Fidelity.UPSTREAM:
            logger.warning("%s", message)
        else:
            raise ConfigError(message)


def streams_for(config: BagelDatasetConfig, world_size: int, num_workers: int) -> int:
    """G: how many streams a run of so many ranks and workers has.

    Raises:
        ConfigError: if ranks and workers cannot share them, with the nearest legal numbers.
    """
    own = world_size * max(1, num_workers)
    num_streams = config.num_streams or own
    if config.fidelity == Fidelity.UPSTREAM and num_streams != own:
        raise ConfigError(
            f'fidelity="upstream" has one stream a rank and worker, here {own}; leave num_streams={num_streams} out'
        )
    check_split(num_streams, world_size, num_workers)
    return num_streams


def find_shards(config: BagelDatasetConfig, *, look: bool = True) -> dict[str, tuple[Shard, ...]]:
    """The shards of each group of the mixture, its datasets in the order of `dataset_names`.

    A relative path is looked for from the current folder, then from that of the info file. Of a dataset in raw files the
    units stand in the place of shards, see `list_raw`.

    Args:
        config: the settings.
        look: whether the shards that a manifest names are there; False believes it.

    Raises:
        ConfigError: for a dataset that the info lacks, or finds by neither shards nor raw files that will do, and for a group
            without a sample.
    """
    info = resolve_mapping(
        config.dataset_info, config.dataset_info_path, "dataset_info", config.storage_options
    )
    return {
        name: _shards_of(config, name, group, info, look=look) for name, group in groups_of(config).items()
    }


def _shards_of(
    config: BagelDatasetConfig, name: str, group: GroupConfig, info: Mapping[str, object], *, look: bool
) -> tuple[Shard, ...]:
    datasets = info.get(name)
    folder = storage.parent(config.dataset_info_path) if config.dataset_info_path else None
    if not isinstance(datasets, dict):
        close = difflib.get_close_matches(name, map(str, info), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(str, info)) or 'none'}"
        if "format_version" in info and "shards" in info:
            hint = f"it is a manifest: name it in a dataset info, {name}: {{NAME: {{shards: PATH}}}}"
        raise ConfigError(f"dataset_info has no group {name!r}; {hint}")
    shards: list[Shard] = []
    for number, dataset in enumerate(group.dataset_names):
        entry = datasets.get(dataset)
        where = f"dataset_info[{name!r}][{dataset!r}]"
        if not isinstance(entry, dict):
            close = difflib.get_close_matches(dataset, map(str, datasets), n=1)
            hint = (
                f"did you mean {close[0]!r}?"
                if close
                else f"the group has {', '.join(map(str, datasets)) or 'none'}"
            )
            raise ConfigError(f"{where} is missing; {hint}")
        if "shards" not in entry:
            if not any(key in entry for key in RAW_KEYS):
                raise ConfigError(
                    f"{where} names no shards, but {', '.join(map(str, entry)) or 'nothing'}; name its `shards:`, or its raw "
                    "files by `data_dir:` (parquet) or `jsonl_path:`"
                )
            shards += list_raw(config, group, number, entry, where, folder)
            continue
        spec = entry["shards"]
        if group.num_used_data is not None:
            logger.info("%s: num_used_data has no say in shards: a conversion applied it", where)
        if not isinstance(spec, str) and not (
            isinstance(spec, list) and all(isinstance(part, str) for part in spec)
        ):
            raise ConfigError(
                f"{where}: shards is {spec!r}; a path, a pattern or a list of them belongs there"
            )
        shards += _listed(spec, dataset, where, folder, config.storage_options, look=look)
    if count_samples(shards) == 0:
        raise ConfigError(f"group {name!r}: its {len(shards)} shards hold no sample")
    return tuple(shards)


def list_raw(
    config: BagelDatasetConfig,
    group: GroupConfig,
    number: int,
    entry: object,
    where: str,
    folder: str | None = None,
) -> list[Shard]:
    """The units of a dataset in raw files, in the order of the source, see `bagel_wds.raw`.

    Under `fidelity="upstream"` rows are taken as upstream takes them: images that were cut short, and texts that do not match
    the media, too; what the recipe then does with a row may have used draws.

    Args:
        config: the settings.
        group: that the dataset belongs to.
        number: of the dataset in the group's `dataset_names`, and of its cap in `num_used_data`.
        entry: of the dataset info.
        where: how an error names the entry.
        folder: of the info file.

    Raises:
        ConfigError: naming the entry, if its files will not do.
    """
    parsed = parse_entry(entry, where)
    upstream, options = config.fidelity == Fidelity.UPSTREAM, config.storage_options
    source = replace(
        source_of(parsed, group, group.dataset_names[number], where, folder or "", options),
        max_units=None if group.num_used_data is None else group.num_used_data[number],
        check_texts=not upstream,
        verify=Verify.NONE if upstream else Verify.HEADER,
        allow_outside=parsed.allow_outside or upstream,
        placeholders=parsed.placeholders or (Placeholders.UPSTREAM if upstream else Placeholders.STRICT),
    )
    try:
        units = list_units(source)
        if parsed.parquet_info_path is not None:
            url = find_place(parsed.parquet_info_path, folder or "", "parquet_info_path", options)
            check_parquet_info(source, [unit.piece for unit in units], url)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not sum(unit.piece.num_rows for unit in units):
        raise ConfigError(f"{where}: there is no row in the files of {source.path}")
    return [Shard(unit.url, source.name, unit.piece.num_rows, raw=unit) for unit in units]


def _listed(
    spec: str | list[str],
    dataset: str,
    where: str,
    folder: str | None,
    options: StorageOptions | None,
    *,
    look: bool,
) -> list[Shard]:
    try:
        return list_shards(spec, dataset, look=look, options=options)
    except ConfigError as error:
        paths = [spec] if isinstance(spec, str) else spec
        if folder is not None and any(storage.join(folder, path) != path for path in paths):
            with suppress(ConfigError):
                return list_shards(
                    [storage.join(folder, path) for path in paths], dataset, look=look, options=options
                )
        raise ConfigError(f"{where}: {error}") from error
