"""What is built is whole: the wheel holds every module, the converters under their installed name, and the marker of types."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_holds_every_module_and_the_converters(tmp_path: Path) -> None:
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("bagel_wds", "converters", "pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(copy)], check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(copy)], check=True)

    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "bagel_wds").rglob("*.py")}
    converters = {f"bagel_wds/{path.relative_to(ROOT)}" for path in (ROOT / "converters").rglob("*.py")}
    assert modules | converters | {"bagel_wds/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "examples", "converters"))]


def test_setup_cfg_and_pyproject_share_no_fact() -> None:
    import configparser
    import tomllib

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert set(setup.sections()) == {"options", "options.package_data"}
    assert set(setup["options"]) == {"packages", "package_dir"}
    assert "setuptools" not in project["tool"]
