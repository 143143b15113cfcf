"""The packer and the layout give upstream's batches, bit for bit, from prepared samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from golden_batches import assert_batch, config_of
from golden_data import LoggedDraws, draws_made, load_arrays, load_json
from PIL import Image

from bagel_wds.config import Pixels
from bagel_wds.images import DecodedImage
from bagel_wds.materialize import ViewLoader, materialize_pack
from bagel_wds.mixture import MixGroup, Mixture
from bagel_wds.packer import UpstreamPacker
from bagel_wds.planners import settle
from bagel_wds.records import Kind, Pack, SamplePlan, Segment, View
from bagel_wds.wiring import dropout_rates, layout_rules, pack_limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

CASES = [case["case"] for case in load_json("packing/index.json")["cases"]]


def picture_of(tensor: NDArray[np.float32]) -> DecodedImage:
    """The picture that became a tensor of a prepared sample."""
    levels = np.rint((tensor.astype(np.float64) * 0.5 + 0.5) * 255).astype(np.uint8)
    return DecodedImage(Image.fromarray(levels.transpose(1, 2, 0)), upright=False)


def plan_of(
    sample: dict[str, Any], config: dict[str, Any], pixels: Mapping[str, NDArray[np.float32]]
) -> SamplePlan:
    """A prepared sample as a plan; the pixels of view n are tensor n of the sample."""
    patches = {Kind.VIT_IMAGE: config["vit_patch_size"], Kind.VAE_IMAGE: config["vae_image_downsample"]}
    texts = iter(sample["text_ids_list"])
    segments: list[Segment] = []
    views: list[View] = []
    for entry in sample["sequence_plan"]:
        kind = Kind(entry["type"])
        common = {
            "loss": bool(entry["loss"]),
            "enable_cfg": bool(entry["enable_cfg"]),
            "special_token_loss": bool(entry["special_token_loss"]),
            "special_token_label": entry["special_token_label"],
            "split_start": entry.get("split_start", True),
            "split_end": entry.get("split_end", True),
            "frame_delta": entry.get("frame_delta"),
        }
        if kind is Kind.TEXT:
            ids = tuple(next(texts))
            segments.append(Segment(kind, len(ids) + 2, token_ids=ids, **common))
        else:
            _, height, width = sample["image_tensor_list"][len(views)]["shape"]
            tokens = (height // patches[kind]) * (width // patches[kind]) + 2
            segments.append(Segment(kind, tokens, view=len(views), **common))
            views.append(View(len(views), 0, kind, (height, width)))
    return SamplePlan(
        key=f"{sample['group']}-{sample['index']}",
        group=sample["data_indexes"]["dataset_name"],
        segments=tuple(segments),
        views=tuple(views),
        media=tuple(
            (picture_of(pixels[f"g{sample['group']}.s{sample['index']}.i{number}"]),)
            for number in range(len(views))
        ),
        estimate=sample["need"],
        indexes=tuple(sample["data_indexes"]["data_indexes"]),
    )


@pytest.mark.parametrize("case", CASES)
def test_batches(case: str) -> None:
    folder = f"packing/{case}"
    config, trace = load_json(f"{folder}/config.json"), load_json(f"{folder}/trace.json")["batches"]
    samples = load_json(f"{folder}/samples.json")["samples"]
    pixels = load_arrays(f"{folder}/samples.npz")
    settings = config_of(config)
    draws = LoggedDraws(config["iter_seed"])
    rates, gone = dropout_rates(settings), []

    def endless(number: int) -> Iterator[SamplePlan]:
        own = [plan_of(sample, config, pixels) for sample in samples if sample["group"] == number]
        while True:
            yield from own

    mixture = Mixture(
        [
            MixGroup(group["name"], endless(number), group["weight"], group["is_mandatory"])
            for number, group in enumerate(config["groups"])
        ],
        draws,
    )
    packer = UpstreamPacker(
        pack_limits(settings),
        settle=lambda plan: settle(plan, rates, draws, upstream=True),
        gone=lambda plan, why: gone.append((plan.key, why)),
    )
    rules = layout_rules(settings, config["special_tokens"])
    golden = load_json(f"{folder}/batches.json")["batches"]
    uids: list[str] = []
    for number, expected in enumerate(golden):
        plans = packer.next_pack(mixture)
        assert plans is not None
        batch = materialize_pack(
            Pack(plans, config["worker_id"]),
            rules,
            ViewLoader(path=Pixels.EXACT),
            lambda plan, bad: pytest.fail(f"{plan.key}: {bad}"),
        )
        assert batch is not None
        assert_batch(batch, expected, load_arrays(f"{folder}/batches.npz"))

        uids += [f"{group}-{index}" for _, group, index in trace[number]["drawn"]]
        assert [plan.key for plan in plans] == [uids[uid] for uid, _, _ in trace[number]["packed"]]
        assert [plan.key for plan in packer.buffer] == [uids[uid] for uid in trace[number]["buffer_after"]]
        assert gone == [(uids[uid], why) for uid, why in trace[number]["gone"]]
        assert draws.take_log() == draws_made(trace[number]["rng_draws"])
        assert draws.peek().items() <= trace[number]["rng_after"].items()
        gone.clear()
    assert len(golden) >= 4
