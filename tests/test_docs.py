"""The README's commands and programs run as they stand, and the docs' tables are those of the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from bagel_wds.errors import Reason
from examples.corpus import draw_corpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from s3_store import S3Store

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(bash|python)\n(.*?)```", README, flags=re.DOTALL)


IN_A_BUCKET = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)


def run(language: str, block: str, folder: Path, more: Mapping[str, str] = MappingProxyType({})) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}
    command = ["bash", "-euc", block] if language == "bash" else [sys.executable, "-c", block]
    if language == "python":
        (folder / "block.py").write_text(block)
        command = [sys.executable, "block.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_readme_runs_from_top_to_bottom(tmp_path: Path) -> None:
    draw_corpus(tmp_path / "demo-data" / "sources")
    for name in ("tests", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)

    printed = [run(language, block, tmp_path) for language, block in BLOCKS]

    assert [language for language, _ in BLOCKS] == [*["bash"] * 3, *["python"] * 3, "bash"]
    assert "vlm_sft" in printed[2] or "vlm" in printed[2]
    assert re.fullmatch(r"\d+ torch.Size\(\[\d+, 3, \d+, \d+\]\) torch.Size\(\[\d+\]\)\n", printed[3])
    assert len(printed[4].splitlines()) >= 1
    assert printed[5].strip().isdigit()
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs/resume.md").read_text(), flags=re.DOTALL):
        assert "'batches': 4" in run("python", block, tmp_path)
        assert "'batches': 8" in run("python", block, tmp_path)
    assert (tmp_path / "demo-data/converted/dataset_info.yaml").exists()
    assert len(list((tmp_path / "demo-data/one").rglob("*.tar"))) == 3


@pytest.mark.slow
def test_readmes_conversion_into_a_bucket_runs_and_trains_as_from_the_disk(
    tmp_path: Path, s3_store: S3Store
) -> None:
    draw_corpus(tmp_path / "demo-data" / "sources")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    s3_store.make_bucket("my-bucket")
    at_home = BLOCKS[3][1].replace("num_workers=2", "num_workers=0")

    [commands] = IN_A_BUCKET
    assert "vlm_sft" in run("bash", commands, tmp_path, s3_store.environment)
    run("bash", BLOCKS[0][1], tmp_path)
    afar = at_home.replace("demo-data/converted/", "s3://my-bucket/converted/")

    assert run("python", afar, tmp_path, s3_store.environment) == run("python", at_home, tmp_path)


def test_table_of_reasons_is_that_of_the_code() -> None:
    codes = re.findall(r"^\| `(\w+)` \| (.+) \|$", (ROOT / "docs/reasons.md").read_text(), flags=re.MULTILINE)

    assert [code for code, _ in codes] == [str(reason) for reason in Reason]
    assert all(meaning.endswith(".") for _, meaning in codes)


@pytest.mark.parametrize(
    "name",
    ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))],
)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))

    assert [link for link in links if not (page.parent / link).exists()] == []


def test_divergence_table_names_tests_that_exist() -> None:
    page = (ROOT / "docs/divergence.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:peer/)?test_\w+\.py)`(?:: ([\w ]+))?", page)
    tables = [
        re.split(r" \|\n\| ", table)
        for table in re.findall(r"^\| .+ \|$(?:\n\| .+ \|$)+", page, re.MULTILINE)
    ]
    rows = [row for table in tables for row in table[2:]]

    assert len(rows) > 60
    assert [row for table in tables for row in table if row.count(" | ") != table[0].count(" | ")] == []
    # Each row is held by a test.
    assert [row for row in rows if not re.search(r"`[\w/]+\.py`: ", row.rpartition(" | ")[2])] == []
    assert [file for file, _ in named if not (ROOT / "tests" / file).exists()] == []
    # The words behind a file are of the name of one of its tests.
    assert [
        f"{file}: {words}"
        for file, words in named
        if not re.search(
            rf"^def test_\w*{words.strip().replace(' ', '_')}",
            (ROOT / "tests" / file).read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    ] == []
