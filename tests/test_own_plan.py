"""A plan that a user's planner gave: what cannot be is refused by its segment, and what the built-in recipes give is taken."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from golden_data import tokenizer

from bagel_wds.errors import BadSample, PlannerError, Reason
from bagel_wds.geometry import ResizeRule
from bagel_wds.planners import (
    OwnPlanner,
    PlanBuilder,
    PlanTools,
    plan_edit,
    plan_interleaved,
    plan_t2i,
    plan_vlm,
)
from bagel_wds.planners.own_plan import check_plan
from bagel_wds.records import Kind, RawSample, SamplePlan, SampleRef, Segment, View
from bagel_wds.rng import KeyedDraws
from bagel_wds.tokens import TextEncoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagel_wds.planners import Planner


@dataclass(frozen=True)
class FakePicture:
    """A picture that is only a size."""

    size_hw: tuple[int, int] = (32, 48)
    num_bytes: int = 0


VIT = ResizeRule(max_size=56, min_size=28, stride=14)
VAE = ResizeRule(max_size=64, min_size=32, stride=16)
TOOLS = PlanTools(
    group="g",
    encode=lambda text: [ord(letter) for letter in text],
    resize={Kind.VIT_IMAGE: VIT, Kind.VAE_IMAGE: VAE},
    has_id=TextEncoder(tokenizer()).has_id,
)
SAMPLE = RawSample(
    "key-7", "pages.tar", {}, ((FakePicture(),), (FakePicture(),) * 3), (False, True), ref=SampleRef(0, 0, 512, 0)
)  # fmt: skip


def run(planner: Callable[[RawSample, PlanTools, Any], Any]) -> SamplePlan:
    return OwnPlanner("mine", planner)(SAMPLE, TOOLS, KeyedDraws(0))


def built() -> SamplePlan:
    """A text, a picture for the ViT, one for the VAE, two frames of a clip with loss, an answer."""
    plan = PlanBuilder(SAMPLE, TOOLS)
    plan.text("ask")
    plan.image(Kind.VIT_IMAGE, 0)
    plan.image(Kind.VAE_IMAGE, 0)
    plan.clip(1, [0, 2], loss=True)
    plan.text("answer", loss=True)
    return plan.build()


def segment(number: int, **changes: Any) -> SamplePlan:
    """The plan with one segment changed."""
    plan = built()
    segments = list(plan.segments)
    segments[number] = replace(segments[number], **changes)
    return plan.with_segments(tuple(segments))


def view(**changes: Any) -> SamplePlan:
    """The plan with the view of its VAE picture, segment 2, changed."""
    plan = built()
    return replace(plan, views=(plan.views[0], replace(plan.views[1], **changes), *plan.views[2:]))


def test_a_plan_that_can_be_comes_as_it_is() -> None:
    plan = built()

    assert run(lambda *_: plan) is plan
    # 32 x 48 is 2 x 3 latents, and 28 x 42 for the ViT 2 x 3 patches; the texts are 3 and 6 letters.
    assert [s.num_tokens for s in plan.segments] == [3 + 2, 6 + 2, 6 + 2, 6 + 2, 6 + 2, 6 + 2]


LIES: list[tuple[Callable[[], SamplePlan], str]] = [
    (lambda: segment(1, kind=Kind.VAE_IMAGE), "segment 1 (vae_image) shows view 0, which is a vit_image"),
    (lambda: segment(1, view=1), "segment 1 (vit_image) shows view 1, which is a vae_image"),
    (lambda: segment(1, view=-1), "segment 1 (vit_image) shows view -1; the plan has 4, counted from 0"),
    (lambda: segment(1, view=4), "shows view 4; the plan has 4"),
    (lambda: segment(1, view=None), "shows view None; the plan has 4"),
    (lambda: view(medium=-1), "segment 2 (vae_image) shows medium -1; the sample has 2, counted from 0"),
    (lambda: view(medium=2), "shows medium 2; the sample has 2"),
    (lambda: view(frame=-1), "segment 2 (vae_image) shows, of medium 0, frame -1; there are 1, counted from 0"),
    (lambda: view(medium=1, frame=3), "shows, of medium 1, frame 3; there are 3"),
    (lambda: view(size_hw=(32, 64)), "segment 2 (vae_image): num_tokens=8; 8 patches and the two around them are 10"),
    (lambda: view(size_hw=(40, 48)), "40 x 48 pixels are no whole number of patches of 16"),
    (lambda: view(size_hw=(0, 48)), "0 x 48 pixels are no whole number of patches of 16"),
    (lambda: view(size_hw=None), "TypeError"),
    (lambda: segment(0, num_tokens=-5), "segment 0 (text): num_tokens=-5; 3 token ids and the two around them are 5"),
    (lambda: segment(5, num_tokens=11), "segment 5 (text): num_tokens=11; 6 token ids and the two around them are 8"),
    (lambda: segment(0, token_ids=(1, -1, 2)), "segment 0 (text): the token id -1 is below 0"),
    (lambda: segment(0, token_ids=(1, 10**6, 2)), "segment 0 (text): the tokenizer has no token id 1000000"),
    (lambda: segment(0, token_ids=(1, 2**40, 2)), "the tokenizer has no token id 1099511627776"),
    (lambda: segment(0, token_ids=(1, 2.5, 2)), "segment 0 (text): a token id is float, not an integer"),
    (lambda: segment(1, kind="vit_image"), "segment 1 (vit_image): its kind is str; take one of bagel_wds.records.Kind"),
    (lambda: built().with_segments(("a",)), "segment 0 is str, not a Segment"),  # type: ignore[arg-type]
    (lambda: segment(3, split_end=True), "segment 4 (vae_image) is of a split that no segment starts"),
    (lambda: segment(4, split_start=True), "segment 4 (vae_image) starts a split inside another"),
    (lambda: segment(5, split_end=False), "the last segment ends no split"),
    (lambda: replace(built(), group="other"), "its group is 'other', not 'g'"),
    (lambda: replace(built(), ref=None), "its ref is not the sample's, which a resumed run fetches"),
    (lambda: replace(built(), media=SAMPLE.media[::-1]), "its media are not the sample's"),
]  # fmt: skip


@pytest.mark.parametrize(("lie", "says"), LIES)
def test_a_plan_that_cannot_be_ends_the_run_and_names_recipe_sample_and_segment(
    lie: Callable[[], SamplePlan], says: str
) -> None:
    with pytest.raises(PlannerError) as caught:
        run(lambda *_: lie())

    assert str(caught.value).startswith(
        "recipe 'mine' gave a plan that cannot be for sample 'key-7' of pages.tar: "
    )
    assert says in str(caught.value)


def test_the_last_token_id_is_taken_and_the_next_is_not() -> None:
    last = len(tokenizer()) - 1

    assert run(lambda *_: segment(0, token_ids=(last, 0, 1))).segments[0].token_ids[0] == last
    with pytest.raises(PlannerError, match=f"no token id {last + 1}"):
        run(lambda *_: segment(0, token_ids=(last + 1, 0, 1)))


def test_a_picture_of_a_kind_that_the_group_has_no_transform_for_is_refused() -> None:
    plan = built()

    with pytest.raises(ValueError, match=r"segment 2 \(vae_image\): group 'g' has no transform"):
        check_plan(plan, SAMPLE, replace(TOOLS, resize={Kind.VIT_IMAGE: VIT}))


BUILDS: list[tuple[Callable[[PlanBuilder], object], str]] = [
    (lambda plan: plan.image(Kind.VIT_IMAGE, 0, -1), "medium=0, frame=-1"),
    (lambda plan: plan.image(Kind.VIT_IMAGE, -1), "medium=-1, frame=0"),
    (lambda plan: plan.image(Kind.VIT_IMAGE, 0, 1), "frame 1 of medium 0 is shown, which has 1"),
    (lambda plan: plan.frames(1, [0, 3]), "frame 3 of medium 1 is shown, which has 3"),
    (lambda plan: plan.clip(1, [1, 3], loss=True), "frame 3 of medium 1 is shown, which has 3"),
    (lambda plan: plan.image(Kind.TEXT, 0), "the kind is a picture's"),
    (lambda plan: plan.segment(Kind.VIT_IMAGE, -1), "views are counted from 0"),
    (lambda plan: plan.segment(Kind.VAE_IMAGE, plan.view(Kind.VIT_IMAGE, 0)), "the view is a vit_image"),
]


@pytest.mark.parametrize(("build", "says"), BUILDS)
def test_the_builder_refuses_what_cannot_be_where_it_is_asked(
    build: Callable[[PlanBuilder], object], says: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        build(PlanBuilder(SAMPLE, TOOLS))

    # As the user of a planner meets it.
    with pytest.raises(PlannerError) as told:
        run(lambda sample, tools, _: build(PlanBuilder(sample, tools)))
    assert "recipe 'mine' failed on sample 'key-7'" in str(told.value)
    assert says in str(told.value)


def test_a_medium_that_the_sample_lacks_is_the_samples_fault() -> None:
    with pytest.raises(BadSample, match="medium 2 is shown, and the sample has 2") as caught:
        run(lambda sample, tools, _: PlanBuilder(sample, tools).image(Kind.VIT_IMAGE, 2))
    assert caught.value.reason is Reason.IMAGE_MISSING


def test_a_plan_of_which_nothing_has_loss_is_a_counted_drop() -> None:
    def plan(*segments: Segment) -> SamplePlan:
        return built().with_segments(segments)

    text = Segment(Kind.TEXT, 4, token_ids=(7, 8))
    for planned, told in ((plan(text), "none of the 1 segments"), (plan(), "none of the 0 segments")):
        with pytest.raises(BadSample, match=told) as caught:
            run(lambda *_, planned=planned: planned)
        assert caught.value.reason is Reason.NO_LOSS

    for learnt in (
        replace(text, loss=True),
        replace(text, special_token_loss=True, special_token_label=3),
    ):
        assert run(lambda *_, learnt=learnt: plan(text, learnt)).segments == (text, learnt)


@pytest.mark.parametrize("reason", ["mine", 3, None, "row_invalid"])
def test_a_sample_is_refused_by_one_of_our_reasons_only(reason: Any) -> None:
    def plan(*_: Any) -> SamplePlan:
        raise BadSample(reason, "no box")

    with pytest.raises(PlannerError) as caught:
        run(plan)

    assert "recipe 'mine' refused sample 'key-7' of pages.tar by BadSample" in str(caught.value)
    assert "none of bagel_wds.Reason; say one of those, such as BadSample(Reason.ROW_INVALID" in str(
        caught.value
    )


def test_a_clip_whose_header_cannot_be_read_is_a_drop_however_its_plan_was_made() -> None:
    class Broken(list[Any]):
        def __len__(self) -> int:
            raise BadSample(Reason.VIDEO_UNREADABLE, "no header")

    sample = replace(SAMPLE, media=(Broken(),), is_clip=(True,))
    plan = SamplePlan(
        "key-7", "g", (Segment(Kind.VIT_IMAGE, 8, view=0),), (View(0, 0, Kind.VIT_IMAGE, (28, 42)),), sample.media, 0,
        ref=sample.ref,
    )  # fmt: skip

    with pytest.raises(BadSample, match="no header"):
        OwnPlanner("mine", lambda *_: plan)(sample, TOOLS, KeyedDraws(0))


ROWS: list[tuple[Planner, dict[str, Any], list[int]]] = [
    (plan_t2i, {"captions": {"a": "a cat"}}, [1]),
    (plan_edit, {"instruction_list": [["a"], ["b"], ["c"]]}, [1, 1, 1, 1]),
    (
        plan_vlm,
        {"conversations": [{"from": "human", "value": "<image><video>q"}, {"from": "gpt", "value": "a"}]},
        [1, 9],
    ),
    (
        plan_interleaved,
        {
            "items": [
                {"video": 0, "frames": [0, 4, 5], "loss": True, "vae": True, "vit": True, "cfg": True},
                {"image": 0, "vae": True, "cfg": True},
                {"text": "t", "loss": True},
            ]
        },
        [1, 9],
    ),
]


@pytest.mark.parametrize(("planner", "fields", "frames"), ROWS)
def test_what_the_built_in_recipes_give_can_be(
    planner: Planner, fields: dict[str, Any], frames: list[int]
) -> None:
    sizes = [(32, 48), (49, 31), (200, 64), (16, 16)]
    media = tuple((FakePicture(sizes[i]),) * count for i, count in enumerate(frames))
    for number in range(20):
        sample = RawSample(f"k{number}", "url", fields, media, tuple(count > 1 for count in frames))
        plan = OwnPlanner("mine", planner)(sample, TOOLS, KeyedDraws(0, str(number)))
        assert any(segment.loss for segment in plan.segments)
        assert {v.medium for v in plan.views} <= set(range(len(frames)))
