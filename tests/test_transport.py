"""How pixels are decoded, by how many threads, and how they travel changes no batch but as its setting says."""

from __future__ import annotations

import io
import json
import pickle
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import webdataset as wds
from golden_data import tokenizer
from PIL import Image
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_info, small_config, write_tar
from torch.utils.data import DataLoader

from bagel_wds import ConfigError, PackedLoader, SimpleCustomBatch, Tally, collate_wrapper, stages
from bagel_wds.config import Pixels, Transport
from bagel_wds.layout import KEY_ORDER
from bagel_wds.wiring import view_loader

if TYPE_CHECKING:
    from pathlib import Path

    from bagel_wds import PackedDataset

# Two ways to normalize in one batch.
GROUPS = {
    **MIXTURE,
    "vlm_sft": {
        **MIXTURE["vlm_sft"],
        "image_transform_args": {
            **MIXTURE["vlm_sft"]["image_transform_args"],
            "image_mean": (0.485, 0.456, 0.406),
            "image_std": (0.229, 0.224, 0.225),
        },
    },
}


def photo(number: int, size: tuple[int, int]) -> bytes:
    """A JPEG with something to see everywhere."""
    rough = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def edit(number: int, broken: tuple[int, ...] = ()) -> dict[str, Any]:
    pictures = [photo(5 * number + i, (91 + 7 * number % 40, 67 + 3 * i)) for i in range(3)]
    for place in broken:
        pictures[place] = pictures[place][:-60]
    return {
        "__key__": f"edit-{number}",
        "json": {"instruction_list": [["redder"], ["bluer"]]},
        **{f"{i}.jpg": picture for i, picture in enumerate(pictures)},
    }


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("shards")
    rows = [edit(n, (0, 1) if n == 4 else ()) for n in range(9)]
    return {
        **foreign_info(folder),
        "unified_edit": {"seed": {"shards": [write_tar(folder / "edits.tar", rows)]}},
    }


def build(info: dict[str, Any], **more: Any) -> PackedDataset:
    base: dict[str, Any] = {"dataset_info": info, "grouped_datasets": GROUPS, "num_streams": 2}
    config = small_config(**{**base, **more})
    return config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)


def batches(info: dict[str, Any], count: int = 12, **more: Any) -> list[SimpleCustomBatch]:
    return [SimpleCustomBatch([batch]) for batch in islice(build(info, **more), count)]


def bookmark(batch: SimpleCustomBatch) -> dict[str, Any]:
    assert batch.state is not None
    return batch.state.to_json()


def assert_equal(one: SimpleCustomBatch, other: SimpleCustomBatch) -> None:
    """Both have the same keys in the same order, and every bit alike."""
    mine, theirs = one.to_dict(), other.to_dict()
    assert list(mine) == list(theirs)
    for key, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[key].dtype
            assert torch.equal(value, theirs[key]), key
        elif key == "nested_attention_masks":
            assert all(torch.equal(*pair) for pair in zip(value, theirs[key], strict=True))
        else:
            assert value == theirs[key], key


def test_uint8_batches_are_finished_to_the_bits_of_float32_ones(info: dict[str, Any]) -> None:
    expected, sent = batches(info), batches(info, transport="uint8")

    kinds = set()
    for one, other in zip(expected, sent, strict=True):
        moved = other.to("cpu")
        assert moved is other
        assert_equal(one, moved)
        assert list(moved.to_dict()) == [key for key in KEY_ORDER if hasattr(moved, key)]
        assert bookmark(moved) == bookmark(one)
        kinds |= {key for key in ("padded_images", "packed_vit_tokens") if hasattr(one, key)}
        # Moved again, it stays as it is.
        assert_equal(one, moved.to("cpu"))
    assert kinds == {"padded_images", "packed_vit_tokens"}


def test_a_batch_that_is_not_finished_says_so(info: dict[str, Any]) -> None:
    (batch,) = batches(info, 1, transport="uint8")

    for name in ("padded_images", "packed_vit_tokens"):
        with pytest.raises(RuntimeError, match=rf"{name}: .* still uint8 .* call batch.to\(device\) first"):
            getattr(batch, name)
        # Not a batch without pictures either.
        with pytest.raises(RuntimeError, match="still uint8"):
            hasattr(batch, name)
    with pytest.raises(RuntimeError, match=r"to_dict\(\): .* still uint8"):
        batch.to_dict()
    assert batch.sequence_length == sum(batch.sample_lens)
    # Upstream's name for it, which takes any device.
    assert batch.cuda("cpu") is batch
    with pytest.raises(AttributeError, match="no 'nothing'"):
        batch.nothing  # noqa: B018


def test_collate_that_knows_no_levels_cannot_take_a_batch_for_one_without_pictures(
    info: dict[str, Any],
) -> None:
    sent, whole = (next(iter(build(info, transport=transport))) for transport in ("uint8", "float32"))

    # As upstream's collates ask.
    known, sent_known = whole.keys(), sent.keys()
    for name in ("padded_images", "packed_vit_tokens"):
        assert name in known
        with pytest.raises(
            RuntimeError, match=rf"{name}: .* this collate does not know; use .*collate_wrapper"
        ):
            _ = name in sent_known
    assert {"packed_text_ids", "nested_attention_masks"} <= sent_known
    assert list(sent_known) == list(sent)


def test_a_batch_without_pictures_has_none_on_either_transport(tmp_path: Path) -> None:
    rows = [
        {
            "__key__": f"t{n}",
            "json": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
        }
        for n in range(4)
    ]
    info = {"vlm_sft": {"vlm": {"shards": write_tar(tmp_path / "text.tar", rows)}}}
    groups = {"vlm_sft": GROUPS["vlm_sft"]}

    for transport in Transport:
        (batch,) = batches(info, 1, grouped_datasets=groups, transport=transport)
        assert not hasattr(batch, "padded_images")
        assert "packed_vit_tokens" not in batch.to_dict()


@pytest.mark.parametrize("workers", [1, 2])
def test_uint8_batches_come_out_of_workers_whole_and_are_smaller(info: dict[str, Any], workers: int) -> None:
    expected = batches(info, 6)
    dataset = build(info, transport="uint8")
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=1,
        num_workers=workers,
        collate_fn=collate_wrapper(),
        multiprocessing_context="fork",
    )

    for one, other in zip(expected, loader, strict=False):
        # A worker's memory is shared and not copied: what travels by pipe is small.
        assert_equal(one, other.to("cpu"))


def test_levels_are_a_quarter_of_the_bytes(info: dict[str, Any]) -> None:
    def size(batch: SimpleCustomBatch) -> int:
        return len(pickle.dumps(batch))

    floats, levels = (batches(info, 6, transport=transport, use_flex=True) for transport in Transport)
    pixels = sum(4 * (batch.padded_images.numel() + batch.packed_vit_tokens.numel()) for batch in floats)

    saved = sum(map(size, floats)) - sum(map(size, levels))
    # Padding does not travel either.
    assert saved > 0.75 * pixels - 6 * 10_000


@pytest.mark.parametrize("transport", Transport)
def test_a_loader_with_a_device_gives_finished_batches_there(info: dict[str, Any], transport: str) -> None:
    expected = batches(info, 6)
    loader = PackedLoader(build(info, transport=transport), device="cpu")

    got = list(islice(loader, 6))

    for one, other in zip(expected, got, strict=True):
        assert_equal(one, other)
    assert loader.state_dict()["next_batch"] == 6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_bits_are_those_of_the_cpu(info: dict[str, Any]) -> None:
    loader = PackedLoader(build(info), device="cuda")

    for one, other in zip(batches(info, 6), loader, strict=False):
        assert other.packed_text_ids.device.type == "cuda"
        assert_equal(one, other.to("cpu"))


@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_neither_batches_nor_drops(info: dict[str, Any], threads: int, transport: str) -> None:
    one = batches(info, transport=transport)
    other = batches(info, transport=transport, decode_threads=threads)

    for alone, shared in zip(one, other, strict=True):
        assert_equal(alone.to("cpu"), shared.to("cpu"))
        assert bookmark(shared) == bookmark(alone)
    dropped = [bookmark(batch)["counts"]["unified_edit"].get("dropped", {}) for batch in one]
    assert any(reasons.get("image_truncated") for reasons in dropped)


def test_a_sample_that_fails_leaves_its_pack_before_it_is_laid_out(tmp_path: Path) -> None:
    rows = [edit(0), edit(1, broken=(0, 1, 2)), edit(2)]
    url = write_tar(tmp_path / "edits.tar", rows)
    without = write_tar(tmp_path / "whole.tar", [rows[0], rows[2]])
    config = small_config(
        grouped_datasets={"unified_edit": GROUPS["unified_edit"]},
        expected_num_tokens=10_000,
        max_num_tokens=10_000,
        vae_cond_dropout_prob=0.0,
        vit_cond_dropout_prob=0.0,
        transport="uint8",
    )
    tally = Tally()

    def only(path: str) -> SimpleCustomBatch:
        (batch,) = wds.DataPipeline(
            wds.SimpleShardList([path]),
            wds.tarfile_to_samples(),
            stages.decode(config, "unified_edit"),
            stages.plan(config, "unified_edit", tokenizer()),
            stages.pack(config),
            stages.materialize(config, SPECIAL_TOKENS, tally=tally),
            stages.collate(),
        )
        assert isinstance(batch, SimpleCustomBatch)
        return batch.to("cpu")

    one, other = only(url), only(without)

    assert len(one.batch_data_indexes) == 2
    assert torch.equal(one.padded_images, other.padded_images)
    assert torch.equal(one.packed_vit_tokens, other.packed_vit_tokens)
    assert tally.as_dict()["unified_edit"]["dropped"] == {"image_truncated": 1}


def test_a_run_goes_on_with_other_pixels_transport_and_threads(info: dict[str, Any]) -> None:
    before = PackedLoader(build(info))
    list(islice(before, 3))
    saved = json.loads(json.dumps(before.state_dict()))
    after = PackedLoader(build(info, pixels="exact", transport="uint8", decode_threads=2))
    after.load_state_dict(saved)

    expected = batches(info, 6, pixels="exact")[3:]

    for one, other in zip(expected, after, strict=False):
        assert_equal(one, other.to("cpu"))


def test_fast_and_exact_batches_have_the_same_bits(info: dict[str, Any]) -> None:
    for fast, exact in zip(batches(info), batches(info, pixels="exact"), strict=True):
        assert_equal(fast, exact)
        assert bookmark(fast) == bookmark(exact)


def test_default_is_fast_and_exact_under_upstream_fidelity() -> None:
    assert small_config().pixel_path is Pixels.FAST
    assert small_config(fidelity="upstream").pixel_path is Pixels.EXACT
    assert small_config(pixels="draft").pixel_path is Pixels.DRAFT
    assert view_loader(small_config(pixels="exact", decode_threads=3)).path is Pixels.EXACT
    assert view_loader(small_config(decode_threads=3)).threads == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"pixels": "quick"}, "pixels='quick' is none of 'fast', 'exact', 'draft'"),
        ({"pixels": "fast", "fidelity": "upstream"}, "pixels='fast': .*upstream's pixels; leave pixels out"),
        ({"pixels": "draft", "fidelity": "upstream"}, "pixels='draft'"),
        ({"transport": "uint16"}, "transport='uint16' is none of 'float32', 'uint8'"),
        ({"decode_threads": 0}, "decode_threads=0 must be an integer from 1 on"),
        ({"decode_threads": True}, "decode_threads=True must be an integer from 1 on"),
    ],
)
def test_settings_of_pixels_that_cannot_be_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**setting)
