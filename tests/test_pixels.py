"""Levels become upstream's floats, bit for bit, wherever they are finished."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagel_wds.pixels import (
    Shown,
    allot,
    float_table,
    gather_pixels,
    joined,
    pack_pixels,
    patchify,
    to_tensor,
    write_pixels,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

HALF = (0.5, 0.5, 0.5)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def levels(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As upstream pads: zeros, then each picture in its corner."""
    height, width = (max(tensor.shape[edge] for tensor in tensors) for edge in (1, 2))
    out = torch.zeros((len(tensors), 3, height, width))
    for place, tensor in zip(out, tensors, strict=True):
        place[:, : tensor.shape[1], : tensor.shape[2]] = tensor
    return out


@pytest.mark.parametrize(("mean", "std"), [(HALF, HALF), IMAGENET, ((0.0, 0.1, 0.9), (1.0, 0.3, -2.0))])
def test_a_table_has_the_bits_of_the_arithmetic_for_every_level_of_every_channel(
    mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    table = float_table(mean, std)

    for channel in range(3):
        expected = torch.arange(256, dtype=torch.float32) / 255
        expected = (expected - torch.tensor(mean[channel])) / torch.tensor(std[channel])
        assert torch.equal(table[channel], expected)
    assert (table.shape, table.dtype) == ((3, 256), torch.float32)


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), max_size=4)


@settings(max_examples=80, deadline=None)
@given(SIZES, SIZES, st.sampled_from([1, 2, 7, 14, 16]))
@example([], [], 14)
@example([(3, 1), (1, 3)], [], 14)
@example([], [(2, 3), (1, 1)], 16)
def test_floats_are_those_of_arithmetic_padding_and_patchify_on_every_way(
    vae_sizes: list[tuple[int, int]], vit_sizes: list[tuple[int, int]], patch: int
) -> None:
    tables = [(HALF, HALF), IMAGENET]
    vae_levels = [levels(7 * h, 9 * w, n) for n, (h, w) in enumerate(vae_sizes)]
    vit_levels = [levels(patch * h, patch * w, n) for n, (h, w) in enumerate(vit_sizes)]
    vae = [Shown(one, float_table(*tables[n % 2])) for n, one in enumerate(vae_levels)]
    vit = [Shown(one, float_table(*tables[(n + 1) % 2])) for n, one in enumerate(vit_levels)]
    expected = {}
    if vae:
        expected["padded_images"] = padded(
            [to_tensor(one, *tables[n % 2]) for n, one in enumerate(vae_levels)]
        )
    if vit:
        expected["packed_vit_tokens"] = torch.cat(
            [patchify(to_tensor(one, *tables[(n + 1) % 2]), patch) for n, one in enumerate(vit_levels)]
        )

    got: list[dict[str, torch.Tensor]] = [write_pixels(vae, vit, patch)]
    if vae or vit:
        packed = pack_pixels(joined([*vae, *vit]), vae, vit, patch)
        assert packed.levels.numel() == sum(one.size for one in (*vae_levels, *vit_levels))
        got += [packed.finish(), pickle.loads(pickle.dumps(packed)).finish()]
        # What another device does.
        at_hand, seen = ([(torch.from_numpy(one.levels), one.table) for one in shown] for shown in (vae, vit))
        got.append(gather_pixels(at_hand, seen, patch))

    for one in got:
        assert list(one) == list(expected)
        for key, value in expected.items():
            assert torch.equal(one[key], value), key
            assert one[key].is_contiguous()


def test_a_wide_picture_and_a_tall_one_are_written_whole() -> None:
    wide, tall = levels(16, 5000), levels(700, 42, 1)
    got = write_pixels(
        [Shown(wide, float_table(HALF, HALF)), Shown(tall, float_table(*IMAGENET))],
        [Shown(tall, float_table(*IMAGENET))],
        14,
    )

    assert torch.equal(got["padded_images"][0, :, :16], to_tensor(wide, HALF, HALF))
    assert torch.equal(got["padded_images"][1, :, :, :42], to_tensor(tall, *IMAGENET))
    assert not got["padded_images"][0, :, 16:].any()
    assert not got["padded_images"][1, :, :, 42:].any()
    assert torch.equal(got["packed_vit_tokens"], patchify(to_tensor(tall, *IMAGENET), 14))


def test_places_lie_one_after_another_in_one_memory() -> None:
    sizes = [(2, 3), (4, 1), (5, 5)]
    memory, places = allot(sizes)
    for number, place in enumerate(places):
        place[:] = number

    assert [place.shape for place in places] == [(*size, 3) for size in sizes]
    assert memory.tolist() == [0] * 18 + [1] * 12 + [2] * 75
    nothing, none = allot([])
    assert (nothing.numel(), none) == (0, [])


def test_each_table_travels_once() -> None:
    shown = [Shown(levels(2, 2, n), float_table(HALF, HALF)) for n in range(5)]

    packed = pack_pixels(joined(shown), shown, [], 14)

    assert packed.tables.shape == (1, 3, 256)
    assert packed.vae_tables == (0,) * 5


def test_a_patch_that_does_not_divide_a_picture_is_refused() -> None:
    with pytest.raises(AssertionError, match="patch_size=14 does not divide an image of 15x28"):
        write_pixels([], [Shown(levels(15, 28, 0), float_table(HALF, HALF))], 14)
