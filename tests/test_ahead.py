"""Work begun before it is asked for: in order, bounded, and with its errors in their turn."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.ahead import look_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator


@given(st.lists(st.integers(0, 20)), st.integers(1, 4), st.integers(1, 30))
def test_results_come_in_the_order_of_the_items(items: list[int], at_once: int, most: int) -> None:
    assert list(look_ahead(str, items, at_once)) == list(map(str, items))
    assert list(look_ahead(str, items, at_once, weigh=int, most=most)) == list(map(str, items))


def test_no_more_is_taken_than_there_is_room_for() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    results = look_ahead(str, items(), 4)
    assert next(results) == "0"
    assert len(taken) == 5
    heavy = look_ahead(str, items(), 4, weigh=lambda _: 10, most=20)
    taken.clear()
    assert next(heavy) == "0"
    assert len(taken) == 3


def test_several_are_under_way_together() -> None:
    together = threading.Barrier(3, timeout=60)

    assert list(look_ahead(lambda number: together.wait() < number + 3, range(3), 3)) == [True] * 3


def test_an_error_comes_in_its_turn_and_ends_it() -> None:
    def work(number: int) -> int:
        if number == 2:
            raise OSError("no two")
        return number

    got: list[int] = []
    with pytest.raises(OSError, match="no two"):
        got.extend(look_ahead(work, range(10), 4))
    before = threading.active_count()
    for number in look_ahead(work, range(10), 4):
        got.append(number)
        if number == 1:
            break
    assert got == [0, 1, 0, 1]
    assert threading.active_count() <= before
