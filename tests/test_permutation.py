"""The shuffle of a conversion: every place has another thing, and which is a matter of the seed alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.converters.permutation import permute


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_every_thing_comes_once(n: int, seed: int) -> None:
    assert sorted(permute(np.arange(n), n, seed).tolist()) == list(range(n))


@given(st.integers(1, 2**62), st.integers(0, 2**32), st.data())
def test_a_place_does_not_need_the_others(n: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))

    together = permute(np.array(places), n, seed)
    alone = [int(permute(np.array([place]), n, seed)[0]) for place in places]

    assert together.tolist() == alone
    assert len(set(alone)) == len(places)
    assert 0 <= min(alone) <= max(alone) < n


def test_the_order_is_pinned() -> None:
    # A conversion that was killed goes on in this order: a change is a new format version.
    assert permute(np.arange(10), 10, 7).tolist() == [6, 5, 7, 8, 3, 9, 1, 2, 0, 4]


def test_seeds_give_other_orders_that_look_random() -> None:
    n = 4000
    orders = [permute(np.arange(n), n, seed) for seed in range(20)]

    assert len({tuple(order.tolist()) for order in orders}) == 20
    for order in orders:
        # Of a random order, one thing stays in its place and one pair of neighbours stays together, on average.
        assert np.sum(order == np.arange(n)) < 12
        assert np.sum(np.abs(np.diff(order)) == 1) < 16
        # Correlation of place and number: its standard deviation is 1 / sqrt(n - 1).
        assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < 4.5 / np.sqrt(n - 1)
