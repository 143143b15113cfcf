"""Interleaved rows: what an item may say, and that the recipe is the built-in ones' own where it says the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagel_wds.errors import BadSample, Reason
from bagel_wds.frames import FrameRule
from bagel_wds.geometry import ResizeRule
from bagel_wds.items import read_items
from bagel_wds.layout import LayoutRules, lay_out
from bagel_wds.planners import (
    DropoutRates,
    PlanTools,
    plan_edit,
    plan_interleaved,
    plan_t2i,
    plan_vlm,
    settle,
)
from bagel_wds.records import Kind, RawSample, SamplePlan
from bagel_wds.rng import KeyedDraws

if TYPE_CHECKING:
    from collections.abc import Sequence

# Areas over max_pixels are scaled by how many pictures share it: so the sharing shows.
VIT = ResizeRule(max_size=84, min_size=28, stride=14, max_pixels=84 * 84)
VAE = ResizeRule(max_size=64, min_size=32, stride=16)
ALWAYS = DropoutRates(1, 1, 1)


@dataclass(frozen=True)
class FakePicture:
    """A picture that is only a size."""

    size_hw: tuple[int, int] = (48, 64)
    num_bytes: int = 0


TOOLS = PlanTools(
    group="g",
    encode=lambda text: [ord(letter) for letter in text],
    resize={Kind.VIT_IMAGE: VIT, Kind.VAE_IMAGE: VAE},
    frames=FrameRule(max_num_frames=3, min_num_frames=2),
)


def sample(fields: dict[str, Any], media: Sequence[int | None] = ()) -> RawSample:
    """A sample with these media: None is an image, a number a clip of so many frames; no two of one size."""
    pictures = [
        tuple(FakePicture((40 + 8 * i, 64 + 4 * i)) for _ in range(frames or 1))
        for i, frames in enumerate(media)
    ]
    return RawSample("k", "url", fields, tuple(pictures), tuple(frames is not None for frames in media))


def plan(items: Any, media: Sequence[int | None] = (), **fields: Any) -> SamplePlan:
    return plan_interleaved(sample({"items": items, **fields}, media), TOOLS, KeyedDraws(0, "k"))


def outline(planned: SamplePlan) -> list[tuple[str, str, bool, bool]]:
    """(what, how, loss, whether dropout may leave it out) of each segment: texts as they are, pictures as medium.frame."""
    told = []
    for segment in planned.segments:
        if segment.kind is Kind.TEXT:
            what, how = "".join(map(chr, segment.token_ids)), "text"
        else:
            view = planned.views[segment.view]
            what, how = f"{view.medium}.{view.frame}", str(segment.kind).removesuffix("_image")
            assert view.kind is segment.kind
        told.append((what, how, segment.loss, segment.enable_cfg))
    return told


def test_each_item_becomes_what_it_says_in_order() -> None:
    planned = plan(
        [
            {"text": "a", "cfg": True},
            {"image": 0},
            {"image": 0, "vae": True, "cfg": True},
            {"image": 1, "loss": True, "vae": True, "vit": True, "cfg": True},
            {"text": "b", "loss": True},
            {"image": 1, "vae": True, "vit": False},
            {"image": 0, "loss": True},
        ],
        [None, None],
    )

    assert outline(planned) == [
        ("a", "text", False, True),
        ("0.0", "vit", False, False),
        ("0.0", "vae", False, True),
        ("0.0", "vit", False, True),
        ("1.0", "vae", True, False),
        ("1.0", "vae", False, True),
        ("1.0", "vit", False, True),
        ("b", "text", True, False),
        ("1.0", "vae", False, False),
        ("0.0", "vae", True, False),
    ]
    # Of the VAE 40 x 64 is 2 x 4 patches, 48 x 68 is first 45 x 64 and then 48 x 64.
    assert [segment.num_tokens for segment in planned.segments if segment.kind is Kind.VAE_IMAGE] == [
        2 * 4 + 2,
        3 * 4 + 2,
        3 * 4 + 2,
        3 * 4 + 2,
        2 * 4 + 2,
    ]


def test_images_and_videos_are_counted_apart_wherever_they_stand_among_the_media() -> None:
    items = [
        {"video": 1, "frames": [0, 2]},
        {"image": 1},
        {"image": 0},
        {"video": 0, "frames": [1]},
        {"text": "t", "loss": True},
    ]

    planned = plan(items, [5, None, 4, None])

    assert [what for what, how, *_ in outline(planned) if how == "vit"] == ["2.0", "2.2", "3.0", "1.0", "0.1"]


def test_frames_of_a_clip_are_one_split_noised_then_clean_then_shown() -> None:
    planned = plan([{"video": 0, "frames": [1, 4], "loss": True, "vae": True, "vit": True, "cfg": True}], [6])

    assert outline(planned) == [
        ("0.1", "vae", True, False),
        ("0.4", "vae", True, False),
        ("0.1", "vae", False, True),
        ("0.4", "vae", False, True),
        ("0.1", "vit", False, True),
        ("0.4", "vit", False, True),
    ]
    splits = [(s.split_start, s.split_end, s.frame_delta) for s in planned.segments]
    assert splits == [(True, False, 3), (False, True, None)] * 2 + [(True, True, None)] * 2


def test_the_groups_rule_chooses_frames_once_for_all_items_of_a_clip() -> None:
    planned = plan([{"video": 0}, {"text": "t", "loss": True}, {"video": 0, "vit": False, "vae": True}], [50])
    shown = [what for what, how, *_ in outline(planned) if how == "vit"]

    assert 2 <= len(shown) <= 3
    assert [what for what, how, *_ in outline(planned) if how == "vae"] == shown


def test_dropout_leaves_out_a_clip_whole_and_never_what_has_loss() -> None:
    items = [
        {"video": 0, "frames": [0, 1, 2, 3], "cfg": True, "vae": True},
        {"text": "t", "loss": True, "cfg": True},
        {"video": 0, "frames": [0, 1], "loss": True, "cfg": True},
    ]
    left_out = set()
    for number in range(60):
        settled = settle(plan(items, [4]), DropoutRates(0.5, 0.5, 0.5), KeyedDraws(0, number))
        dropped = [segment.dropped for segment in settled.segments]
        assert dropped[8:] == [False] * 3
        left_out.add((*dict.fromkeys(dropped[:4]), *dict.fromkeys(dropped[4:8])))
    # VAE and ViT by a draw each: all four outcomes, and no clip half left out.
    assert left_out == {(a, b) for a in (False, True) for b in (False, True)}

    everything = settle(plan(items, [4]), ALWAYS, KeyedDraws(0))
    assert [segment.dropped for segment in everything.segments] == [True] * 8 + [False] * 3


def test_each_item_of_a_clip_is_left_out_by_a_draw_of_its_own() -> None:
    items = [
        {"video": 0, "frames": [0, 1], "cfg": True},
        {"video": 0, "frames": [2, 3], "cfg": True},
        {"text": "t", "loss": True},
    ]
    planned = plan(items, [4])
    outcomes = Counter(
        tuple(segment.dropped for segment in settle(planned, DropoutRates(vit=0.5), KeyedDraws(n)).segments)
        for n in range(400)
    )

    assert set(outcomes) == {(a, a, b, b, False) for a in (False, True) for b in (False, True)}
    # 100 each by chance; that one lies beyond six deviations comes to one in a billion.
    assert all(abs(count - 100) < 6 * (400 * 0.25 * 0.75) ** 0.5 for count in outcomes.values())
    # Each frame is a picture with a split of its own, as before.
    assert all(segment.split_start and segment.split_end for segment in planned.segments)
    rules = LayoutRules(bos_token_id=1, eos_token_id=2, start_of_image=3, end_of_image=4, use_flex=True)
    batch = lay_out([settle(planned, DropoutRates(0, 0, 0), KeyedDraws(0))], rules)
    assert batch["split_lens"][:-1] == [segment.num_tokens for segment in planned.segments]
    assert batch["attn_modes"][:-1] == ["full"] * 4 + ["causal"]


def test_a_clip_of_one_item_is_settled_by_the_draws_that_it_always_had() -> None:
    """The draw of the first frame is that of all: another address would be another batch after a resume."""
    planned = plan([{"video": 0, "frames": [0, 1, 3], "cfg": True}, TARGET], [4])

    for number in range(20):
        dropped = [s.dropped for s in settle(planned, DropoutRates(vit=0.5), KeyedDraws(number)).segments]
        assert dropped == [KeyedDraws(number).random("dropout:0") < 0.5] * 3 + [False]


def test_a_row_of_far_too_many_items_is_refused_before_they_are_planned() -> None:
    encoded: list[str] = []

    def encode(text: str) -> list[int]:
        encoded.append(text)
        return []

    tools = replace(TOOLS, encode=encode)

    for items in ([{"text": ""}] * 10_000 + [TARGET], orjson.dumps([{"text": ""}] * 200_000).decode()):
        with pytest.raises(BadSample, match=r"\d+ items; the most is 10000") as caught:
            plan_interleaved(sample({"items": items}), tools, KeyedDraws(0))
        assert caught.value.reason is Reason.ITEMS_INVALID
    assert not encoded
    assert len(read_items({"items": [{"text": ""}] * 9_999 + [TARGET]})) == 10_000


def test_a_null_key_is_not_said_and_items_may_be_json_text() -> None:
    struct = {"text": None, "image": 0, "vit": None, "vae": None, "loss": True, "cfg": None, "frames": None}

    assert outline(plan([struct], [None])) == [("0.0", "vae", True, False)]
    assert plan(orjson.dumps([struct]).decode(), [None]) == plan([struct], [None])


TARGET = {"text": "t", "loss": True}
BAD = [
    (None, Reason.ITEMS_INVALID, "nothing in `items`"),
    ("[{", Reason.ITEMS_INVALID, "no JSON"),
    ([], Reason.ITEMS_INVALID, "an empty list"),
    ({"text": "a"}, Reason.ITEMS_INVALID, "is dict, not a list"),
    ([TARGET, "b"], Reason.ITEMS_INVALID, "item 1 is str, not an object"),
    ([{"loss": True}], Reason.ITEMS_INVALID, "item 0 is none of text, image, video"),
    ([{"text": "a", "image": 0}], Reason.ITEMS_INVALID, "item 0 is text and image"),
    ([{"image": 0, "los": True}], Reason.ITEMS_INVALID, "'los' is no key of an image; did you mean 'loss'?"),
    ([{"text": "a", "vit": True}], Reason.ITEMS_INVALID, "'vit' is no key of a text; it may have loss, cfg"),
    ([{"image": 0, "frames": [1]}], Reason.ITEMS_INVALID, "'frames' is no key of an image"),
    ([{"image": 0, "loss": 1}], Reason.ITEMS_INVALID, "loss is 1, neither true nor false"),
    ([{"image": "a.png"}], Reason.ITEMS_INVALID, "image is 'a.png', not the number of one; media are named in `images`"),
    ([{"image": -1}], Reason.ITEMS_INVALID, "image is -1"),
    ([{"image": True}], Reason.ITEMS_INVALID, "image is True"),
    ([{"image": 0.0}], Reason.ITEMS_INVALID, "image is 0.0"),
    ([{"image": 0, "vit": False}, TARGET], Reason.ITEMS_INVALID, "item 0 is nothing: image 0 has neither"),
    ([{"text": 3}], Reason.ITEMS_INVALID, "the text is int"),
    ([{"text": " \n", "loss": True}], Reason.EMPTY_TEXT, "item 0 has loss on a blank text"),
    ([{"text": "a"}, {"image": 0}], Reason.NO_LOSS, "none of the 2 items has loss"),
    ([{"image": 1}, TARGET], Reason.PLACEHOLDER_MISMATCH, "item 0 shows image 1; the row's images are 0 to 0"),
    ([{"image": 0}, {"video": 1}, TARGET], Reason.PLACEHOLDER_MISMATCH, "shows video 1; the row's videos are 0 to 0"),
    ([{"image": 0}, TARGET], Reason.PLACEHOLDER_MISMATCH, "no item shows video 0"),
    ([{"video": 0}, TARGET], Reason.PLACEHOLDER_MISMATCH, "no item shows image 0"),
    ([{"image": 0}, {"video": 0, "frames": [4]}, TARGET], Reason.ITEMS_INVALID, "frame 4 of video 0, which has 4"),
    ([{"video": 0, "frames": [1, 1]}, TARGET], Reason.ITEMS_INVALID, "frames [1, 1] do not rise"),
    ([{"video": 0, "frames": []}, TARGET], Reason.ITEMS_INVALID, "frames is [], not a list of numbers"),
    ([{"video": 0, "frames": [0.5]}, TARGET], Reason.ITEMS_INVALID, "frame is 0.5"),
]  # fmt: skip


@pytest.mark.parametrize(("items", "reason", "detail"), BAD)
def test_a_row_that_cannot_be_is_refused_with_its_item(items: Any, reason: Reason, detail: str) -> None:
    with pytest.raises(BadSample) as caught:
        plan(items, [None, 4])

    assert caught.value.reason is reason
    assert detail in caught.value.detail


def test_a_sample_without_a_medium_that_its_row_names_is_refused() -> None:
    items = [{"image": 0}, {"image": 1}, TARGET]
    with pytest.raises(BadSample, match="the row names 2 images, the sample has 1") as caught:
        plan(items, [None], images=["a.png", "b.png"])
    assert caught.value.reason is Reason.IMAGE_MISSING

    with pytest.raises(BadSample, match="both `images` and `image_list` name media"):
        plan(items, [None, None], images=["a.png"], image_list=["b.png"])


@pytest.mark.parametrize(
    ("kind", "items", "setting"),
    [
        (Kind.VIT_IMAGE, [{"image": 0}, TARGET], "vit_image_transform_args"),
        (Kind.VAE_IMAGE, [{"image": 0, "loss": True}], "image_transform_args"),
    ],
)
def test_a_picture_that_the_group_has_no_transform_for_is_refused(
    kind: Kind, items: Any, setting: str
) -> None:
    tools = replace(TOOLS, resize={other: rule for other, rule in TOOLS.resize.items() if other is not kind})
    with pytest.raises(BadSample) as caught:
        plan_interleaved(sample({"items": items}, [None]), tools, KeyedDraws(0))

    assert caught.value.reason is Reason.TRANSFORM_MISSING
    assert caught.value.detail.endswith(f"group 'g' has no {setting}")


def texts() -> st.SearchStrategy[str]:
    return st.text("ab c", min_size=1, max_size=5).map(str.strip).filter(bool)


@given(texts())
def test_a_caption_and_a_target_are_the_text_to_image_recipes(caption: str) -> None:
    items = [{"text": caption, "cfg": True}, {"image": 0, "loss": True}]

    expected = plan_t2i(sample({"captions": {"a": caption}}, [None]), TOOLS, KeyedDraws(0, "k"))

    found = plan(items, [None])
    assert found.segments == expected.segments
    # Here the picture's view comes before the draw of the caption, so it is the same one in any case.
    assert (found.views, found.estimate) == (expected.views, expected.estimate)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict[str, str]], list[dict[str, Any]], list[int | None]]:
    """(turns, the same as items, media): human and gpt in turn, with images and clips in what the human says."""
    turns: list[dict[str, str]] = []
    items: list[dict[str, Any]] = []
    media: list[int | None] = []
    for _ in range(draw(st.integers(1, 3))):
        said = ""
        for piece in draw(st.lists(st.sampled_from(["text", "image", "video"]), min_size=1, max_size=4)):
            if piece == "text":
                # Two texts side by side would be one.
                said, text = (said, "") if said and not said.endswith(">") else (said, draw(texts()))
                said += text
                items += [{"text": text}] if text else []
                continue
            number = sum((frames is not None) == (piece == "video") for frames in media)
            media.append(draw(st.integers(1, 9)) if piece == "video" else None)
            items.append({piece: number})
            said += f"<{piece}>"
        answer = draw(texts())
        turns += [{"from": "human", "value": said}, {"from": "gpt", "value": answer}]
        items.append({"text": answer, "loss": True})
    return turns, items, media


@given(conversations())
def test_a_conversation_is_the_conversation_recipes(
    row: tuple[list[dict[str, str]], list[dict[str, Any]], list[int | None]],
) -> None:
    turns, items, media = row

    expected = plan_vlm(sample({"conversations": turns}, media), TOOLS, KeyedDraws(0, "k"))

    assert plan(items, media) == expected


@dataclass
class Scripted(KeyedDraws):
    """Draws of which some are said: start and number of edits, and whether two are joined."""

    start: int
    more: int
    join: bool

    def choice(self, n: int, purpose: str) -> int:
        chosen = {"start": self.start, "end": self.more}.get(purpose, 0)
        assert 0 <= chosen < n
        return chosen

    def random(self, purpose: str) -> float:
        assert purpose == "join"
        return 0.0 if self.join else 1.0


@pytest.mark.parametrize(
    ("images", "start", "more", "join"),
    [
        (images, start, more, join)
        for images in (2, 3, 4)
        for start in range(images - 1)
        for more in range(min(2, images - 1 - start))
        for join in (False, True)
    ],
)
def test_a_chain_of_edits_is_the_edit_recipes(images: int, start: int, more: int, join: bool) -> None:
    end = start + 1 + more
    condition = {"vae": True, "vit": True, "cfg": True}
    if more and join:
        # As upstream, a joined sample that would end on the last image ends one earlier.
        end -= end == images - 1
        told = " ".join(f"edit {step}." for step in range(start, end))
        rest: list[dict[str, Any]] = [{"text": told, "cfg": True}, {"image": end - start, "loss": True}]
        shown = [start, end]
        rest[-1]["image"] = 1
    else:
        rest, shown = [], list(range(start, end + 1))
        for number, image in enumerate(shown[1:], start=1):
            last = image == end
            rest.append({"text": f"edit {image - 1}", "cfg": True})
            rest.append({"image": number, "loss": True, **({} if last else condition)})
    whole = sample({"instruction_list": [[f"edit {step}"] for step in range(images - 1)]}, [None] * images)
    part = replace(
        whole,
        fields={"items": [{"image": 0, **condition}, *rest]},
        media=tuple(whole.media[image] for image in shown),
        is_clip=(False,) * len(shown),
    )
    # The edit recipe lets each picture have the area to itself.
    tools = replace(TOOLS, resize={Kind.VIT_IMAGE: replace(VIT, max_pixels=10**6), Kind.VAE_IMAGE: VAE})

    expected = plan_edit(whole, tools, Scripted(start, more, join))
    found = plan_interleaved(part, tools, KeyedDraws(0))

    assert found.segments == expected.segments
    assert [replace(view, medium=shown[view.medium]) for view in found.views] == list(expected.views)
    assert found.estimate == expected.estimate


def values() -> st.SearchStrategy[Any]:
    """What JSON can hold."""
    plain = (
        st.none()
        | st.booleans()
        | st.integers(-2, 4)
        | st.floats(allow_nan=False)
        | st.text("ab ", max_size=3)
    )
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=4)


def likely_items() -> st.SearchStrategy[Any]:
    """Items that are right more often than not."""
    flags = {name: st.booleans() | values() for name in ("vit", "vae", "loss", "cfg", "los")}
    numbers = st.integers(0, 2) | values()
    text = st.fixed_dictionaries(
        {"text": st.text("ab ", max_size=3) | values()}, optional={**flags, "image": values()}
    )
    image = st.fixed_dictionaries({"image": numbers}, optional=flags)
    video = st.fixed_dictionaries(
        {"video": numbers}, optional={**flags, "frames": st.lists(st.integers(0, 5), max_size=3) | values()}
    )
    return st.lists(text | image | video | values(), max_size=4)


@given(likely_items() | values(), st.lists(st.none() | st.integers(1, 5), max_size=3))
def test_any_items_give_a_plan_with_loss_or_a_reason(items: Any, media: list[int | None]) -> None:
    try:
        planned = plan(items, media)
    except BadSample:
        return
    assert any(segment.loss for segment in planned.segments)
    assert {view.medium for view in planned.views} == set(range(len(media)))
    left = settle(planned, ALWAYS, KeyedDraws(0)).segments
    assert all(segment.dropped == (segment.enable_cfg and not segment.loss) for segment in left)
