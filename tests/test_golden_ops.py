"""The small functions give upstream's values, bit for bit: every golden file but samples, packing and pipeline."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
import torch
from golden_data import (
    GOLDEN,
    LoggedDraws,
    assert_bits,
    draws_made,
    load_arrays,
    load_json,
    plain_tokenizer,
    sha256,
    tokenizer,
)
from PIL import Image

from bagel_wds import images
from bagel_wds.attention import prepare_attention_mask_per_sample, visible_pairs
from bagel_wds.frames import frame_indices
from bagel_wds.geometry import ResizeRule
from bagel_wds.layout import len2weight
from bagel_wds.pixels import patchify, to_tensor
from bagel_wds.positions import get_flattened_position_ids_extrapolate, get_flattened_position_ids_interpolate
from bagel_wds.rng import upstream_iter_seed
from bagel_wds.tokens import TextEncoder, add_special_tokens
from bagel_wds.transforms import ImageTransform


def test_files_are_those_that_the_manifest_names() -> None:
    for name, (size, digest) in load_json("MANIFEST.json")["files"].items():
        data = (GOLDEN / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest), name


def test_resize_sizes() -> None:
    table = load_json("resize/resize.json")
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]

    assert len(rows) > 100
    for row in rows:
        rule = ResizeRule(
            max_size=row["max_size"],
            min_size=row["min_size"],
            stride=row["stride"],
            max_pixels=row["max_pixels"],
        )
        got = rule.size((row["height"], row["width"]), row["img_num"])
        assert got == (row["new_height"], row["new_width"]), row


TRANSFORM = load_json("transform/cases.json")


@pytest.mark.parametrize("case", TRANSFORM["cases"], ids=lambda case: case["image"])
def test_transform(case: dict[str, Any]) -> None:
    data = (GOLDEN / "transform/images" / case["image"]).read_bytes()
    rgb = images.decode_rgb_as_upstream(data)
    array = np.asarray(rgb)

    assert hashlib.sha256(array.tobytes()).hexdigest() == case["rgb"]["sha256"]
    for output in case["outputs"]:
        args = TRANSFORM["transforms"][output["transform"]]
        tensor = ImageTransform(**args)(rgb, img_num=output["img_num"])
        assert list(tensor.shape) == output["shape"]
        assert sha256(tensor) == output["sha256"]
        if output["key"] is not None:
            assert_bits(tensor, load_arrays("transform/tensors.npz")[output["key"]])
        # The pipeline's own path gives the same bits as the class that stands in for upstream's.
        mean, std = args.get("image_mean", (0.5, 0.5, 0.5)), args.get("image_std", (0.5, 0.5, 0.5))
        resized = images.resize(rgb, (tensor.shape[1], tensor.shape[2]))
        assert torch.equal(to_tensor(resized, mean, std), tensor)


def test_patchify() -> None:
    arrays = load_arrays("ops/patchify.npz")
    for row in load_json("ops/patchify.json")["rows"]:
        if "raises" in row:
            with pytest.raises(AssertionError, match="does not divide"):
                patchify(torch.zeros(row["in_shape"]), row["patch_size"])
        else:
            got = patchify(torch.from_numpy(arrays[f"{row['case']}.in"]), row["patch_size"])
            assert_bits(got, arrays[f"{row['case']}.out"])


def test_position_ids() -> None:
    functions = {
        "extrapolate": get_flattened_position_ids_extrapolate,
        "interpolate": get_flattened_position_ids_interpolate,
    }
    arrays = load_arrays("ops/position_ids.npz")
    for row in load_json("ops/position_ids.json")["rows"]:
        patch, side, ids = row["patch_size"], row["max_num_patches_per_side"], functions[row["kind"]]
        if row["axis_table"]:
            got = torch.cat([ids(n * patch, patch, patch, side) for n in row["lengths"]])
        else:
            got = ids(row["img_h"], row["img_w"], patch, side)
        assert_bits(got, arrays[row["key"]])


def test_len2weight() -> None:
    table = load_json("ops/len2weight.json")
    for x, reduction, weight in table["rows"]:
        assert len2weight(x, reduction) == weight
    for x, reduction, outcome in table["unknown_reduction"]:
        if isinstance(outcome, str):
            with pytest.raises(NotImplementedError):
                len2weight(x, reduction)
        else:
            assert len2weight(x, reduction) == outcome
    assert len2weight(7) == len2weight(7, table["default_reduction"])


def test_attention_masks() -> None:
    arrays = load_arrays("ops/attention_mask.npz")
    for row in load_json("ops/attention_mask.json")["rows"]:
        got = prepare_attention_mask_per_sample(row["split_lens"], row["attn_modes"])
        assert_bits(got, arrays[str(row["case"])])


def test_masks_of_packed_sequences() -> None:
    arrays = load_arrays("ops/sparse_mask.npz")
    for row in load_json("ops/sparse_mask.json")["rows"]:
        got = visible_pairs(row["document_lens"], row["split_lens"], row["attn_modes"])
        assert_bits(got, arrays[str(row["case"])])


def test_frame_indices() -> None:
    for row in load_json("ops/frame_indices.json")["rows"]:
        draws = LoggedDraws(row["seed"])

        def choose(row: dict[str, Any] = row, draws: LoggedDraws = draws) -> list[int]:
            return frame_indices(
                row["num_frames"],
                row["vlen"],
                row["sample"],
                draws,
                fix_start=row["fix_start"],
                input_fps=row["input_fps"],
                max_num_frames=row["max_num_frames"],
            )

        if isinstance(row["indices"], str):
            with pytest.raises(ValueError, match="sample="):
                choose()
        else:
            assert choose() == row["indices"], row
        assert draws.log == draws_made(row["draws"])


def test_iter_seed() -> None:
    for row in load_json("ops/iter_seed.json")["rows"]:
        seed = row.pop("seed")
        assert upstream_iter_seed(**row) == seed


def test_special_tokens() -> None:
    for row in load_json("ops/special_tokens.json")["rows"]:
        plain = plain_tokenizer()
        first_two, reverse = (
            ["<|im_start|>", "<|im_end|>"],
            ["<|vision_end|>", "<|vision_start|>", "<|im_end|>", "<|im_start|>"],
        )
        match row["tokenizer"]:
            case "with_im_tokens":
                plain.add_special_tokens({"additional_special_tokens": first_two})
            case "with_all_four":
                plain.add_special_tokens({"additional_special_tokens": reverse})
            case "already_added":
                plain.add_tokens(list(reversed(reverse)))
        assert len(plain) == row["length_before"]

        same, ids, num_new = add_special_tokens(plain)

        assert same is plain
        assert (len(plain), num_new, ids) == (row["length_after"], row["num_new_tokens"], row["ids"])


def test_tokenizer() -> None:
    cases = load_json("tokenizer_cases.json")
    encode = TextEncoder(tokenizer(), allow_control_tokens=True)

    assert len(encode.tokenizer) == cases["length_after_add_special_tokens"]
    for row in cases["rows"]:
        assert encode(row["text"]) == row["ids"], json.dumps(row["text"])


def test_truncated_image_switch_is_left_as_it_was() -> None:
    from PIL import ImageFile

    data = (GOLDEN / "transform/images/rgb.jpg").read_bytes()
    images.decode_rgb_as_upstream(data[: len(data) * 2 // 3])

    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
    assert isinstance(images.decode_rgb_as_upstream(data), Image.Image)
