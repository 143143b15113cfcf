"""Each mixture in `configs/` loads, with the settings that its comments name."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagel_wds.config import BagelDatasetConfig, load_mapping
from bagel_wds.groups import groups_of

CONFIGS = Path(__file__).parent.parent / "configs"
MIXTURES = sorted(path for path in CONFIGS.glob("*.yaml") if path.name != "example_sources.yaml")


@pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)
def test_mixture_loads(path: Path) -> None:
    groups = groups_of(BagelDatasetConfig(grouped_datasets_path=str(path), max_latent_size=64))

    assert groups
    assert all(group.recipe for group in groups.values())


def test_example_sources_name_the_datasets_of_the_example_mixture() -> None:
    groups = groups_of(
        BagelDatasetConfig(grouped_datasets_path=str(CONFIGS / "example_mixture.yaml"), max_latent_size=64)
    )
    info = load_mapping(str(CONFIGS / "example_sources.yaml"))

    assert {name: list(group.dataset_names) for name, group in groups.items()} == {
        name: list(datasets) for name, datasets in info.items()
    }
