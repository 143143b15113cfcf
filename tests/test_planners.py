"""What the default fidelity corrects in the recipes, in dropout and in the layout; each is a row of docs/divergence.md."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.frames import FrameRule
from bagel_wds.geometry import ResizeRule
from bagel_wds.layout import LayoutRules, lay_out
from bagel_wds.planners import DropoutRates, PlanTools, plan_edit, plan_t2i, plan_vlm, settle
from bagel_wds.records import Kind, RawSample, SamplePlan, Segment, View
from bagel_wds.rng import KeyedDraws

VIT = ResizeRule(max_size=56, min_size=28, stride=14)
VAE = ResizeRule(max_size=64, min_size=32, stride=16)
NEVER, ALWAYS = DropoutRates(0, 0, 0), DropoutRates(1, 1, 1)
RULES = LayoutRules(bos_token_id=1, eos_token_id=2, start_of_image=3, end_of_image=4)


@dataclass(frozen=True)
class FakePicture:
    """A picture that is only a size."""

    size_hw: tuple[int, int] = (32, 48)
    num_bytes: int = 0


def tools(*, upstream: bool = False, encoded: list[str] | None = None) -> PlanTools:
    def encode(text: str) -> list[int]:
        if encoded is not None:
            encoded.append(text)
        return [ord(letter) for letter in text]

    return PlanTools(
        group="g",
        encode=encode,
        resize={Kind.VIT_IMAGE: VIT, Kind.VAE_IMAGE: VAE},
        frames=FrameRule(max_num_frames=4, min_num_frames=2, any_frame=not upstream),
        upstream=upstream,
    )


def sample(fields: dict[str, Any], media: int = 0, clips: tuple[int, ...] = (), key: str = "k") -> RawSample:
    """A sample with so many images, then one clip for each number of frames."""
    pictures = [(FakePicture(),)] * media + [(FakePicture(),) * frames for frames in clips]
    return RawSample(key, "url", fields, tuple(pictures), (False,) * media + (True,) * len(clips))


def talk(*values: str) -> dict[str, Any]:
    return {
        "conversations": [
            {"from": "human" if i % 2 == 0 else "gpt", "value": v} for i, v in enumerate(values)
        ]
    }


def draws(key: str = "k") -> KeyedDraws:
    return KeyedDraws(0, key)


def outline(plan: SamplePlan) -> list[str]:
    """Texts as they are, images by number of their view."""
    return ["".join(map(chr, s.token_ids)) if s.kind is Kind.TEXT else f"[{s.view}]" for s in plan.segments]


def reason(planner: Any, raw: RawSample, **how: Any) -> Reason:
    with pytest.raises(BadSample) as caught:
        planner(raw, tools(**how), draws())
    return caught.value.reason


def test_only_the_chosen_caption_is_tokenized() -> None:
    encoded: list[str] = []
    captions = {f"c{n}": f"caption {n}" for n in range(9)}

    plan = plan_t2i(sample({"captions": captions}, 1), tools(encoded=encoded), draws())

    assert encoded == outline(plan)[:1]
    assert [(s.kind, s.loss, s.enable_cfg) for s in plan.segments] == [
        (Kind.TEXT, False, True),
        (Kind.VAE_IMAGE, True, False),
    ]
    # 32 x 48 becomes 32 x 48: 2 x 3 latents.
    assert plan.segments[1].num_tokens == 6 + 2
    assert plan.length == plan.segments[0].num_tokens + 8


def test_captions_are_chosen_evenly_over_keys() -> None:
    captions = {"captions": {"a": "a", "b": "b", "c": "c"}}
    chosen = [outline(plan_t2i(sample(captions, 1), tools(), KeyedDraws(0, str(n))))[0] for n in range(600)]

    assert {letter: chosen.count(letter) > 150 for letter in "abc"} == {"a": True, "b": True, "c": True}


@pytest.mark.parametrize(
    ("captions", "expected"),
    [
        (None, Reason.EMPTY_TEXT),
        ("", Reason.EMPTY_TEXT),
        ({"a": None}, Reason.EMPTY_TEXT),
        ('{"a": ', Reason.CAPTIONS_INVALID),
        ({"a": 1}, Reason.CAPTIONS_INVALID),
        ([1], Reason.CAPTIONS_INVALID),
        (5, Reason.CAPTIONS_INVALID),
    ],
)
def test_odd_captions_are_one_counted_drop(captions: Any, expected: Reason) -> None:
    assert reason(plan_t2i, sample({"captions": captions}, 1)) is expected


@pytest.mark.parametrize("captions", [[], "{}", "[]"])
def test_captions_that_hold_none_are_trained_without(captions: Any) -> None:
    # BAGEL: the same, a single space.
    without = plan_t2i(sample({"captions": {}}, 1), tools(), draws())

    assert plan_t2i(sample({"captions": captions}, 1), tools(), draws()) == without


def test_t2i_sample_without_an_image_is_a_counted_drop() -> None:
    assert reason(plan_t2i, sample({"captions": {"a": "x"}})) is Reason.IMAGE_MISSING


def test_conversation_shows_each_image_where_its_tag_is() -> None:
    plan = plan_vlm(
        sample(talk("<image> one <image>\n two", "yes", "and <image>?", "no"), 3), tools(), draws()
    )

    assert outline(plan) == ["[0]", "one", "[1]", "two", "yes", "and", "[2]", "?", "no"]
    assert [s.loss for s in plan.segments if s.kind is Kind.TEXT] == [False, False, True, False, False, True]


def test_text_without_tags_is_not_stripped_and_system_turns_have_no_loss() -> None:
    fields = {
        "conversations": [
            {"from": "system", "value": "be kind"},
            {"from": "human", "value": "  q "},
            {"from": "gpt", "value": " a "},
        ]
    }

    plan = plan_vlm(sample(fields), tools(), draws())

    assert outline(plan) == ["be kind", "  q ", " a "]
    assert [segment.loss for segment in plan.segments] == [False, False, True]
    assert outline(plan_vlm(sample(fields), tools(upstream=True), draws())) == ["  q ", " a "]


def test_upstream_ignores_every_speaker_but_its_two() -> None:
    names = ("system", "user", "human", "tool", "assistant", "gpt")
    fields = {"conversations": [{"from": name, "value": f"{name} <image>"} for name in names]}

    plan = plan_vlm(sample(fields, 1), tools(upstream=True), draws())

    assert outline(plan) == ["human", "[0]", "gpt <image>"]
    assert reason(plan_vlm, sample(fields, 1)) is Reason.CONVERSATIONS_INVALID


def test_chat_messages_are_planned_as_llava_turns_are() -> None:
    system, said = {"type": "text", "text": "be kind"}, {"type": "text", "text": " what <image> is it? "}
    messages = [
        {"role": "system", "content": [system]},
        {"role": "user", "content": [{"type": "image"}, said, {"type": "image_url", "image_url": None}]},
        {"role": "assistant", "content": "a"},
    ]

    plan = plan_vlm(sample({"messages": messages}, 2), tools(), draws())

    # A text part is text to the letter.
    assert outline(plan) == ["be kind", "[0]", "what <image> is it?", "[1]", "a"]
    assert [segment.loss for segment in plan.segments] == [False] * 4 + [True]


def test_answers_of_blanks_alone_are_a_counted_drop() -> None:
    assert reason(plan_vlm, sample(talk("q", " \n"))) is Reason.EMPTY_TEXT
    assert outline(plan_vlm(sample(talk("q", " ")), tools(upstream=True), draws())) == ["q", " "]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"image": "a.png"}, 1),
        ({"images": ["a.png", {"bytes": None}, "data:image/png;base64,"]}, 3),
        ({"image": {"bytes": None, "path": None}}, 1),
        ({"image": "null", "images": ["a.png", "b.png"]}, 2),
        ({"image": "a.png", "video": "clip"}, 1),
        ({"image": None}, 0),
        ({}, None),
        ({"image": {"bytes": None}, "parts": [{"image": "a.png"}, {"path": "b.png"}]}, 2),
        ({"parts": [{"image": "a.png"}, {"bytes": None}]}, None),
        ({"image": None, "parts": [{}, {}]}, None),
        ({"images": ["a.png", "b.png", "c.png"], "parts": [{}, {}]}, 3),
    ],
)
def test_a_sample_has_as_many_images_as_its_row_names_in_any_form(
    fields: dict[str, Any], named: int | None
) -> None:
    parts = [{"type": "image", **part} for part in fields.get("parts", [])]
    said = {name: value for name, value in fields.items() if name != "parts"}
    for media in range(5):
        content = [*parts, {"type": "text", "text": "q"}] if parts else "<image>" * media + "q"
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]
        raw = sample({**said, "messages": turns}, media)
        if named not in (None, media):
            assert reason(plan_vlm, raw) is Reason.IMAGE_MISSING
        elif parts and media != len(parts):
            assert reason(plan_vlm, raw) is Reason.PLACEHOLDER_MISMATCH
        else:
            assert sum(text.startswith("[") for text in outline(plan_vlm(raw, tools(), draws()))) == media


@pytest.mark.parametrize("tags", [0, 1, 2, 3])
@pytest.mark.parametrize("images", [1, 2])
def test_c33_tags_and_images_must_match_over_all_turns(tags: int, images: int) -> None:
    turns = talk("<image>" * min(tags, 1) + "q", "a", "<image>" * (tags - 1) + "q", "a")
    for fields in (
        {},
        {"image": [f"{n}.png" for n in range(images)]},
        {"image": "0.png"} if images == 1 else {},
    ):
        raw = sample({**turns, **fields}, images)
        if tags == images:
            assert sum(text.startswith("[") for text in outline(plan_vlm(raw, tools(), draws()))) == images
        else:
            assert reason(plan_vlm, raw) is Reason.PLACEHOLDER_MISMATCH


def test_c33_tag_in_an_answer_is_text() -> None:
    plan = plan_vlm(sample(talk("<image>q", "see <image>"), 1), tools(), draws())
    assert outline(plan) == ["[0]", "q", "see <image>"]
    assert reason(plan_vlm, sample(talk("q", "see <image>"), 1)) is Reason.PLACEHOLDER_MISMATCH


@pytest.mark.parametrize(
    "image",
    [
        {},
        {"image": None},
        {"image": ""},
        {"image": "None"},
        {"image": "null"},
        {"image": "none"},
        {"image": []},
    ],
)
def test_c34_text_only_conversations_are_samples(image: dict[str, Any]) -> None:
    assert outline(plan_vlm(sample({**talk("q", "a"), **image}), tools(), draws())) == ["q", "a"]


def test_c19_sample_whose_image_is_missing_is_a_counted_drop() -> None:
    assert reason(plan_vlm, sample({**talk("<image>q", "a"), "image": "a.png"})) is Reason.IMAGE_MISSING
    assert reason(plan_vlm, sample({**talk("<video>q", "a"), "video": "a.mp4"})) is Reason.VIDEO_MISSING


@pytest.mark.parametrize("conversations", [None, "x", [1], [{"from": "human"}], [{"from": 1, "value": "x"}]])
def test_odd_conversations_are_one_counted_drop(conversations: Any) -> None:
    assert reason(plan_vlm, sample({"conversations": conversations})) is Reason.CONVERSATIONS_INVALID


def test_conversation_without_an_answer_is_a_counted_drop() -> None:
    assert reason(plan_vlm, sample(talk("q", ""))) is Reason.EMPTY_TEXT


def test_video_tag_may_stand_in_any_turn() -> None:
    plan = plan_vlm(sample(talk("hello", "hi", "what is in <video>?", "a cat"), clips=(2,)), tools(), draws())

    assert outline(plan) == ["hello", "hi", "what is in", "[0]", "[1]", "?", "a cat"]
    assert (
        reason(plan_vlm, sample(talk("hello", "hi", "<video>", "a"), clips=(2,)), upstream=True)
        is Reason.PLACEHOLDER_MISMATCH
    )
    assert reason(plan_vlm, sample(talk("<image>", "a"), clips=(2,))) is Reason.PLACEHOLDER_MISMATCH


def test_every_frame_of_a_clip_can_be_chosen() -> None:
    chosen: dict[bool, set[int]] = {}
    for upstream in (False, True):
        rule = FrameRule(max_num_frames=4, min_num_frames=4, any_frame=not upstream)
        chosen[upstream] = {frame for n in range(300) for frame in rule.choose(20, KeyedDraws(n))}

    assert chosen[False] == set(range(20))
    assert chosen[True] == set(range(20)) - {4, 9, 14, 19}


def test_edit_chain_shows_condition_instruction_and_target() -> None:
    plan = plan_edit(sample({"instruction_list": [["redder"]]}, 2), tools(), draws())

    assert [s.kind for s in plan.segments] == [Kind.VAE_IMAGE, Kind.VIT_IMAGE, Kind.TEXT, Kind.VAE_IMAGE]
    assert [s.loss for s in plan.segments] == [False, False, False, True]
    assert [s.enable_cfg for s in plan.segments] == [True, True, True, False]
    assert [(view.medium, view.kind) for view in plan.views] == [
        (0, Kind.VAE_IMAGE), (0, Kind.VIT_IMAGE), (1, Kind.VAE_IMAGE),
    ]  # fmt: skip


def test_plain_string_is_one_instruction_and_not_its_letters() -> None:
    raw = sample({"instruction_list": ["make it red"]}, 2)

    assert outline(plan_edit(raw, tools(), draws()))[2] == "make it red"
    assert len(outline(plan_edit(raw, tools(upstream=True), draws()))[2]) == 1


@given(st.integers(2, 9), st.integers(0, 5000))
def test_edit_samples_are_upstreams_family_of_chains(images: int, key: int) -> None:
    fields = {"instruction_list": [[f"<{n}>"] for n in range(images - 1)]}
    plan = plan_edit(sample(fields, images), tools(), KeyedDraws(key))

    targets = [plan.views[s.view].medium for s in plan.segments if s.loss]
    start = plan.views[0].medium
    text = [t for t in outline(plan) if t.startswith("<")]
    assert targets[-1] - start <= 2
    assert all(start < target < images for target in targets)
    # Joined instructions are one text with its last image; the last image of a chain is never such a target.
    if len(text) == 1 and "." in text[0]:
        assert len(targets) == 1
        assert targets[0] < images - 1 or images == 2
    else:
        assert text == [f"<{n}>" for n in range(start, start + len(targets))]
        assert targets == list(range(start + 1, start + 1 + len(targets)))


@pytest.mark.parametrize(
    ("instructions", "images", "expected"),
    [
        ([["a"]], 1, Reason.TOO_FEW_IMAGES),
        ([["a"]], 0, Reason.TOO_FEW_IMAGES),
        (None, 2, Reason.INSTRUCTION_MISSING),
        ([None], 2, Reason.INSTRUCTION_EMPTY),
        ([[]], 2, Reason.INSTRUCTION_EMPTY),
        ([[None]], 2, Reason.INSTRUCTION_EMPTY),
        ([[3]], 2, Reason.INSTRUCTION_INVALID),
        ([], 2, Reason.INSTRUCTION_MISSING),
    ],
)
def test_c30_odd_edit_rows_are_one_counted_drop(instructions: Any, images: int, expected: Reason) -> None:
    assert reason(plan_edit, sample({"instruction_list": instructions}, images)) is expected


def clip(frames: int, *, loss: bool, cfg: bool) -> SamplePlan:
    """A text, a clip with 5 rope ids between its frames, a text."""
    text = Segment(Kind.TEXT, 4, token_ids=(7, 8))
    shots = tuple(
        Segment(
            Kind.VAE_IMAGE, 6, loss=loss, enable_cfg=cfg, view=n,
            split_start=n == 0, split_end=n == frames - 1, frame_delta=5 if n < frames - 1 else None,
        )
        for n in range(frames)
    )  # fmt: skip
    views = tuple(View(0, n, Kind.VAE_IMAGE, (32, 32)) for n in range(frames))
    return SamplePlan("k", "g", (text, *shots, text), views, ((FakePicture(),) * frames,), 0)


@given(st.integers(1, 6), st.floats(0, 1), st.integers(0, 999))
def test_clip_is_dropped_whole_and_lengths_and_modes_match(frames: int, rate: float, key: int) -> None:
    plan = settle(clip(frames, loss=False, cfg=True), DropoutRates(rate, rate, rate), KeyedDraws(key))
    batch = lay_out([plan], replace(RULES, use_flex=True, max_num_tokens=100))

    assert len({s.dropped for s in plan.segments if s.kind is Kind.VAE_IMAGE}) == 1
    assert len(batch["split_lens"]) == len(batch["attn_modes"])
    assert batch["sequence_length"] == len(batch["packed_position_ids"]) == plan.length
    # A dropped frame advances the rope id by one, as upstream's does; a shown one by its distance to the next.
    dropped = plan.segments[1].dropped
    last = batch["packed_position_ids"][-4].item()
    assert last == 4 + (frames if dropped else 5 * (frames - 1) + 1)


def test_noised_split_shares_one_timestep_and_single_images_have_their_own() -> None:
    shared = settle(clip(3, loss=True, cfg=False), NEVER, draws())
    target = plan_edit(sample({"instruction_list": [["a"], ["b"]]}, 3), tools(), KeyedDraws(4))
    own = settle(target, NEVER, draws())

    times = [s.timestep for s in shared.segments if s.loss]
    assert len(set(times)) == 1
    assert math.isfinite(times[0])
    assert all(math.isfinite(s.timestep) == (s.loss and s.kind is Kind.VAE_IMAGE) for s in own.segments)
    assert len({s.timestep for s in own.segments if s.loss}) == sum(s.loss for s in own.segments)


def test_dropout_makes_the_plan_shorter_by_what_it_leaves_out() -> None:
    plan = plan_edit(sample({"instruction_list": [["abc"]]}, 2), tools(), draws())

    kept, left = settle(plan, NEVER, draws()), settle(plan, ALWAYS, draws())

    assert [s.dropped for s in kept.segments] == [False] * 4
    assert [s.dropped for s in left.segments] == [True, True, True, False]
    assert kept.length - left.length == sum(s.num_tokens for s in plan.segments[:3])
    assert lay_out([left], RULES)["sequence_length"] == left.length
    # Each left-out image still takes one rope id, the text none.
    assert lay_out([left], RULES)["packed_position_ids"].unique().tolist() == [2]


def test_dropout_comes_at_its_rate() -> None:
    plan = plan_edit(sample({"instruction_list": [["abc"]]}, 2), tools(), draws())
    settled = [settle(plan, DropoutRates(0.1, 0.4, 0.2), KeyedDraws("rate", n)) for n in range(4000)]

    rates = [sum(p.segments[place].dropped for p in settled) / 4000 for place in range(4)]

    assert rates == pytest.approx([0.2, 0.4, 0.1, 0.0], abs=0.03)


def test_empty_id_lists_are_integers_by_default_and_upstreams_floats_on_request() -> None:
    condition_only = settle(clip(1, loss=False, cfg=False), NEVER, draws())

    assert lay_out([condition_only], RULES)["mse_loss_indexes"].dtype == torch.int64
    upstream = replace(RULES, upstream=True)
    assert lay_out([condition_only], upstream)["mse_loss_indexes"].dtype == torch.float32


@pytest.mark.parametrize(
    ("size", "fits"), [((64, 64), True), ((16, 64), True), ((80, 16), False), ((16, 80), False)]
)
def test_c49_image_beyond_the_table_is_refused_before_the_gpu_sees_it(
    size: tuple[int, int], fits: bool
) -> None:
    rules = replace(RULES, vae_side=4)
    rows, columns = size[0] // 16, size[1] // 16
    segment = Segment(Kind.VAE_IMAGE, rows * columns + 2, view=0)
    plan = SamplePlan("k", "g", (segment,), (View(0, 0, Kind.VAE_IMAGE, size),), (), 0)
    if fits:
        assert lay_out([plan], rules)["packed_latent_position_ids"].max() < 16
    else:
        with pytest.raises(ConfigError, match="max_latent_size=4; set max_latent_size to 5"):
            lay_out([plan], rules)


def test_planning_leaves_the_sample_as_it_was() -> None:
    fields = {**talk("<image>q", "a"), "image": "x.png"}
    before = repr(fields)
    plan_vlm(sample(fields, 1), tools(), draws())
    plan_vlm(sample(fields, 1), tools(upstream=True), draws())

    assert repr(fields) == before
