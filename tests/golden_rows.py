"""The rows of `tests/golden/samples` as the webdataset samples that a conversion of them would hold."""

from __future__ import annotations

from typing import Any

import orjson
from golden_data import GOLDEN, frame_config, load_json, tokenizer, transform_config

from bagel_wds.config import Fidelity, Pixels
from bagel_wds.materialize import Normalization, ViewLoader
from bagel_wds.planners import PlanTools
from bagel_wds.records import Kind
from bagel_wds.tokens import TextEncoder


def webdataset_sample(family: str, number: int, row: dict[str, Any]) -> dict[str, Any]:
    """One row as a webdataset sample: its JSON and its media's bytes; media that are missing are left out."""
    folder = GOLDEN / "samples" / family / "files"
    sample: dict[str, Any] = {"__key__": f"row-{number}", "__url__": f"golden/{family}"}
    if family == "t2i":
        sample["json"] = orjson.dumps({"captions": row["captions"]})
        paths = [row["image"]]
    elif family == "edit":
        sample["json"] = orjson.dumps({"instruction_list": row["instruction_list"]})
        paths = row["image_list"]
    else:
        sample["json"] = row["line"].encode()
        try:
            fields = orjson.loads(row["line"])
        except orjson.JSONDecodeError:
            fields = {}
        image = fields.get("image", fields.get("video", []))
        paths = [image] if isinstance(image, str) else image
    for medium, path in enumerate(paths):
        if path.endswith("/"):
            frames = sorted(
                (folder / path).glob("*.jpg"), key=lambda frame: int(frame.stem.rpartition("_")[2])
            )
            for i, frame in enumerate(frames):
                sample[f"{medium}.{i:03d}.jpg"] = frame.read_bytes()
        elif (folder / path).exists():
            sample[f"{medium}.{path.rpartition('.')[2]}"] = (folder / path).read_bytes()
    return sample


def plan_tools(
    family: str, transforms: dict[Kind, dict[str, Any]], frames: dict[str, Any] | None = None
) -> PlanTools:
    """The planner's tools under the upstream fidelity; `transforms` by kind of view."""
    return PlanTools(
        group=family,
        encode=TextEncoder(tokenizer(), allow_control_tokens=True),
        resize={kind: transform_config(args).resize for kind, args in transforms.items()},
        frames=frame_config(frames or {}).rule(Fidelity.UPSTREAM),
        upstream=True,
    )


def transforms_of(family: str, config: dict[str, Any]) -> dict[Kind, dict[str, Any]]:
    """The transforms that a golden file gives for a family, by kind of view."""
    if family == "t2i":
        return {Kind.VAE_IMAGE: config["transform"]}
    if family == "edit":
        return {Kind.VAE_IMAGE: config["transform"], Kind.VIT_IMAGE: config["vit_transform"]}
    return {Kind.VIT_IMAGE: config.get("vlm_transform", config["transform"])}


def rows_of(family: str) -> list[dict[str, Any]]:
    """The rows of a family, as webdataset samples, in order."""
    rows = load_json(f"samples/{family}/cases.json")["rows"]
    return [webdataset_sample(family, number, row) for number, row in enumerate(rows)]


def view_loader(family: str, config: dict[str, Any]) -> ViewLoader:
    """How the pictures of a family become pixels."""
    return ViewLoader(
        {
            (family, kind): Normalization(transform_config(args).image_mean, transform_config(args).image_std)
            for kind, args in transforms_of(family, config).items()
        },
        path=Pixels.EXACT,
    )
