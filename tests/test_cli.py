"""The command line: both forms of convert, show, and one clean line where something will not do."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from source_factory import encode_image, write_corpus, write_t2i
from typer.testing import CliRunner, Result

from bagel_wds.cli import app
from bagel_wds.console import format_size, parse_size
from bagel_wds.errors import ConfigError

REAL = Path(__file__).parent / "data" / "real"
ROOT = Path(__file__).parent.parent


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def rows_of(output: str) -> list[list[str]]:
    """The cells of a printed table."""
    return [
        [cell.strip() for cell in line.strip("│ \n").split("│")]
        for line in output.splitlines()
        if "│" in line
    ]


def test_one_source_is_converted_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "out"

    done = run("convert", "t2i", REAL / "t2i", out, "--processes", "1", "--name", "pictures")

    assert done.exit_code == 0, done.output
    assert rows_of(done.stdout) == [["pictures", "t2i", "8", "8", "0", "1", "4.1 MB"]]
    shown = run("show", out)
    assert shown.exit_code == 0
    assert re.search(r"samples +8\n", shown.stdout)
    assert re.search(r"quarantined +0 of 8 rows\n", shown.stdout)
    assert re.search(r"kinds +t2i 8\n", shown.stdout)
    assert "jpg 6, png 2; 1 a sample; 380x570 to 1280x1024 (height x width)" in shown.stdout


def test_a_sample_is_printed_in_full(tmp_path: Path) -> None:
    run(
        "convert",
        "vlm",
        REAL / "vlm" / "train.jsonl",
        tmp_path / "out",
        "--media-root",
        REAL / "vlm" / "images",
    )

    shown = run("show", tmp_path / "out", "--key", "train=2Ejsonl-3")

    first, *rest = shown.stdout.splitlines()
    assert first.startswith("train=2Ejsonl-3 in ")
    assert rest[-1] == "0.jpg: 131830 bytes, jpg, 1080x1920 (height x width)"
    sample = json.loads("\n".join(rest[:-1]))
    assert sample["id"] == "r4"
    assert "招牌上写着“曹记焖烤鸡腿”。" in shown.stdout


def test_a_mixture_is_converted_by_the_files_that_users_have(tmp_path: Path) -> None:
    sizes = {"image_stride": 16, "max_image_size": 512, "min_image_size": 256}
    mixture = {
        "t2i_pretrain": {"dataset_names": ["t2i"], "image_transform_args": sizes, "is_mandatory": True},
        "unified_edit": {
            "dataset_names": ["seed"],
            "image_transform_args": sizes,
            "vit_image_transform_args": sizes,
            "num_used_data": [10],
        },
        "vlm_sft": {"dataset_names": ["vlm"], "image_transform_args": sizes, "num_used_data": [1000]},
    }
    info = {
        "t2i_pretrain": {"t2i": {"data_dir": str(REAL / "t2i"), "num_files": 2, "num_total_samples": 8}},
        "unified_edit": {
            "seed": {
                "data_dir": str(REAL / "editing" / "seed"),
                "num_files": 1,
                "num_total_samples": 4,
                "parquet_info_path": str(REAL / "editing" / "parquet_info.json"),
            }
        },
        "vlm_sft": {
            "vlm": {
                "data_dir": str(REAL / "vlm" / "images"),
                "jsonl_path": str(tmp_path / "train.jsonl"),
                "num_total_samples": 9,
            }
        },
    }
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mixture))
    (tmp_path / "info.json").write_text(json.dumps(info))
    left_out = {"image": "gone.png", "conversations": [{"from": "gpt", "value": "a"}]}
    lines = (REAL / "vlm" / "train.jsonl").read_text(encoding="utf-8") + json.dumps(left_out) + "\n"
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    out = tmp_path / "out"

    done = run("convert", "--config", tmp_path / "mix.yaml", "--info", tmp_path / "info.json", out)

    assert done.exit_code == 0, done.output
    assert [row[:6] for row in rows_of(done.stdout)] == [
        ["t2i", "t2i", "8", "8", "0", "1"],
        ["seed", "edit", "4", "4", "0", "1"],
        ["vlm", "vlm", "9", "8", "1", "1"],
    ]
    assert f"quarantined: {out}/vlm_sft/vlm/quarantine.jsonl" in done.stdout
    assert f"dataset info: {out}/dataset_info.yaml" in done.stdout
    shown = run("show", out)
    assert re.search(r"vlm_sft\.vlm\n(.*\n)*? +quarantined +1 of 9 rows: image_missing 1\n", shown.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["t2i", "gone", "out"], "gone: no such file or folder"),
        (
            ["t2v", "a", "b"],
            "'t2v' is none of t2i, vlm, edit, interleaved; write `bagel-wds convert t2i|vlm|edit|interleaved SRC... OUT`",
        ),
        (["t2i", "a"], "2 arguments where a kind, a source and OUT belong"),
        (["vlm", "a", "b", "c"], "a: no such file or folder"),
        (["--config", "a.yaml", "out"], "--config and --info go together"),
        (["--config", "a.yaml", "--info", "b.yaml", "t2i", "out"], "with --config only OUT"),
        (
            ["--config", "a.yaml", "--info", "b.yaml", "out", "--name", "x"],
            "--name is not taken with --config",
        ),
        (["--config", "a.yaml", "--info", "b.yaml", "out"], "a.yaml: cannot be read as YAML or JSON"),
        (["t2i", "a", "b", "--video-column", "c"], "--video-column is not for t2i; it has --image-column"),
        (["t2i", "a", "b", "--max-quarantine", "few"], "'few' is no limit"),
        (["t2i", "a", "b", "--append", "--overwrite"], "--append and --overwrite do not go together"),
        (["t2i", "a", "b", "--shard-size", "much"], "'much' is no size"),
        (["t2i", "gone-{0..3}.parquet", "b"], "gone-"),
        (["t2i", "ftp://host/a", "b"], "ftp:// is not read; there are"),
    ],
)
def test_what_will_not_do_is_one_line_and_status_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    refused = run("convert", *arguments)

    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert message in refused.stderr
    assert refused.stdout == ""


def test_a_disk_that_refuses_is_one_line_too(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(encode_image(), "{}")])
    (tmp_path / "out" / "quarantine.jsonl").mkdir(parents=True)

    refused = run("convert", "t2i", tmp_path / "a.parquet", tmp_path / "out")

    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1


def test_show_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "cut.tar").write_bytes(b"\0" * 100)
    for path, message in (
        (tmp_path / "gone.tar", "gone.tar"),
        (tmp_path / "cut.tar", "the file ends"),
        (tmp_path / "x.yaml", "x.yaml"),
    ):
        refused = run("show", path)

        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.startswith("error: ")
        assert message in refused.stderr


def test_nothing_but_the_table_without_a_terminal_and_a_bar_with_one(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    command = [sys.executable, "-m", "bagel_wds.converters", "t2i", str(tmp_path / "t2i")]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "160"}
    quiet = subprocess.run(
        [*command, str(tmp_path / "a")], capture_output=True, text=True, check=True, env=environment
    )
    assert quiet.stderr == ""

    ours, theirs = pty.openpty()
    shown = subprocess.run(
        [*command, str(tmp_path / "b")],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=True,
        env=environment,
    )
    os.close(theirs)
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(ours, 1 << 20).decode())
    os.close(ours)

    assert "24/24 rows" in bar
    assert "2 quarantined" in bar
    assert shown.stdout == quiet.stdout.replace(f"{tmp_path}/a/", f"{tmp_path}/b/")


def test_the_command_runs_from_a_checkout(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(encode_image(seed=i), "{}") for i in range(4)])
    command = [sys.executable, "-m", "converters", "t2i", str(tmp_path / "a.parquet"), str(tmp_path / "out")]

    done = subprocess.run(
        [*command, "--processes", "2", "--shard-size", "1B"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert rows_of(done.stdout)[0][:6] == ["a", "t2i", "4", "4", "0", "4"]


def test_converting_and_showing_do_without_torch(tmp_path: Path) -> None:
    write_t2i(tmp_path / "a.parquet", [(encode_image(), "{}")])
    code = (
        "import sys; from bagel_wds.cli import app\n"
        f"app(['convert', 't2i', {str(tmp_path / 'a.parquet')!r}, {str(tmp_path / 'out')!r}], standalone_mode=False)\n"
        f"app(['show', {str(tmp_path / 'out')!r}], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'webdataset'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1048576", 1 << 20),
        ("256MB", 256 * 10**6),
        ("256MiB", 256 << 20),
        ("1.5 gib", 3 << 29),
        ("10kb", 10_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1 light year", "1e6"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


def test_sizes_are_written_with_a_unit() -> None:
    assert [format_size(size) for size in (0, 999, 1000, 4_097_024, 256_000_000, 3 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 KB",
        "4.1 MB",
        "256 MB",
        "3.0 TB",
    ]
