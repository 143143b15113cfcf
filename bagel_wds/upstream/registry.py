"""Which class reads the rows of a group, and what it is built with."""

from __future__ import annotations

import inspect
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagel_wds.config import FrameConfig, GroupConfig, TransformConfig
from bagel_wds.errors import ConfigError
from bagel_wds.parquet_info import COUNT, match_files, read_parquet_info
from bagel_wds.raw_info import find_place
from bagel_wds.upstream.frame_sampler import FrameSampler
from bagel_wds.upstream.interleave import UnifiedEditIterableDataset
from bagel_wds.upstream.t2i import T2IIterableDataset
from bagel_wds.upstream.vlm import SftJSONLIterableDataset

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATASET_REGISTRY: dict[str, type[Any]] = {
    "t2i_pretrain": T2IIterableDataset,
    "vlm_sft": SftJSONLIterableDataset,
    "unified_edit": UnifiedEditIterableDataset,
}
"""The class of each group. One that is put in here reads the group of its name in every dataset that is built afterwards."""

DEFAULT_DATASET_INFO: dict[str, Any] = {}
"""Empty, and not used: where datasets lie is said in the settings."""

RECIPE_OF_CLASS: dict[type[Any], str] = {
    T2IIterableDataset: "t2i",
    SftJSONLIterableDataset: "vlm",
    UnifiedEditIterableDataset: "edit",
}
"""Our own classes, whose rows a run plans before anything is decoded, and the recipe that does so."""


def build_class(
    name: str,
    entry: Mapping[str, Any],
    info: Mapping[str, Any],
    folder: str,
    *,
    tokenizer: Any,
    local_rank: int,
    world_size: int,
    num_workers: int,
    data_status: object | None,
) -> Any:
    """The dataset of a group, built as upstream builds it; see `class_arguments`.

    Raises:
        ConfigError: naming the group, if its class cannot be built with what there is.
    """
    found = group_class(name, entry)
    if found is None:
        raise ConfigError(
            f"group {name!r} has no class in DATASET_REGISTRY, which has {', '.join(DATASET_REGISTRY)}; put one in before the "
            "dataset is built"
        )
    arguments = _filled(found, class_arguments(name, entry, info, folder))
    try:
        return found(
            dataset_name=name,
            tokenizer=tokenizer,
            local_rank=local_rank,
            world_size=world_size,
            num_workers=num_workers,
            data_status=data_status if entry.get("resume_data_status", True) else None,
            **arguments,
        )
    except TypeError as error:
        raise ConfigError(
            f"group {name!r}: {found.__name__} cannot be built with what the mixture and the dataset info say: {error}"
        ) from error


def _filled(found: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a class, with those that upstream needs and a mixture file of this project may leave out.

    What such a file has beside, our own classes are not told.
    """
    known = _parameters(found)
    defaults = {
        "num_used_data": [None] * len(arguments["data_dir_list"]),
        "frame_sampler": FrameSampler(),
        "parquet_info": None,
    }
    missing = {
        key: value
        for key, value in defaults.items()
        if key in known and known[key].default is inspect.Parameter.empty and key not in arguments
    }
    given = {key: value for key, value in arguments.items() if found not in RECIPE_OF_CLASS or key in known}
    return {**given, **missing}


def _parameters(found: type[Any]) -> dict[str, inspect.Parameter]:
    """What a class can be built with; where its constructor hands on what it does not know, what its bases' take, too."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in inspect.getmro(found):
        if "__init__" not in vars(base):
            continue
        own = inspect.signature(vars(base)["__init__"]).parameters
        parameters = {**own, **parameters}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values()):
            break
    return parameters


_OURS = ("weight", "is_mandatory", "dataset_names", "recipe", "resume_data_status")
"""Keys of a group in the mixture that its class is not told."""


def group_class(name: str, entry: Mapping[str, Any]) -> type[Any] | None:
    """The class of a group: the one that is registered under its name, else ours for its recipe."""
    if name in DATASET_REGISTRY and entry.get("recipe") is None:
        return DATASET_REGISTRY[name]
    return next((kind for kind, recipe in RECIPE_OF_CLASS.items() if recipe == entry.get("recipe")), None)


def own_class(name: str, entry: Mapping[str, Any]) -> type[Any] | None:
    """The class of a group that is a user's; None for what this package plans itself."""
    found = group_class(name, entry)
    return None if found is None or found in RECIPE_OF_CLASS else found


def is_raw(name: str, entry: Mapping[str, Any], info: Mapping[str, Any], folder: str = "") -> bool:
    """Whether a group of one of our own classes lies in local raw files of the form that upstream reads, and says no more.

    Otherwise it is read as in the default fidelity.
    """
    found, datasets = group_class(name, entry), info.get(name)
    if found not in RECIPE_OF_CLASS or not isinstance(datasets, dict):
        return False
    places = [datasets.get(dataset) for dataset in entry.get("dataset_names") or ()]
    return bool(places) and all(
        isinstance(place, dict) and _is_upstream(found, place, folder) for place in places
    )


def _is_upstream(found: type[Any], place: Mapping[str, Any], folder: str) -> bool:
    keys = {"data_dir"} | ({"jsonl_path"} if found is SftJSONLIterableDataset else set())
    paths = [place.get(key) for key in keys]
    is_local = all(isinstance(path, str) and "://" not in path for path in paths)
    if not is_local or {"shards", "columns", "placeholders"} & set(place):
        return False
    if found is SftJSONLIterableDataset:
        return str(place["jsonl_path"]).endswith(".jsonl")
    # Upstream looks no deeper than into the folder itself.
    folders = [path for path in (Path(place["data_dir"]), Path(folder) / place["data_dir"]) if path.is_dir()]
    return not folders or any(folders[0].glob("*.parquet"))


def entry_of(name: str, entry: object) -> dict[str, Any]:
    """A group of the mixture as a dict of its own.

    Raises:
        ConfigError: if it is none.
    """
    if isinstance(entry, GroupConfig):
        return {key: value for key, value in asdict(entry).items() if value is not None}
    if not isinstance(entry, dict):
        raise ConfigError(
            f"group {name!r} is {type(entry).__name__}; a mapping of its settings belongs there"
        )
    return dict(entry)


def class_arguments(
    name: str, entry: Mapping[str, Any], info: Mapping[str, Any], folder: str = ""
) -> dict[str, Any]:
    """What the class of a group is built with, beside name, tokenizer, ranks and `data_status`.

    The group's own settings go as they are, but that `image_transform_args` becomes `transform`, `vit_image_transform_args`
    `vit_transform` and `frame_sampler_args` `frame_sampler`; of the datasets, `data_dir_list`, and where an entry has them
    `jsonl_path_list`, `json_dir_list` and `parquet_info`.

    Args:
        name: of the group.
        entry: of the mixture.
        info: the dataset info, group by group.
        folder: of the info file, where a path is looked for that is not there.

    Raises:
        ConfigError: naming the group, the dataset and what is missing.
    """
    # torchvision takes 1 s to import, which a worker that reads our groups alone need not pay.
    from bagel_wds.transforms import ImageTransform  # noqa: PLC0415

    arguments = {key: value for key, value in entry.items() if key not in _OURS}
    for setting, argument, kind in (
        ("frame_sampler_args", "frame_sampler", FrameSampler),
        ("image_transform_args", "transform", ImageTransform),
        ("vit_image_transform_args", "vit_transform", ImageTransform),
    ):
        if setting in arguments:
            given = arguments.pop(setting)
            arguments[argument] = _made(kind, given, f"group {name!r}: {setting}")
    names: Sequence[str] = entry.get("dataset_names") or ()
    if not names:
        raise ConfigError(f"group {name!r} has no dataset_names; name the datasets of the dataset info")
    arguments["data_dir_list"] = []
    for dataset in names:
        where = f"dataset_info[{name!r}][{dataset!r}]"
        place = (info.get(name) or {}).get(dataset)
        if not isinstance(place, dict):
            there = ", ".join(map(str, info.get(name) or ())) or "none"
            raise ConfigError(f"{where} is missing; the group has {there}")
        if "data_dir" not in place:
            raise ConfigError(
                f"{where} has no data_dir, but {', '.join(map(str, place)) or 'nothing'}; a dataset class of upstream's kind "
                "reads raw files"
            )
        arguments["data_dir_list"].append(_found(place["data_dir"], folder, f"{where}: data_dir"))
        for key, argument in (("jsonl_path", "jsonl_path_list"), ("json_dir", "json_dir_list")):
            if key in place:
                arguments.setdefault(argument, []).append(_found(place[key], folder, f"{where}: {key}"))
        if "parquet_info_path" in place:
            path = _found(place["parquet_info_path"], folder, f"{where}: parquet_info_path")
            arguments.setdefault("parquet_info", {}).update(
                row_groups_of(path, arguments["data_dir_list"][-1])
            )
    return arguments


def _made(kind: type[Any], given: Any, where: str) -> Any:
    options = (
        {key: value for key, value in asdict(given).items() if value is not None}
        if isinstance(given, TransformConfig | FrameConfig)
        else given
    )
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _found(path: object, folder: str, where: str) -> str:
    if not isinstance(path, str):
        raise ConfigError(f"{where} is {path!r}, not a path")
    return find_place(path, folder, where)


def row_groups_of(path: str, data_dir: str) -> dict[str, Any]:
    """Upstream's list of parquet files, each with its `num_row_groups`, its paths as they stand, and those in `data_dir` anew.

    Which file a path means is as in `match_files`.

    Raises:
        ConfigError: if it is no such list.
    """
    info: dict[str, Any] = {
        file: {COUNT: count} for file, count in read_parquet_info(path).items() if count is not None
    }
    names = sorted(os.listdir(data_dir))  # noqa: PTH208 - names are what is wanted
    for file, name in match_files(list(info), data_dir, names, path).items():
        info.setdefault(os.path.join(data_dir, name), info[file])  # noqa: PTH118 - upstream's paths
    return info
