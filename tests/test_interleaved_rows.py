"""Interleaved rows from their source to a batch, and the worked examples of docs/interleaved.md."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
import torch
import yaml
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS, VAE, VIT, picture, small_config, write_tar
from source_factory import encode_image, write_jsonl, write_parquet
from typer.testing import CliRunner
from video_factory import clip

from bagel_wds import stages
from bagel_wds.cli import app
from bagel_wds.converters import check_source, convert_source
from bagel_wds.converters.record import Mode
from bagel_wds.errors import NoUsableSampleError, Reason, Tally
from bagel_wds.records import Kind
from bagel_wds.shards import list_shards
from bagel_wds.show import find_holdings, look_into
from bagel_wds.sources import Source

if TYPE_CHECKING:
    from bagel_wds.records import SamplePlan

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/interleaved.md").read_text(encoding="utf-8")
GROUP: dict[str, Any] = {
    "dataset_names": ["mine"],
    "image_transform_args": VAE,
    "vit_image_transform_args": VIT,
    "frame_sampler_args": {"max_num_frames": 2, "min_num_frames": 2},
}
TARGET = {"text": "t", "loss": True}


def config(**group: Any) -> Any:
    return small_config(
        grouped_datasets={"interleaved": {**GROUP, **group}},
        max_latent_size=64,
        max_num_tokens_per_sample=20_000,
        max_num_tokens=20_000,
        vit_cond_dropout_prob=0.0,
        text_cond_dropout_prob=0.0,
        vae_cond_dropout_prob=0.0,
    )


def source_of(path: Path, **more: Any) -> Source:
    return Source(kind="interleaved", name="mine", path=str(path), **more)


def plans_of(out: Path, tally: Tally | None = None, **group: Any) -> list[SamplePlan]:
    """The plans of what was converted to a folder, in its order."""
    settings = config(**group)
    samples = stages.read()(stages.shards(list_shards(str(out)), group="interleaved", epochs=1)())
    decoded = stages.decode(settings, "interleaved", tally=tally)(samples)
    planned = stages.plan(settings, "interleaved", tokenizer(), tally=tally)(decoded)
    return sorted(planned, key=lambda plan: int(plan.key.rpartition("-")[2]))


def outline(plan: SamplePlan) -> list[str]:
    """Texts as they are, pictures as medium.frame and what for; with a star where there is loss."""
    told = []
    for segment in plan.segments:
        if segment.kind is Kind.TEXT:
            what = str(tokenizer().decode(list(segment.token_ids)))
        else:
            view = plan.views[segment.view]
            what = f"{view.medium}.{view.frame} {str(segment.kind).removesuffix('_image')}"
        told.append(what + "*" * segment.loss)
    return told


@pytest.fixture
def media(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "frames").mkdir(parents=True)
    for number, name in enumerate(["a.png", "b.jpg", "c.png"]):
        (folder / name).write_bytes(picture(number, name[-3:]))
    for number in range(5):
        (folder / "frames" / f"f_{number}.png").write_bytes(picture(number))
    (folder / "clip.mp4").write_bytes(clip(frames=6))
    return folder


ROWS: list[Any] = [
    {"images": ["a.png", "b.jpg"], "items": [{"image": 1, "loss": True}, {"image": 0, "vae": True}]},
    {"image": "c.png", "items": json.dumps([{"image": 0}, TARGET])},
    {
        "images": ["a.png"],
        "videos": ["frames", "clip.mp4"],
        "items": [
            {"video": 1, "frames": [0, 5]},
            {"video": 0, "frames": [1, 4], "loss": True, "vae": True},
            {"image": 0},
        ],
    },
    {"images": ["a.png"], "items": [{"image": 0}, {"text": "no loss"}]},
    {"images": ["a.png"], "items": [{"image": 1}, TARGET]},
    {"images": ["a.png", "b.jpg"], "items": [{"image": 0}, TARGET]},
    {"images": ["later.png"], "items": [{"image": 0}, TARGET]},
    {"video": "clip.mp4", "items": [{"video": 0, "frames": [6]}, TARGET]},
    {"items": [{"text": "a", "lose": True}, TARGET]},
    "{no json",
    {"image": "a.png", "images": ["b.jpg"], "items": [{"image": 0}, TARGET]},
    {"items": [TARGET], "images": None, "video": ""},
    {"images": ["https://x.org/a.png"], "items": [{"image": 0}, TARGET]},
    {"items": json.dumps([{"text": ""}] * 10_000 + [TARGET])},
]
OUTLINES = {
    0: ["1.0 vae*", "0.0 vae", "0.0 vit"],
    1: ["0.0 vit", "t*"],
    2: ["2.0 vit", "2.5 vit", "1.1 vae*", "1.4 vae*", "1.1 vae", "1.4 vae", "0.0 vit"],
    11: ["t*"],
}
REASONS = {
    3: "no_loss",
    4: "placeholder_mismatch",
    5: "placeholder_mismatch",
    6: "image_missing",
    7: "items_invalid",
    8: "items_invalid",
    9: "row_invalid",
    10: "row_invalid",
    12: "path_outside",
    13: "items_invalid",
}


def quarantined(out: Path) -> dict[int, str]:
    return {row["row"]: row["reason"] for row in map(json.loads, (out / "quarantine.jsonl").open())}


def test_lines_are_converted_and_what_cannot_be_trained_on_is_left_out_there(
    tmp_path: Path, media: Path
) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    source, out = source_of(tmp_path / "rows.jsonl", media_root=str(media)), tmp_path / "out"
    rows: list[dict[str, Any]] = []

    convert_source(source, str(out))
    check_source(source, tell_row=rows.append)

    assert quarantined(out) == {row["row"]: row["reason"] for row in rows} == REASONS
    assert {int(plan.key.rpartition("-")[2]): outline(plan) for plan in plans_of(out)} == OUTLINES
    # Nothing that a conversion wrote is dropped when it is planned.
    contents = look_into(find_holdings(str(out))[0])
    assert contents.kinds == {"interleaved": 4}
    assert contents.texts == {
        "image items": 3,
        "image items with loss": 1,
        "text items with loss": 2,
        "video items": 1,
        "video items with loss": 1,
    }
    assert not contents.faults

    (media / "later.png").write_bytes(picture(9))
    again = convert_source(source, str(out), mode=Mode.RETRY)

    assert again.counts.written == 5
    assert quarantined(out) == {row: reason for row, reason in REASONS.items() if row != 6}


@pytest.mark.parametrize("form", ["structs", "json"])
@pytest.mark.parametrize("column", ["bytes", "structs", "paths", "one"])
def test_parquet_gives_the_same_plans_in_each_form(tmp_path: Path, form: str, column: str) -> None:
    images = [
        [encode_image(seed=number)] if column == "one" else [encode_image(seed=number), picture(number)]
        for number in range(3)
    ]
    last = 0 if column == "one" else 1
    items: list[list[dict[str, Any]]] = [
        [{"text": f"row {number}", "cfg": True}, {"image": last, "loss": True}, {"image": 0, "vae": True}]
        for number in range(3)
    ]
    values: dict[str, Any] = {
        "bytes": ("image_list", images),
        "structs": ("image_list", [[{"bytes": data, "path": "x.png"} for data in row] for row in images]),
        "paths": (
            "images",
            [[f"{number}-{i}.png" for i in range(len(row))] for number, row in enumerate(images)],
        ),
        "one": ("image", [row[0] for row in images]),
    }
    for number, row in enumerate(images):
        for i, data in enumerate(row):
            (tmp_path / f"{number}-{i}.png").write_bytes(data)
    name, held = values[column]
    table = pa.table(
        {name: held, "items": items if form == "structs" else [json.dumps(row) for row in items]}
    )
    write_parquet(tmp_path / "in" / "rows.parquet", table, group_rows=3)

    convert_source(source_of(tmp_path / "in", media_root=str(tmp_path)), str(tmp_path / "out"))

    target = [f"{last}.0 vae*", "0.0 vae", "0.0 vit"]
    assert [outline(plan) for plan in plans_of(tmp_path / "out")] == [
        [f"row {number}", *target] for number in range(3)
    ]
    # The bytes are members of the tar, and no fields.
    fields = json.loads(next(iter(stages.read()(stages.shards(str(tmp_path / "out"), epochs=1)())))["json"])
    assert "base64" not in json.dumps(fields)


def test_a_mixture_converts_and_streams_an_interleaved_group(tmp_path: Path, media: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    write_parquet(
        tmp_path / "table" / "rows.parquet",
        pa.table({"image_list": [[picture(7)]], "items": [[{"image": 0, "loss": True}]]}),
    )
    mixture = {"interleaved": {**GROUP, "dataset_names": ["lines", "table"]}}
    info = {
        "interleaved": {
            "lines": {"jsonl_path": "rows.jsonl", "data_dir": "media"},
            "table": {"data_dir": "table"},
        }
    }
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    (tmp_path / "info.yaml").write_text(yaml.safe_dump(info))
    command = ["convert", "--config", "mixture.yaml", "--info", "info.yaml", "out"]
    done = CliRunner().invoke(
        app, [str(tmp_path / part) if part.endswith(("yaml", "out")) else part for part in command]
    )
    assert done.exit_code == 0, done.output

    settings = small_config(
        grouped_datasets=mixture,
        dataset_info_path=str(tmp_path / "out" / "dataset_info.yaml"),
        max_num_tokens_per_sample=400,
        max_num_tokens=500,
    )
    dataset = settings.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=0)
    batches = iter(dataset)
    found = [next(batches) for _ in range(8)]

    assert sum(len(batch["sample_lens"]) for batch in found) > 15
    stats = dataset.stats()["groups"]["interleaved"]
    assert stats["read"] >= stats["packed"] > 15
    assert not stats["dropped"]
    # An index does not say what items a row has.
    command = [
        "plan",
        "mixture.yaml",
        "--info",
        "out/dataset_info.yaml",
        "--world-size",
        "1",
        "--workers",
        "1",
    ]
    command = [str(tmp_path / part) if part.endswith("yaml") else part for part in command]
    assert CliRunner().invoke(app, command).exit_code == 0
    judged = CliRunner().invoke(app, [*command, "--sample-index"])
    assert judged.exit_code != 0
    assert "--tokens-per-sample interleaved=N" in judged.output
    # Where a batch has both losses, each is where its items were: latents of targets, texts that are answers.
    both = [batch for batch in found if "mse_loss_indexes" in batch and "ce_loss_indexes" in batch]
    assert both
    for batch in both:
        noised = torch.isfinite(batch["packed_timesteps"])
        assert int(noised.sum()) == len(batch["mse_loss_indexes"]) > 0
        # "t" and the end token that follows it, for each answer: one label of "t" and one of the end.
        answer = [*tokenizer().encode("t"), SPECIAL_TOKENS["eos_token_id"]]
        assert set(batch["packed_label_ids"].tolist()) <= set(answer)


def test_c45_c46_clips_of_any_length_give_frames_that_rise_or_a_counted_reject(tmp_path: Path) -> None:
    lengths = (1, 2, 7)
    for frames in lengths:
        (tmp_path / f"{frames}.mp4").write_bytes(clip(frames=frames))
    whole = clip(frames=30)
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) * 6 // 10])
    (tmp_path / "zero.mp4").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    names = [*(f"{frames}.mp4" for frames in lengths), "cut.mp4", "zero.mp4", "empty"]
    write_jsonl(
        tmp_path / "rows.jsonl", [{"video": name, "items": [{"video": 0, "loss": True}]} for name in names]
    )

    convert_source(source_of(tmp_path / "rows.jsonl"), str(tmp_path / "out"))

    assert quarantined(tmp_path / "out") == {3: "video_truncated", 4: "video_empty", 5: "video_missing"}
    plans = plans_of(tmp_path / "out", frame_sampler_args={"max_num_frames": 8, "min_num_frames": 8})
    assert [[plan.views[s.view].frame for s in plan.segments] for plan in plans] == [[0], [0, 1], [*range(7)]]


def test_a_row_without_a_transform_is_counted_and_a_group_of_such_rows_ends_the_run(tmp_path: Path) -> None:
    rows = [
        {"__key__": f"k-{i}", "json": {"items": [{"image": 0}, TARGET]}, "0.png": picture(i)}
        for i in range(3)
    ]
    url = write_tar(tmp_path / "a.tar", rows)
    alone = {key: value for key, value in GROUP.items() if key != "vit_image_transform_args"}
    settings = small_config(
        grouped_datasets={"interleaved": alone}, dataset_info={"interleaved": {"mine": {"shards": url}}}
    )

    dataset = settings.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=0)

    with pytest.raises(NoUsableSampleError, match=r"interleaved.*transform_missing"):
        next(iter(dataset))


def test_rows_may_call_their_fields_otherwise(tmp_path: Path, media: Path) -> None:
    row = {"pics": ["a.png"], "seq": [{"image": 0}, TARGET], "items": "their own", "id": 7}
    write_jsonl(tmp_path / "rows.jsonl", [row])
    columns = {"images": "pics", "items": "seq"}

    convert_source(
        source_of(tmp_path / "rows.jsonl", media_root=str(media), columns=columns), str(tmp_path / "out")
    )

    assert [outline(plan) for plan in plans_of(tmp_path / "out")] == [["0.0 vit", "t*"]]
    (sample,) = stages.read()(stages.shards(str(tmp_path / "out"), epochs=1)())
    fields = json.loads(sample["json"])
    assert fields["source_items"] == "their own"
    assert fields["id"] == 7


@pytest.mark.parametrize("fidelity", ["corrected", "upstream"])
def test_rows_stream_from_their_source_as_from_shards(tmp_path: Path, media: Path, fidelity: str) -> None:
    rows = [
        {
            "images": ["a.png", "b.jpg"],
            "items": [
                {"text": f"row {i}", "cfg": True},
                {"image": i % 2, "loss": True},
                {"image": 1 - i % 2},
            ],
        }
        for i in range(8)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    convert_source(source_of(tmp_path / "rows.jsonl", media_root=str(media)), str(tmp_path / "out"))
    seen = []
    for entry in (
        {"shards": str(tmp_path / "out")},
        {"jsonl_path": str(tmp_path / "rows.jsonl"), "data_dir": str(media)},
    ):
        settings = small_config(
            grouped_datasets={"interleaved": GROUP},
            dataset_info={"interleaved": {"mine": entry}},
            fidelity=fidelity,
        )
        batches = iter(settings.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3))
        texts = [str(tokenizer().decode(next(batches)["packed_text_ids"])) for _ in range(6)]
        seen.append(set(re.findall(r"row \d", " ".join(texts))))

    assert seen[0] == seen[1] == {f"row {i}" for i in range(8)}


# The page


def example_rows() -> list[tuple[dict[str, Any], list[list[str]]]]:
    """(row, cells of the table that follows it) of each worked example."""
    found = []
    for text, table in re.findall(
        r"```json\n(.*?)```\n\n\| the model meets.*?\n\| ---.*?\n((?:\|[^\n]*\n)+)", PAGE, re.DOTALL
    ):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        found.append((json.loads(text), lines))
    return found


def told(plan: SamplePlan, num_images: int) -> list[list[str]]:
    """A plan in the words of the page's tables."""
    lines: list[list[str]] = []
    for segment in plan.segments:
        loss = {(True, True): "CE", (True, False): "MSE"}.get((segment.loss, segment.kind is Kind.TEXT), "")
        if segment.kind is Kind.TEXT:
            what = f"text: `{tokenizer().decode(list(segment.token_ids))}`"
        else:
            medium = plan.views[segment.view].medium
            which = f"image {medium}" if medium < num_images else f"video {medium - num_images}"
            how = "ViT" if segment.kind is Kind.VIT_IMAGE else "VAE, noised" if segment.loss else "VAE, clean"
            what = f"{which}, {how}" + ", each chosen frame" * (medium >= num_images)
        line = [what, loss, "may leave it out" if segment.enable_cfg else ""]
        if not (lines and lines[-1] == line and "each chosen frame" in what):
            lines.append(line)
    return lines


def test_worked_examples_of_the_page_are_planned_as_their_tables_say(tmp_path: Path) -> None:
    examples = example_rows()
    assert len(examples) == 3
    for row, _ in examples:
        for number, name in enumerate(row.get("images", [])):
            (tmp_path / name).write_bytes(picture(number, name[-3:]))
    (tmp_path / "door.mp4").write_bytes(clip(frames=20))
    write_jsonl(tmp_path / "rows.jsonl", [row for row, _ in examples])

    done = convert_source(source_of(tmp_path / "rows.jsonl"), str(tmp_path / "out"))
    plans = plans_of(tmp_path / "out")

    assert done.counts.quarantined == 0
    for (row, table), plan in zip(examples, plans, strict=True):
        assert told(plan, len(row.get("images", []))) == table
    # Two frames are chosen, as the group says.
    assert sum(segment.kind is Kind.VIT_IMAGE for segment in plans[2].segments) == 2


def test_commands_and_settings_of_the_page_run(tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "dog.jpg").write_bytes(picture(1, "jpg"))
    (tmp_path / "media" / "cat.jpg").write_bytes(picture(2, "jpg"))
    (tmp_path / "media" / "cat-in-a-hat.jpg").write_bytes(picture(3, "jpg"))
    (first,) = re.findall(r"\n    (\{\"images\".*?\]\})\n", PAGE, re.DOTALL)
    write_jsonl(tmp_path / "rows.jsonl", [json.loads(first)])
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    (group,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-c", script)
    shown = run("bash", "-euc", commands)

    assert "image items 1, image items with loss 1, text items 1" in shown
    settings = yaml.safe_load(group)["interleaved"]
    assert [outline(plan) for plan in plans_of(tmp_path / "shards", **settings)] == [
        ["0.0 vae", "0.0 vit", "Give it a hat", "1.0 vae*"]
    ]
    assert [outline(plan) for plan in plans_of(tmp_path / "more", **settings)] == [
        ["0.0 vit", "What is it?", "A dog.*"]
    ]


def test_the_page_names_the_reasons_that_there_are() -> None:
    named = set(re.findall(r"`(\w+_\w+)`", PAGE)) & {str(reason) for reason in Reason}

    assert named == {"items_invalid", "no_loss", "empty_text", "placeholder_mismatch", "transform_missing"}
