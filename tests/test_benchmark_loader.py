"""The benchmark of the loader: its corpus, its contestants on few rows, and its arithmetic."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from bagel_wds.errors import ConfigError
from benchmarks import loader_limit, loader_plain
from benchmarks.loader import QUICK, Plan, can_run, parse, run_all, tasks
from benchmarks.loader_corpus import GROUPS, MEGAPIXELS, Corpus, Rows, make_corpus
from benchmarks.loader_report import GOALS, Place, Run, base, places, ratio, summary
from benchmarks.loader_runs import (
    Figures,
    count_images,
    family,
    largest_peak,
    measure,
    prepare_ours,
    tensor_bytes,
)
from benchmarks.loader_tasks import BUDGETS, LIMIT, PLAIN, UPSTREAM, Task, available
from benchmarks.loader_upstream import install

ROOT = Path(__file__).parent.parent
ROWS = Rows(t2i=8, edit=4, vlm=8)
FIGURES = Figures(
    first_s=1.0,
    wall_s=2.0,
    cpu_s=4.0,
    batches=10,
    tokens=368_640,
    images=100,
    num_bytes=1000,
    peak_rss=1000,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus(tmp_path_factory.mktemp("benchmark") / "corpus", ROWS)


def task(corpus: Corpus, contestant: str, *groups: str) -> Task:
    return Task(contestant, str(corpus.folder), groups or tuple(GROUPS), workers=0, warmup=1, batches=1)


def megapixels(data: bytes) -> float:
    image = Image.open(io.BytesIO(data))
    assert image.format == "JPEG"
    return image.width * image.height / 1e6


def within(kind: str, areas: list[float]) -> bool:
    low, high = MEGAPIXELS[kind]
    return all(low * 0.99 <= area <= high for area in areas)


def test_the_raw_corpus_has_the_rows_and_the_sizes_of_pictures_that_it_should(corpus: Corpus) -> None:
    t2i = [row for path in (corpus.folder / "t2i").iterdir() for row in pq.read_table(path).to_pylist()]
    edit = [row for path in (corpus.folder / "edit").iterdir() for row in pq.read_table(path).to_pylist()]
    vlm = [json.loads(line) for line in (corpus.folder / "vlm/train.jsonl").read_text().splitlines()]

    assert (len(t2i), len(edit), len(vlm)) == (8, 4, 8)
    assert within("t2i", [megapixels(row["image"]) for row in t2i])
    assert within("edit", [megapixels(image) for row in edit for image in row["image_list"]])
    images = [corpus.folder / "vlm/images" / name for row in vlm for name in row["image"]]
    assert within("vlm", [megapixels(path.read_bytes()) for path in images])
    assert {len(row["image_list"]) for row in edit} == {2, 3, 4}
    assert all(len(row["instruction_list"]) == len(row["image_list"]) - 1 for row in edit)
    assert all(set(json.loads(row["captions"])) == {"short", "long"} for row in t2i)


def test_the_pictures_take_the_bytes_a_pixel_that_photos_take(corpus: Corpus) -> None:
    rows = pq.read_table(corpus.folder / "t2i/part-0.parquet").to_pylist()
    bits = [8 * len(row["image"]) / megapixels(row["image"]) / 1e6 for row in rows]
    assert min(bits) > 1
    assert max(bits) < 2.6


def test_upstreams_list_of_row_groups_is_that_of_the_files(corpus: Corpus) -> None:
    listed = json.loads((corpus.folder / "parquet_info.json").read_text())
    assert {
        path: pq.ParquetFile(path).num_row_groups for path in map(str, (corpus.folder / "edit").iterdir())
    } == {path: entry["num_row_groups"] for path, entry in listed.items()}


def test_a_corpus_that_is_there_is_kept_and_another_one_refused(corpus: Corpus) -> None:
    before = {path: path.stat().st_mtime_ns for path in corpus.folder.rglob("*")}
    make_corpus(corpus.folder, ROWS)
    assert {path: path.stat().st_mtime_ns for path in corpus.folder.rglob("*")} == before

    with pytest.raises(ConfigError, match="another folder"):
        make_corpus(corpus.folder, replace(ROWS, t2i=9))


def test_pictures_are_crops_of_the_photos_where_there_are_some(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    with pytest.raises(ConfigError, match="folder of photos"):
        make_corpus(tmp_path / "none", ROWS, photos)

    Image.new("RGB", (3000, 2000), (200, 30, 30)).save(photos / "large.jpg")
    Image.new("RGB", (200, 300), (200, 30, 30)).save(photos / "small.jpeg")
    made = make_corpus(tmp_path / "some", Rows(4, 2, 1), photos)
    (picture, *_) = pq.read_table(made.folder / "t2i/part-0.parquet")["image"].to_pylist()
    pixels = np.asarray(Image.open(io.BytesIO(picture)))
    assert np.abs(pixels.astype(int) - (200, 30, 30)).max() <= 3


def test_the_limit_shows_the_pictures_of_our_packs(corpus: Corpus) -> None:
    ours = task(corpus, "ours fast")
    limit = replace(ours, contestant=LIMIT)
    made, bare = measure(prepare_ours(ours), ours), measure(loader_limit.prepare(limit), limit)
    assert (bare.tokens, bare.images) == (made.tokens, made.images)
    assert bare.images > 3
    assert made.num_bytes > 1_000_000
    assert made.fill <= 1


def test_the_plain_loader_gives_packs_within_the_budget_whose_positions_are_all_taken_once(
    corpus: Corpus,
) -> None:
    batches = loader_plain.prepare(task(corpus, PLAIN))()
    batch = next(batches)
    length = batch["sequence_length"]
    assert sum(batch["sample_lens"]) == length <= BUDGETS["max_num_tokens"]
    assert sum(batch["split_lens"]) == BUDGETS["max_num_tokens"]
    taken = torch.cat(
        [
            batch[key]
            for key in ("packed_text_indexes", "packed_vit_token_indexes", "packed_vae_token_indexes")
        ]
    )
    assert sorted(taken.tolist()) == list(range(length))
    assert len(batch["packed_vit_tokens"]) == int(batch["vit_token_seqlens"].sum())
    assert len(batch["padded_images"]) == len(batch["patchified_vae_latent_shapes"])
    assert count_images(batch) == len(batch["padded_images"]) + len(batch["vit_token_seqlens"])


def test_bytes_of_tensors_are_found_however_deep_they_lie() -> None:
    @dataclass(frozen=True)
    class Packed:
        pixels: torch.Tensor
        name: str

    eight, four = torch.zeros(8, dtype=torch.uint8), torch.zeros(1)
    assert tensor_bytes({"a": eight, "b": [four, (four, 3)], "c": Packed(eight, "x"), "d": "text"}) == 24


def test_the_family_of_a_process_holds_what_it_started() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in family()
        child.communicate(b"\n")
    assert child.pid not in family()


def test_the_largest_worker_is_one_that_started_none(tmp_path: Path) -> None:
    # Two that wait, one below the other; the upper one is the larger by far.
    (tmp_path / "inner.py").write_text("print(flush=True); input()")
    (tmp_path / "outer.py").write_text(
        "import subprocess, sys; held = b'x' * (1 << 29); subprocess.run([sys.executable, 'inner.py'])"
    )
    with subprocess.Popen(
        [sys.executable, "outer.py"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        assert 1 << 20 < largest_peak() < 1 << 29
        outer.communicate(b"\n")
    assert largest_peak() > 1 << 20


def test_a_ratio_compares_the_runs_of_one_round() -> None:
    def run(contestant: str, number: int, wall_s: float) -> Run:
        return Run("mixed", 0, contestant, number, replace(FIGURES, wall_s=wall_s))

    # The machine is ten times as slow in the second round, and the third of one of them failed.
    runs = [run("ours fast", 0, 1.0), run("ours fast", 1, 10.0), run("ours fast", 2, 99.0)]
    runs += [run(UPSTREAM, 0, 4.0), run(UPSTREAM, 1, 40.0)]
    own = Place("mixed", 0, "ours fast")
    assert ratio(runs, own, base(own, UPSTREAM)) == pytest.approx(4)
    assert ratio(runs, own, base(own, UPSTREAM), clock="cpu") == pytest.approx(1)
    assert ratio(runs, own, base(own, PLAIN)) is None


def test_the_limit_is_compared_by_images_and_has_one_thread_for_any_number_of_workers() -> None:
    own = Place("mixed", 2, "ours uint8")
    assert base(own, LIMIT) == Place("mixed", 0, LIMIT)
    runs = [
        Run("mixed", 2, "ours uint8", 0, replace(FIGURES, images=150)),
        Run("mixed", 0, LIMIT, 0, replace(FIGURES, images=100, tokens=1)),
    ]
    assert ratio(runs, own, base(own, LIMIT)) == pytest.approx(1.5)


def test_a_summary_has_the_medians_of_the_rounds() -> None:
    runs = [
        Run("mixed", 0, "ours fast", n, replace(FIGURES, wall_s=wall)) for n, wall in enumerate((1, 2, 100))
    ]
    (place,) = places(runs)
    row = summary(runs, place)
    assert row["tokens_per_s"] == pytest.approx(368_640 / 2)
    assert row["tokens_per_cpu_s"] == pytest.approx(368_640 / 4)
    assert row["images_per_s"] == pytest.approx(50)
    assert row["batches_per_s"] == pytest.approx(5)
    assert row["bytes_per_batch"] == 100
    assert row["fill"] == pytest.approx(1)
    assert row["peak_rss"] == 1000
    assert row["times_upstream"] == {"wall": None, "cpu": None}


def test_every_goal_is_measured_by_the_default_plan_and_unknown_without_runs() -> None:
    runs = [
        Run(mix, own.workers, own.contestant, 0, FIGURES) for mix, own in tasks(Plan(), Path("somewhere"))
    ]
    assert [goal.text for goal in GOALS if goal.measure(runs) is None] == []
    assert [goal.measure([]) for goal in GOALS] == [None] * len(GOALS)


def test_the_command_line_changes_the_plan_where_it_says_so() -> None:
    assert parse([])[1] == Plan()
    _, plan = parse(["--quick", "--only", LIMIT, "ours fast", "--t2i-rows", "8", "--workers", "2"])
    assert plan == replace(
        QUICK, contestants=(LIMIT, "ours fast"), workers=(2,), rows=replace(QUICK.rows, t2i=8)
    )


def test_contestants_that_this_version_cannot_tell_apart_run_once(tmp_path: Path) -> None:
    (tmp_path / "nemo_automodel").mkdir()
    (tmp_path / "pandas").mkdir()
    assert install(tmp_path) is None  # nothing is fetched where both are
    plan, notes = can_run(Plan(), tmp_path)
    assert plan.contestants == available()
    assert len(plan.contestants) + len(notes) == len(Plan().contestants)


@pytest.mark.skipif(
    importlib.util.find_spec("nemo_automodel") is not None, reason="upstream is in this environment"
)
def test_a_contestant_that_fails_is_named_with_the_reason_and_not_run_again(
    corpus: Corpus, tmp_path: Path
) -> None:
    plan = replace(QUICK, contestants=(UPSTREAM,), rounds=2)
    runs, failed = run_all(plan, corpus.folder, tmp_path)
    assert runs == []
    (why,) = failed
    assert "mixed, 0 workers, upstream failed" in why
    assert "nemo_automodel" in why


@pytest.mark.slow
def test_the_quick_run_measures_every_contestant_that_needs_no_download(
    corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "corpus").symlink_to(corpus.folder)
    rows = [f"--{kind}-rows={getattr(ROWS, kind)}" for kind in ("t2i", "edit", "vlm")]
    command = [sys.executable, "-m", "benchmarks.loader", "--quick", "--json", "--out", str(tmp_path), *rows]
    done = subprocess.run(
        [*command, "--batches=1", "--only", PLAIN, LIMIT, "ours fast"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    fast = "ours fast" if "ours fast" in available() else None
    by_name = {row["contestant"]: row for row in told["places"]}
    assert list(by_name) == [PLAIN, LIMIT, *([fast] if fast else [])]
    for row in by_name.values():
        assert row["tokens_per_s"] > 0
        assert row["images_per_s"] > 0
        assert 0.5 < row["fill"] <= 1
        assert row["peak_rss"] > 50_000_000
        assert row["times_limit"]["wall"] > 0
    assert by_name[PLAIN]["times_plain"] == {"wall": 1, "cpu": 1}
