"""What plans needs neither torch nor Pillow nor Numba, and an import of anything changes nothing in the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def run(script: str, folder: Path) -> Any:
    """Run a script in a fresh process, away from the checkout; gives the JSON that it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WITHOUT_PIXELS = """
import json, sys

for name in ("torch", "torchvision", "PIL", "transformers", "webdataset", "numba", "llvmlite"):
    sys.modules[name] = None  # from here on, an import of it fails

from dataclasses import dataclass

from bagel_wds import errors, frames, geometry, mixture, packer, planners, records, rng, schema, shards, shuffle, streams
from bagel_wds.records import Kind


@dataclass(frozen=True)
class FakePicture:
    size_hw: tuple
    num_bytes: int = 1000


tools = planners.PlanTools(
    group="g",
    encode=lambda text: [ord(letter) for letter in text],
    resize={
        Kind.VIT_IMAGE: geometry.ResizeRule(max_size=56, min_size=28, stride=14),
        Kind.VAE_IMAGE: geometry.ResizeRule(max_size=64, min_size=32, stride=16),
    },
)
picture = (FakePicture((32, 48)),)
rows = {
    "t2i": ({"captions": {"a": "abc"}}, 1),
    "vlm": ({"conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "this"}]}, 1),
    "edit": ({"instruction_list": [["redder"]]}, 2),
}
plans = {}
for name, (fields, media) in rows.items():
    draws = rng.KeyedDraws(0, name)
    sample = records.RawSample(schema.make_key(name, 0), "url", fields, (picture,) * media, (False,) * media)
    plan = planners.PLANNERS[name](sample, tools, draws)
    plans[name] = planners.settle(plan, planners.DropoutRates(0, 0, 0), draws)
groups = [mixture.MixGroup(name, iter([plan] * 5)) for name, plan in plans.items()]
supply = mixture.Mixture(groups, rng.KeyedDraws(0, "mix"))
limits = packer.PackLimits(
    expected_num_tokens=60, max_num_tokens=80, max_num_tokens_per_sample=80, prefer_buffer_before=40, max_buffer_size=3
)
greedy, packs = packer.GreedyPacker(limits), []
while (packed := greedy.next_pack(supply)) is not None:
    packs.append(packed)
table = [shards.Shard(f"{size}.tar", samples=size) for size in (3, 4)]
piece = next(shards.walk_epochs(table, seed=0, group="g", num_streams=2, stream=1))
shuffled = list(shuffle.shuffle([{"n": n} for n in range(9)], rng.KeyedDraws(0), max_samples=4, max_bytes=100))
print(json.dumps({
    "lengths": {name: plan.length for name, plan in plans.items()},
    "segments": {name: [str(segment.kind) for segment in plan.segments] for name, plan in plans.items()},
    "packed": sum(map(len, packs)),
    "longest": max(sum(plan.length for plan in packed) for packed in packs),
    "streams": list(streams.streams_of(8, rank=1, world_size=2, worker=0, num_workers=2)),
    "frames": len(frames.FrameRule().choose(100, rng.KeyedDraws(0))),
    "slice": piece.stop - piece.start,
    "shuffled": sorted(sample["n"] for sample in shuffled),
    "reason": str(errors.Reason.VIDEO),
}))
"""


def test_plans_are_made_and_packed_without_torch_pillow_and_numba(tmp_path: Path) -> None:
    told = run(WITHOUT_PIXELS, tmp_path)
    frames = told.pop("frames")

    # A picture of 32 x 48 has 2 x 3 patches of 16 pixels and becomes 28 x 42 for the ViT: 2 x 3 patches of 14.
    assert told == {
        "lengths": {"t2i": 5 + 8, "vlm": 8 + 7 + 6, "edit": 8 + 8 + 8 + 8},
        "segments": {
            "t2i": ["text", "vae_image"],
            "vlm": ["vit_image", "text", "text"],
            "edit": ["vae_image", "vit_image", "text", "vae_image"],
        },
        "packed": 15,
        "longest": told["longest"],
        "streams": [1, 5],
        "slice": 4,
        "shuffled": list(range(9)),
        "reason": "video",
    }
    assert 60 <= told["longest"] <= 80
    assert 8 <= frames <= 16


HEAVY = [
    "av",
    "numba",
    "torch",
    "torchvision",
    "PIL",
    "transformers",
    "webdataset",
    "pyarrow",
    "pydantic",
    "numpy",
    "yaml",
    "typer",
]


@pytest.mark.parametrize(
    ("statement", "may_load"),
    [
        ("import bagel_wds", set()),
        ("from bagel_wds import ConfigError, Reason, Tally", set()),
        ("import bagel_wds.config, bagel_wds.storage, bagel_wds.streams", {"numpy"}),
        ("from bagel_wds import BagelDatasetConfig; BagelDatasetConfig()", {"numpy"}),
        ("import bagel_wds.reader, bagel_wds.shards, bagel_wds.sources", {"numpy", "pyarrow", "PIL"}),
        ("import bagel_wds.reader, bagel_wds.shards", {"numpy", "pyarrow"}),
        ("import bagel_wds.images, bagel_wds.resample", {"numpy", "PIL"}),
        ("from bagel_wds import add_special_tokens", {"numpy"}),
        (
            "from bagel_wds import PackedDataset",
            {"torch", "webdataset", "pyarrow", "numpy", "PIL", "pydantic", "yaml"},
        ),
    ],
)
def test_an_import_loads_no_more_than_it_needs(tmp_path: Path, statement: str, may_load: set[str]) -> None:
    script = (
        f"import json, sys; {statement}; print(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    )

    assert set(run(script, tmp_path)) <= may_load


@pytest.mark.parametrize(
    ("module", "loaded"),
    [("images", ["PIL"]), ("pixels", ["torch"]), ("bicubic", ["numba"]), ("lookup", ["numba"])],
)
def test_rooms_of_pixels_load_what_they_need_so_that_the_checks_above_can_fail(
    tmp_path: Path, module: str, loaded: list[str]
) -> None:
    script = (
        f"import json, sys, bagel_wds.{module}; "
        "print(json.dumps([name for name in ('PIL', 'numba', 'torch') if name in sys.modules]))"
    )

    assert run(script, tmp_path) == loaded


def test_every_public_name_is_there(tmp_path: Path) -> None:
    script = "import json, bagel_wds; print(json.dumps([name for name in bagel_wds.__all__ if not hasattr(bagel_wds, name)]))"

    assert run(script, tmp_path) == []


IMPORT_EVERYTHING = """
import importlib, json, logging, multiprocessing, os, pkgutil, random, signal, sys, warnings

import numpy as np
import pyarrow as pa
import torch
from PIL import GifImagePlugin, Image, ImageFile, PngImagePlugin

# Whatever these do when they are imported is theirs.
others = ["braceexpand", "orjson", "pyarrow.parquet", "pyarrow.dataset", "pydantic", "rich.progress", "torch.utils.data",
          "torchvision.transforms", "transformers", "typer", "webdataset", "wids", "xxhash", "yaml"]
for name in others:
    importlib.import_module(name)


def state():
    return {
        "random": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "threads": [torch.get_num_threads(), pa.cpu_count(), pa.io_thread_count()],
        "default dtype": str(torch.get_default_dtype()),
        "warnings": repr(warnings.filters),
        "logging": [repr(logging.root.handlers), logging.root.level, logging.root.manager.disable],
        "our logger": repr([logging.getLogger("bagel_wds").handlers, logging.getLogger("bagel_wds").level]),
        "environment": dict(os.environ),
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "processes": multiprocessing.get_start_method(allow_none=True),
        "pillow": [ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS, PngImagePlugin.MAX_TEXT_CHUNK,
                   str(GifImagePlugin.LOADING_STRATEGY)],
        "hooks": [repr(sys.excepthook), repr(sys.displayhook), sys.getrecursionlimit()],
    }


import bagel_wds

before = state()
changed, imported = {}, []
import bagel_wds.converters
for package in (bagel_wds, bagel_wds.converters):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        imported.append(module.name)
        now = state()
        changed |= {f"{module.name}: {what}": now[what] for what in now if now[what] != before[what]}
        before = now
print(json.dumps({"changed": changed, "imported": imported}))
"""


def test_an_import_of_any_module_changes_nothing_in_the_process(tmp_path: Path) -> None:
    told = run(IMPORT_EVERYTHING, tmp_path)

    assert told["changed"] == {}
    assert {
        "bagel_wds.images",
        "bagel_wds.bicubic",
        "bagel_wds.planners.edit",
        "bagel_wds.datasets",
        "bagel_wds.cli",
    } <= set(told["imported"])
    assert any(name.startswith("bagel_wds.converters.") for name in told["imported"])
    assert list(tmp_path.iterdir()) == []
