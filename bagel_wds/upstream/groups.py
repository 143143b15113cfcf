"""Which groups of a run are read by classes of upstream's kind, and what the run needs to know of them."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from bagel_wds import storage
from bagel_wds.config import BUILT_IN_RECIPES, Fidelity, GroupConfig, resolve_mapping
from bagel_wds.errors import ConfigError
from bagel_wds.groups import OwnGroup
from bagel_wds.upstream import registry
from bagel_wds.upstream.distributed import DistributedIterableDataset
from bagel_wds.upstream.vlm import SftJSONLIterableDataset

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from bagel_wds.config import BagelDatasetConfig
    from bagel_wds.planners import PlanTools
    from bagel_wds.records import RawSample, SamplePlan
    from bagel_wds.rng import Draws

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ClassGroup(OwnGroup):
    """A group that a user's class reads.

    Attributes:
        entry: of the mixture, for the class.
    """

    entry: Mapping[str, Any]


def read_mixture(config: BagelDatasetConfig) -> dict[str, object]:
    """The groups of the mixture; those of a user's class by as much as the mixing needs to know.

    Raises:
        ConfigError: if there is none, or a class's group has a weight that is no number.
    """
    mixture = resolve_mapping(
        config.grouped_datasets, config.grouped_datasets_path, "grouped_datasets", config.storage_options
    )
    return {name: _read_group(name, group, config) for name, group in mixture.items()}


def _read_group(name: str, group: object, config: BagelDatasetConfig) -> object:
    if not isinstance(group, dict):
        return group
    own = registry.own_class(name, group)
    if own is None:
        known = registry.RECIPE_OF_CLASS.get(registry.DATASET_REGISTRY.get(name, object))
        return {"recipe": known, **group} if known and name not in BUILT_IN_RECIPES else group
    # BAGEL: a group without a weight has none. Ours has 1, as every other group.
    weight = group.get("weight", 0.0 if config.fidelity == Fidelity.UPSTREAM else GroupConfig.weight)
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ConfigError(f"group {name!r}: weight={weight!r} must be a number from 0 on")
    if weight == 0 and not group.get("is_mandatory", False) and config.fidelity == Fidelity.UPSTREAM:
        logger.warning(
            "group %r has weight 0, as upstream takes it where none is named, and is not mandatory, so it is never drawn",
            name,
        )
    return ClassGroup(
        dataset_names=tuple(group.get("dataset_names") or ()),
        weight=float(weight),
        is_mandatory=bool(group.get("is_mandatory", False)),
        recipe=f"class {own.__name__}",
        planner=_no_planner,
        entry=group,
    )


def _no_planner(sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:  # noqa: ARG001 - a planner's
    raise TypeError(f"group {tools.group!r} is read by a class, and has no rows to plan")


def read_info(config: BagelDatasetConfig) -> tuple[dict[str, Any], str]:
    """The dataset info, and the folder of its file; "" where it is given inline."""
    info = resolve_mapping(
        config.dataset_info, config.dataset_info_path, "dataset_info", config.storage_options
    )
    return info, storage.parent(config.dataset_info_path) if config.dataset_info_path else ""


def groups_of_classes(config: BagelDatasetConfig, mixture: Mapping[str, object]) -> dict[str, Any]:
    """The groups that classes read, as the mixture has them: a user's; and under upstream's fidelity, in raw files, ours.

    Args:
        config: resolved.
        mixture: of `read_mixture`.
    """
    upstream = config.fidelity == Fidelity.UPSTREAM
    info, folder = read_info(config) if upstream else ({}, "")
    found = {}
    for name, group in mixture.items():
        if isinstance(group, ClassGroup):
            found[name] = dict(group.entry)
        elif upstream:
            entry = registry.entry_of(name, group)
            if registry.is_raw(name, entry, info, folder):
                found[name] = entry
            else:
                logger.warning(
                    "group %r is not read in upstream's order, so its batches are not upstream's: that is known of raw files in "
                    "upstream's layout alone (local, parquet in data_dir itself, .jsonl, none of our keys)",
                    name,
                )
    return found


def check_status(data_status: object | None, config: BagelDatasetConfig, of_classes: Collection[str]) -> None:
    """Refuse upstream's resume state where it can mean nothing.

    Raises:
        ConfigError: saying why.
    """
    if data_status is None:
        return
    if config.fidelity != Fidelity.UPSTREAM:
        raise ConfigError(
            'data_status is upstream\'s resume state, which needs fidelity="upstream"; with the default fidelity pass None, '
            "and give a state of this project to load_state_dict"
        )
    if not isinstance(data_status, dict):
        raise ConfigError(
            f"data_status is {type(data_status).__name__}; a mapping of groups to positions, one a worker, belongs there"
        )
    for name in data_status:
        if name not in of_classes:
            raise ConfigError(
                f"data_status speaks of group {name!r}, which is read from shards, if at all; positions in raw files are "
                f"known of {', '.join(of_classes) or 'no group'}"
            )


def identity_of(dataset: object) -> str:
    """The class of a dataset; of one of ours with what its rows are."""
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    if type(dataset) not in registry.RECIPE_OF_CLASS or not isinstance(dataset, DistributedIterableDataset):
        return name
    digest = xxhash.xxh3_64()
    for path in dataset.data_paths or ():
        first, second = path if isinstance(path, tuple) else (path, "")
        # Of a file its name: it may have been moved. Of a line all of it.
        is_line = isinstance(dataset, SftJSONLIterableDataset)
        own = first if is_line else f"{storage.base_name(first)} {second}"
        digest.update(own.encode("utf-8", "surrogatepass") + b"\0")
    return f"{name} {digest.hexdigest()}"
