"""The settings of a run from the command line: a file, and what is given beside it."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bagel_wds import storage
from bagel_wds.config import BagelDatasetConfig, load_mapping
from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PATHS = ("grouped_datasets_path", "dataset_info_path")
_MIXTURE = ("grouped_datasets", "grouped_datasets_path")


def load_config(path: str, info: str | None, changes: Sequence[str] = ()) -> BagelDatasetConfig:
    """The settings that a file and options give.

    Args:
        path: a mixture file, or a YAML or JSON mapping of fields of `BagelDatasetConfig`, one of them the mixture;
            relative paths in it are looked for from the current folder, then from its own.
        info: the dataset info, instead of what the file says.
        changes: `NAME=VALUE` of fields, the value as in YAML.

    Raises:
        ConfigError: for a field that is not known, and whatever `BagelDatasetConfig` refuses.
    """
    value = load_mapping(path)
    if not any(name in value for name in _MIXTURE):
        value = {"grouped_datasets": value}
    for name in _PATHS:
        if isinstance(value.get(name), str):
            value[name] = storage.find_near(value[name], storage.parent(path))
    value |= dict(map(_change, changes))
    if info is not None:
        value |= {"dataset_info_path": info, "dataset_info": None}
    if value.get("dataset_info") is None and value.get("dataset_info_path") is None:
        raise ConfigError(f"{path} does not say where its datasets lie; give the dataset info with --info")
    known = [field.name for field in fields(BagelDatasetConfig)]
    for name in value:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            raise ConfigError(
                f"{name!r} is no field of BagelDatasetConfig; "
                + (f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}")
            )
    try:
        return BagelDatasetConfig(**value)
    except TypeError as error:
        raise ConfigError(f"{path}: a value of the settings has the wrong type: {error}") from error


def _change(text: str) -> tuple[str, Any]:
    import yaml  # noqa: PLC0415 - only where a value is read

    name, equals, value = text.partition("=")
    try:
        if equals:
            return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value is no YAML: {error}") from error
    raise ConfigError(f"--set {text}: write NAME=VALUE, for example max_latent_size=64")


def parse_tokens(texts: Sequence[str]) -> dict[str, float]:
    """Mean tokens of a sample by group, from `GROUP=N`.

    Raises:
        ConfigError: for anything else, and for a group that comes twice.
    """
    tokens: dict[str, float] = {}
    for text in texts:
        group, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not group or not value > 0:
            raise ConfigError(f"--tokens-per-sample {text}: write GROUP=N, for example t2i_pretrain=1100")
        if group in tokens:
            raise ConfigError(f"--tokens-per-sample {text}: group {group!r} comes twice; give it once")
        tokens[group] = value
    return tokens
