"""Rank and world size are found from the launcher, and the shares of a mixture hold on every rank."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import tokenizer
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_shards, small_config

from bagel_wds import ConfigError, find_rank

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHERS = [
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for names in LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_rank_is_that_of_the_launcher(environment: pytest.MonkeyPatch) -> None:
    assert find_rank() == (0, 1)
    for number, (rank, world_size) in reversed(list(enumerate(LAUNCHERS))):
        environment.setenv(rank, str(number))
        environment.setenv(world_size, "8")
        assert find_rank() == (number, 8)
    environment.setenv("RANK", "9")
    with pytest.raises(ConfigError, match="RANK=9 and WORLD_SIZE=8 are no rank of a world"):
        find_rank()


def test_build_finds_its_rank(
    environment: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "2")
    mixture = {"vlm_sft": MIXTURE["vlm_sft"]}
    info = {"vlm_sft": {"vlm": {"shards": foreign_shards(tmp_path, "vlm_sft", [4])}}}
    config = small_config(dataset_info=info, grouped_datasets=mixture)
    with caplog.at_level("INFO", logger="bagel_wds"):
        dataset = config.build(tokenizer(), SPECIAL_TOKENS, None, None, 2, 0)

    assert (dataset.rank, dataset.world_size, dataset.num_streams) == (1, 2, 4)
    assert "rank 1 of 2, 2 workers, 4 streams" in caplog.text


def test_c06_shares_of_a_mixture_hold_on_every_rank(tmp_path: Path) -> None:
    # Sources of 6, 60 and 600 samples, drawn 1 : 1 : 2.
    weights = {"small": 1.0, "middle": 1.0, "large": 2.0}
    group = MIXTURE["vlm_sft"]
    mixture: dict[str, Any] = {
        name: {**group, "weight": weight, "is_mandatory": False, "recipe": "vlm"}
        for name, weight in weights.items()
    }
    info: dict[str, Any] = {}
    for name, size in zip(weights, (6, 60, 600), strict=True):
        (tmp_path / name).mkdir()
        info[name] = {"vlm": {"shards": foreign_shards(tmp_path / name, "vlm_sft", [size])}}
    config = small_config(dataset_info=info, grouped_datasets=mixture, num_streams=2)
    for rank in range(2):
        dataset = config.build(tokenizer(), SPECIAL_TOKENS, rank, 2, 0, global_seed=0)
        drawn: Counter[str] = Counter()
        for batch in islice(dataset, 100):
            drawn.update(origin["dataset_name"] for origin in batch["batch_data_indexes"])
        total = sum(drawn.values())

        assert total > 400
        for name, weight in weights.items():
            # Four standard deviations of a share of so many draws.
            assert drawn[name] / total == pytest.approx(weight / 4, abs=4 * (0.25 / total) ** 0.5)
        # A group that ends begins again: the small one came many times.
        assert dataset.stats()["groups"]["small"]["epochs"] > 5
