"""What docs/migrating.md tells a user to write runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from test_docs import run

from bagel_wds import BagelDatasetConfig, ConfigError
from bagel_wds.state import LoaderState
from examples.corpus import draw_corpus

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo's sources and the golden tokenizer, where the page's paths lead somewhere."""
    folder = tmp_path_factory.mktemp("migrating")
    draw_corpus(folder / "demo-data" / "sources", t2i_rows=16, vlm_rows=16, edit_rows=8)
    (folder / "tests").symlink_to(ROOT / "tests")
    return folder


def test_script_for_nemo_automodel_runs(folder: Path) -> None:
    length, labels = run("python", BLOCKS[0], folder).split()

    assert 4096 <= int(length) <= 6144
    assert 0 < int(labels) < int(length)


def test_blocks_of_its_recipe_are_settings_that_build(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    blocks = yaml.safe_load(block)
    monkeypatch.chdir(folder)

    config = BagelDatasetConfig(**blocks["dataset"])

    assert config.num_streams % blocks["dataloader"]["num_workers"] == 0
    assert config.shuffle_samples != BagelDatasetConfig().shuffle_samples


def test_dataset_info_of_bagel_becomes_a_file_that_the_script_for_bagel_reads(folder: Path) -> None:
    told = yaml.safe_load((folder / "demo-data/sources/dataset_info.yaml").read_text())
    clone = folder / "clone"
    (clone / "data").mkdir(parents=True)
    (clone / "data" / "dataset_info.py").write_text(f"DATASET_INFO = {told!r}\n")

    run("python", BLOCKS[1], clone)

    assert yaml.safe_load((clone / "dataset_info.yaml").read_text()) == told
    made = BLOCKS[2].replace("demo-data/sources/dataset_info.yaml", "clone/dataset_info.yaml")
    assert made != BLOCKS[2]
    length, samples = run("python", made, folder).split()
    assert 4096 <= int(length) <= 6144
    assert int(samples) > 2


def test_page_has_no_script_that_is_not_run() -> None:
    assert len(BLOCKS) == 3
    # The one that needs NeMo AutoModel, and the positions of a run of upstream's, are tried by tests/peer.
    assert len(re.findall(r"```py\n", PAGE)) == 2


@pytest.mark.parametrize("more", [{}, {"buffer": [], "rng": {}}])
def test_state_of_upstreams_loader_is_refused_by_name(more: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"state of upstream's own loader .*yielded_batches"):
        LoaderState.from_json({"version": 1, "yielded_batches": 3, "grouped_dataset_states": [], **more})
