"""The compiled look-up writes the floats of the arithmetic, bit for bit, into its place and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from bagel_wds.lookup import find_line, write_channels, write_patches
from bagel_wds.pixels import float_table, patchify, to_tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Levels = NDArray[np.uint8]
    Floats = NDArray[np.float32]
    Triple = tuple[float, float, float]

HALF: Triple = (0.5, 0.5, 0.5)
IMAGENET: tuple[Triple, Triple] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NORMALIZATIONS: dict[str, tuple[Triple, Triple]] = {
    "BAGEL's": (HALF, HALF),
    "ImageNet's": IMAGENET,
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "one channel otherwise": (HALF, (0.5, 0.5, 0.25)),
    "upside down": (HALF, (-0.5, -0.5, -0.5)),
}


def noise(height: int, width: int, seed: int = 0) -> Levels:
    """Every level, in any order, where there is room."""
    count = height * width * 3
    levels = np.random.default_rng(seed).permutation(np.arange(count) % 256).astype(np.uint8)
    return levels.reshape(height, width, 3)


def bits(floats: Floats) -> NDArray[np.uint32]:
    """So that 0.0 and -0.0 are two."""
    return np.ascontiguousarray(floats).view(np.uint32)


def channels(levels: Levels, mean: Triple, std: Triple) -> Floats:
    place = np.full((3, *levels.shape[:2]), np.nan, np.float32)
    write_channels(levels, float_table(mean, std).numpy(), place)
    return place


def patches(levels: Levels, mean: Triple, std: Triple, patch: int) -> Floats:
    count = (levels.shape[0] // patch) * (levels.shape[1] // patch)
    place = np.full((count, patch * patch * 3), np.nan, np.float32)
    write_patches(levels, float_table(mean, std).numpy(), patch, place)
    return place


@pytest.mark.parametrize(("mean", "std"), NORMALIZATIONS.values(), ids=NORMALIZATIONS)
@pytest.mark.parametrize("patch", [1, 2, 3, 14, 16, 32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (5, 1), (3, 4)])
def test_every_level_becomes_the_float_of_the_arithmetic(
    rows: int, columns: int, patch: int, mean: Triple, std: Triple
) -> None:
    levels = noise(rows * patch, columns * patch)
    expected = to_tensor(levels, mean, std)

    assert np.array_equal(bits(channels(levels, mean, std)), bits(expected.numpy()))
    assert np.array_equal(
        bits(patches(levels, mean, std, patch)), bits(patchify(expected, patch).contiguous().numpy())
    )


MEANS = st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(-2, 2, width=32)
STDS = st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0]) | st.floats(2**-6, 4, width=32)


@settings(max_examples=150, deadline=None)
@given(MEANS, STDS)
@example(0.5, 0.5)
@example(0.0, 1.0)
@example(1.0, 0.5)
@example(0.45, 0.225)
def test_whichever_way_a_normalization_goes_its_floats_are_those_of_the_arithmetic(
    mean: float, std: float
) -> None:
    triples: tuple[Triple, Triple] = ((mean,) * 3, (std,) * 3)
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
    event(f"divided: {find_line(float_table(*triples).numpy()) is not None}")

    assert np.array_equal(
        bits(patches(levels, *triples, 4)),
        bits(patchify(to_tensor(levels, *triples), 4).contiguous().numpy()),
    )


def test_a_line_stands_for_a_table_only_where_it_has_each_of_its_bits() -> None:
    assert find_line(float_table(HALF, HALF).numpy()) == (np.float32(127.5), np.float32(1))
    assert find_line(float_table((0.0,) * 3, (1.0,) * 3).numpy()) == (np.float32(255), np.float32(0))
    assert find_line(float_table(*IMAGENET).numpy()) is None
    # Of no range at all, for so large is the mean.
    assert find_line(float_table((1e9,) * 3, (1.0,) * 3).numpy()) is None


@pytest.mark.parametrize("channel", range(3))
@pytest.mark.parametrize("level", [0, 1, 100, 255])
def test_one_float_beside_the_line_is_enough_to_look_all_up(channel: int, level: int) -> None:
    table = float_table(HALF, HALF).numpy().copy()
    table[channel, level] = np.nextafter(table[channel, level], np.float32(9))
    levels = noise(28, 28)
    place = np.empty((4, 14 * 14 * 3), np.float32)

    assert find_line(table) is None
    write_patches(levels, table, 14, place)
    looked_up = np.stack([table[n][levels[:, :, n]] for n in range(3)])
    assert torch.equal(torch.from_numpy(place), patchify(torch.from_numpy(looked_up), 14))


@pytest.mark.parametrize(("mean", "std"), [(HALF, HALF), IMAGENET], ids=["divided", "looked up"])
def test_a_part_of_a_larger_place_is_written_alone(mean: Triple, std: Triple) -> None:
    levels, table = noise(28, 42), float_table(mean, std).numpy()
    expected = to_tensor(levels, mean, std)
    padded = np.full((2, 3, 40, 50), 7, np.float32)
    write_channels(levels, table, padded[1, :, 5:33, :42])
    flat = np.full((20, 14 * 14 * 3), 7, np.float32)
    write_patches(levels, table, 14, flat[4:10])

    assert np.array_equal(padded[1, :, 5:33, :42], expected.numpy())
    assert np.array_equal(flat[4:10], patchify(expected, 14).numpy())
    padded[1, :, 5:33, :42] = 7
    assert (padded == 7).all()
    assert (flat[:4] == 7).all()
    assert (flat[10:] == 7).all()


@pytest.mark.parametrize(("mean", "std"), [(HALF, HALF), IMAGENET], ids=["divided", "looked up"])
def test_levels_that_may_not_be_written_to_or_have_gaps_are_read_alike(mean: Triple, std: Triple) -> None:
    levels = noise(28, 42)
    fixed = levels.copy()
    fixed.setflags(write=False)
    wide = noise(40, 60, seed=1)
    wide[3:31, 5:47] = levels
    turned = np.ascontiguousarray(levels.swapaxes(0, 1)).swapaxes(0, 1)

    for view in (fixed, wide[3:31, 5:47], turned):
        assert np.array_equal(channels(view, mean, std), channels(levels, mean, std))
        assert np.array_equal(patches(view, mean, std, 14), patches(levels, mean, std, 14))
        assert np.array_equal(view, levels)
