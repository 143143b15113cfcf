"""The command that checks a source: what a conversion would leave out, row by row, and nothing written."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from source_factory import Corpus, captions, encode_image, talk, write_corpus, write_jsonl, write_t2i
from typer.testing import CliRunner

from bagel_wds.cli import app
from bagel_wds.converters import ShardSettings, check_source, convert_source
from bagel_wds.errors import ConfigError
from bagel_wds.sources import Source, Verify

if TYPE_CHECKING:
    from pathlib import Path

    from typer.testing import Result


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return write_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_check_finds_what_a_conversion_leaves_out(
    corpus: Corpus, tmp_path: Path, kind: str, processes: int
) -> None:
    source = getattr(corpus, kind)
    settings = ShardSettings(shard_bytes=4096, shard_samples=3)
    converted = convert_source(source, str(tmp_path / "out"), settings=settings)
    rows: list[dict[str, Any]] = []

    checked = check_source(source, settings=settings, processes=processes, tell_row=rows.append)

    written = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").open()]
    assert rows == written
    assert len(rows) > 0
    assert checked.reasons == converted.counts.reasons
    assert checked.read == converted.counts.read
    assert checked.read - checked.quarantined == converted.counts.written


def test_c35_a_check_lists_media_that_will_not_do_and_writes_nothing(tmp_path: Path) -> None:
    names = {
        0: "gone.png",
        3: "also/gone.png",
        5: "empty.png",
        8: "folder",
        11: "PHOTO.png",
        13: "/etc/hostname",
        16: "../outside.png",
        19: "https://example.org/a.png",
    }
    folder = tmp_path / "in"
    write_jsonl(
        folder / "a.jsonl",
        [
            {"image": names.get(i, "photo.png"), "conversations": talk("<image> what?", "a")}
            for i in range(20)
        ],
    )
    (folder / "photo.png").write_bytes(encode_image())
    (folder / "empty.png").touch()
    (folder / "folder").mkdir()
    (tmp_path / "outside.png").write_bytes(encode_image())
    before = sorted(tmp_path.rglob("*"))

    checked = run("check", "vlm", folder / "a.jsonl")

    assert checked.exit_code == 1
    lines = checked.stdout.splitlines()[: len(names)]
    assert [line.partition(": ")[0] for line in lines] == [f"a.jsonl row {row}" for row in names]
    assert [line.split(": ")[1] for line in lines] == [
        *["image_missing"] * 2,
        "image_empty",
        *["image_missing"] * 2,
        *["path_outside"] * 3,
    ]
    for line, name in zip(lines, names.values(), strict=True):
        assert name in line
    assert sorted(tmp_path.rglob("*")) == before


def test_pixels_are_looked_at_as_far_as_is_asked_for(tmp_path: Path) -> None:
    whole = encode_image((64, 64), codec="JPEG")
    cut = whole[: len(whole) * 2 // 3]
    broken = whole[: len(whole) // 2] + bytes(len(whole) // 4) + whole[len(whole) * 3 // 4 :]
    broken_png = bytearray(encode_image((64, 64)))
    broken_png[len(broken_png) // 2] ^= 0xFF
    images = [whole, cut, bytes(broken_png), broken]
    write_t2i(tmp_path / "a.parquet", [(image, captions(i)) for i, image in enumerate(images)])

    found = {}
    for verify in Verify:
        rows: list[dict[str, Any]] = []
        source = Source(kind="t2i", name="x", path=str(tmp_path / "a.parquet"), verify=verify)
        check_source(source, tell_row=rows.append)
        found[verify] = [(row["row_group"] * 2 + row["row"], row["reason"]) for row in rows]

    assert found[Verify.NONE] == []
    assert found[Verify.HEADER] == [(1, "image_truncated")]
    assert found[Verify.FULL][:2] == [(1, "image_truncated"), (2, "image_truncated")]


def test_the_status_tells_whether_it_is_within_the_limit(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(encode_image() if i else b"", captions(i)) for i in range(10)])

    assert run("check", "t2i", tmp_path / "a.parquet").exit_code == 1
    assert run("check", "t2i", tmp_path / "a.parquet", "--max-quarantine", "10%").exit_code == 0
    assert run("check", "t2i", tmp_path / "a.parquet", "--max-quarantine", "0.5%").exit_code == 1
    write_t2i(tmp_path / "b.parquet", [(encode_image(), captions(0))])
    assert run("check", "t2i", tmp_path / "b.parquet").exit_code == 0


def test_rows_are_listed_up_to_a_number(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["{"] * 7)

    some = run("check", "vlm", tmp_path / "a.jsonl", "--rows", 2).stdout
    every = run("check", "vlm", tmp_path / "a.jsonl", "--rows", 0).stdout

    assert [line for line in some.splitlines() if "a.jsonl row" in line] == every.splitlines()[:2]
    assert "... and 5 more; --rows 0 prints all" in some
    assert sum("a.jsonl row" in line for line in every.splitlines()) == 7


def test_a_check_as_json(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(encode_image() if i else b"", captions(i)) for i in range(3)])

    checked = run("check", "t2i", tmp_path / "a.parquet", "--json")

    value = json.loads(checked.stdout)
    (dataset,) = value["datasets"]
    assert (dataset["name"], dataset["read"], dataset["usable"]) == ("a", 3, 2)
    assert dataset["reasons"] == {"image_empty": 1}
    assert [row["row"] for row in value["rows"]] == [0]


def test_a_mixture_is_checked_dataset_by_dataset(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    sizes = "image_transform_args: {image_stride: 16, max_image_size: 64, min_image_size: 32}"
    (tmp_path / "mix.yaml").write_text(
        f"t2i_pretrain: {{dataset_names: [pictures], {sizes}}}\nvlm_sft: {{dataset_names: [talks], {sizes}}}\n"
    )
    (tmp_path / "info.yaml").write_text(
        "t2i_pretrain: {pictures: {data_dir: t2i}}\n"
        "vlm_sft: {talks: {data_dir: vlm/media, jsonl_path: vlm/train.jsonl}}\n"
    )

    checked = run("check", "--config", tmp_path / "mix.yaml", "--info", tmp_path / "info.yaml")

    assert checked.exit_code == 1
    assert "pictures" in checked.stdout
    assert "talks" in checked.stdout
    assert "train.jsonl row 12: row_invalid" in checked.stdout


def test_a_source_without_rows_has_nothing_to_check(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n")

    with pytest.raises(ConfigError, match="has no row"):
        check_source(Source(kind="vlm", name="x", path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 arguments where a kind and a source belong"),
        (["t2i"], "1 arguments where a kind and a source belong"),
        (["t2v", "a"], "'t2v' is none of t2i, vlm, edit"),
        (["--config", "a.yaml"], "--config and --info go together"),
        (["t2i", "a", "--config", "a.yaml", "--info", "b.yaml"], "with --config no place is given"),
        (["t2i", "gone"], "gone: no such file or folder"),
    ],
)
def test_what_will_not_do_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    refused = run("check", *arguments)

    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")
    assert message in refused.stderr
