"""The benchmark of planning and packing, on few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bagel_wds.config import Packing
from bagel_wds.records import Kind
from bagel_wds.tokens import TextEncoder, add_special_tokens
from benchmarks import planning
from benchmarks.loader_corpus import GROUPS, Rows, make_corpus
from benchmarks.loader_tasks import Task, load_tokenizer, our_config

if TYPE_CHECKING:
    from pathlib import Path


def test_every_sample_is_planned_and_both_rules_pack_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "ROUNDS", 1)
    monkeypatch.setattr(planning, "PACKS", 20)
    corpus = make_corpus(tmp_path / "corpus", Rows(t2i=8, edit=4, vlm=8))
    task = Task("ours fast", str(corpus.folder), tuple(GROUPS), workers=0, warmup=1, batches=1)
    config = our_config(task)
    encoder = TextEncoder(add_special_tokens(load_tokenizer(task))[0])
    rows, plans = planning.plan_rows(corpus, config, encoder)
    packed = {packing: planning.pack_row(config, plans, packing) for packing in Packing}

    assert {group: len(own) for group, own in plans.items()} == {
        "t2i_pretrain": 8,
        "unified_edit": 4,
        "vlm_sft": 8,
    }
    assert all(
        segment.token_ids
        for plan in plans["vlm_sft"]
        for segment in plan.segments
        if segment.kind is Kind.TEXT
    )
    assert [row.what for row in rows] == [*(f"plan {group}" for group in GROUPS), "plan all three"]
    assert rows[3].seconds == pytest.approx(sum(row.seconds for row in rows[:3]) / 3)
    assert float(packed[Packing.BEST_FIT].note[-5:]) > float(packed[Packing.GREEDY].note[-5:]) > 0.8


def test_a_row_says_how_many_in_a_second() -> None:
    assert planning.Row("plan", 50e-6, 80e-6, goal=10_000).cells() == [
        "plan",
        "20,000",
        "50.0",
        "80",
        "10,000",
        "",
    ]
    assert planning.Row("pack", 4e-6, note="fill 0.9").cells() == [
        "pack",
        "250,000",
        "4.0",
        "",
        "",
        "fill 0.9",
    ]
