"""Verdicts travel between processes, and counts add up."""

from __future__ import annotations

import pickle

import pytest

from bagel_wds.errors import BadSample, ConfigError, NoUsableSampleError, Reason, ShardError, Tally


@pytest.mark.parametrize(
    "error", [ConfigError("x"), ShardError("x"), NoUsableSampleError("x"), BadSample(Reason.LOST, "why")]
)
def test_errors_come_out_of_a_worker_as_they_were(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))

    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_verdict_tells_its_reason_and_its_detail() -> None:
    bad = pickle.loads(pickle.dumps(BadSample(Reason.OVER_LENGTH, "900 tokens; the most is 800")))

    assert (bad.reason, bad.detail) == (Reason.OVER_LENGTH, "900 tokens; the most is 800")
    assert str(bad) == "over_length: 900 tokens; the most is 800"
    assert not isinstance(bad, ShardError | ConfigError)


def test_a_tally_counts_by_group_and_reason() -> None:
    tally = Tally()
    tally["vlm_sft", "read"] += 12
    tally["t2i_pretrain", "read"] += 3

    assert tally.drop("vlm_sft", Reason.OVER_LENGTH) == 1
    assert tally.drop("vlm_sft", Reason.OVER_LENGTH) == 2
    assert tally.drop("vlm_sft", Reason.IMAGE_EMPTY) == 1
    assert tally["vlm_sft", "packed"] == 0
    assert tally.drops("t2i_pretrain") == {}
    assert tally.as_dict() == {
        "t2i_pretrain": {"read": 3, "dropped": {}},
        "vlm_sft": {"read": 12, "dropped": {"image_empty": 1, "over_length": 2}},
    }
