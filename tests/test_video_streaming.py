"""Clips from a row to a batch: converted, streamed, planned by their headers alone, and the right frames in the batch."""

from __future__ import annotations

import base64
import itertools
import json
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
import webdataset as wds
from golden_data import load_json, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_factory import SPECIAL_TOKENS, VIT, small_config, vlm_sample, write_tar
from source_factory import encode_image, talk, write_jsonl
from test_datasets import digest
from video_factory import STEP, clip, sound_alone

from bagel_wds import ConfigError, PackedLoader, Tally, stages
from bagel_wds.clip_process import ClipDecoder
from bagel_wds.clips import ClipHeader, EncodedClip
from bagel_wds.config import parse_groups
from bagel_wds.converters import Encoder, ShardSettings, convert_source
from bagel_wds.decode import decode_sample
from bagel_wds.errors import Reason
from bagel_wds.frames import FrameRule
from bagel_wds.geometry import ResizeRule
from bagel_wds.manifest import read_manifest
from bagel_wds.planners import DropoutRates, PlanTools, settle
from bagel_wds.planners.build import PlanBuilder
from bagel_wds.records import Kind, Pack, RawSample
from bagel_wds.rng import CallOrderDraws, KeyedDraws
from bagel_wds.sources import Source, Verify
from bagel_wds.verify import verify_shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from bagel_wds.records import SamplePlan

GROUPS: dict[str, Any] = {
    "vlm_sft": {
        "dataset_names": ["vlm"],
        "image_transform_args": VIT,
        "frame_sampler_args": {"max_num_frames": 5, "min_num_frames": 2},
    }
}


def config(**frames: Any) -> Any:
    group = {**GROUPS["vlm_sft"], "frame_sampler_args": {**GROUPS["vlm_sft"]["frame_sampler_args"], **frames}}
    return small_config(
        grouped_datasets={"vlm_sft": group},
        vit_cond_dropout_prob=0.0,
        text_cond_dropout_prob=0.0,
        pixels="exact",
    )


def asks(video: Any, **more: Any) -> dict[str, Any]:
    return {"video": video, "conversations": talk("<video>what happens?", "it gets brighter"), **more}


def convert(root: Path, rows: Iterable[Mapping[str, Any]], **more: Any) -> Path:
    write_jsonl(root / "rows.jsonl", list(rows))
    how = {name: more.pop(name) for name in ("settings", "processes") if name in more}
    source = Source(kind="vlm", name="vlm", path=str(root / "rows.jsonl"), media_root=str(root), **more)
    out = root / f"out-{len(list(root.iterdir()))}"
    convert_source(source, str(out), **how)
    return out


def quarantined(out: Path) -> list[tuple[int, str]]:
    lines = (out / "quarantine.jsonl").read_text().splitlines()
    return [(row["row"], row["reason"]) for row in map(json.loads, lines)]


def samples(out: Path) -> dict[str, dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, field = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None
                found.setdefault(key, {})[field] = content.read()
    return found


def plans_of(
    settings: Any, *raws: Mapping[str, Any], seed: int = 0, tally: Tally | None = None
) -> list[SamplePlan]:
    decode = stages.decode(settings, "vlm_sft", tally=tally)
    plan = stages.plan(settings, "vlm_sft", tokenizer(), seed=seed, tally=tally)
    return list(plan(decode([dict(raw) for raw in raws])))


def shown(batch: Mapping[str, Any]) -> list[int]:
    """What the frames of a batch show, one number a ViT picture."""
    starts = [0, *itertools.accumulate(batch["vit_token_seqlens"].tolist())]
    patches = batch["packed_vit_tokens"].numpy()
    middles = [float(np.median(patches[a:b])) for a, b in itertools.pairwise(starts)]
    return [round((middle + 1) * 127.5 / STEP) for middle in middles]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.mp4").write_bytes(clip())
    (tmp_path / "b.mkv").write_bytes(clip(ext="mkv", frames=20, key_every=7))
    (tmp_path / "a.png").write_bytes(encode_image((24, 40)))
    folder = tmp_path / "frames"
    folder.mkdir()
    for number in range(3):
        (folder / f"f_{number}.png").write_bytes(encode_image((24, 40), seed=number))
    return tmp_path


# Into shards


def test_a_clip_is_kept_as_it_is_and_described(root: Path) -> None:
    named = [
        asks("a.mp4"),
        asks(["b.mkv"]),
        asks({"bytes": base64.b64encode(clip()).decode()}),
        asks("frames"),
    ]
    out = convert(root, named)
    first, second, third, fourth = samples(out).values()
    header = {"width": 64, "height": 48, "fps": 10.0}

    assert quarantined(out) == []
    assert list(first) == ["json", "0.mp4"]
    assert first["0.mp4"] == third["0.mp4"] == clip()
    assert second["0.mkv"] == (root / "b.mkv").read_bytes()
    assert list(fourth) == ["json", "0.000.png", "0.001.png", "0.002.png"]
    assert [orjson.loads(sample["json"])["_bagel"]["media"] for sample in (first, second)] == [
        [{"ext": "mp4", **header, "frames": 30, "duration": 3.0}],
        [{"ext": "mkv", **header, "frames": 20, "duration": 2.0}],
    ]
    assert orjson.loads(third["json"])["video"] == {"bytes": None}
    index = pq.read_table(next(out.glob("*.idx.parquet")))["media"].to_pylist()
    told = {"ext": "mp4", "width": 64, "height": 48, "frames": 30, "bytes": len(clip())}
    assert [media[0] for media in index][::2] == [told, told]
    assert index[3][0]["frames"] == 3


def test_a_clip_is_named_by_what_it_is_and_not_by_what_it_is_called(root: Path) -> None:
    (root / "wrong.avi").write_bytes(clip())

    assert [list(sample) for sample in samples(convert(root, [asks("wrong.avi")])).values()] == [
        ["json", "0.mp4"]
    ]


def test_c45_files_that_will_not_do_are_quarantined_by_reasons_of_their_own(root: Path) -> None:
    whole = clip()
    files = {
        "cut": whole[: int(len(whole) * 0.6)],
        "sound": sound_alone(cover=True),
        "zero": clip(frames=0, ext="avi", codec="mpeg4"),
        "empty": b"",
        "text": b"<html>",
        "whole": whole,
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    rows = [asks(name) for name in (*files, "gone")]
    reasons = [
        (0, "video_truncated"),
        (1, "video_no_stream"),
        (2, "video_no_frames"),
        (3, "video_empty"),
        (4, "video_unreadable"),
        (6, "video_missing"),
    ]

    assert quarantined(convert(root, rows)) == reasons
    assert quarantined(convert(root, rows, verify=Verify.HEADER)) == reasons
    out = convert(root, rows)
    counts = read_manifest(str(out / "manifest.json")).counts
    assert counts is not None
    assert (counts.read, counts.written, dict(counts.reasons)) == (7, 1, {reason: 1 for _, reason in reasons})


def test_a_stuck_clip_is_a_row_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from bagel_wds import clips

    script = (
        "import bagel_wds.video as v, threading; v.probe = lambda *a, **k: threading.Event().wait(); v.main()"
    )
    stuck = ClipDecoder([sys.executable, "-c", script])
    monkeypatch.setattr(clips, "clip_decoder", lambda: stuck)
    monkeypatch.setattr(clips, "VERIFY_SECONDS", 0.3)

    assert quarantined(convert(root, [asks("a.mp4"), asks("frames")])) == [(0, "video_timeout")]


def test_a_conversion_with_clips_gives_the_same_bytes_on_any_number_of_processes(root: Path) -> None:
    rows = [asks(("a.mp4", "b.mkv", "frames")[number % 3], id=number) for number in range(12)]
    settings = ShardSettings(shard_samples=2)
    one, two, shuffled = (
        convert(root, rows, settings=settings),
        convert(root, rows, settings=settings, processes=2),
        convert(root, rows, settings=ShardSettings(shard_samples=2, shuffle=3)),
    )

    files = sorted(path.name for path in one.iterdir() if path.is_file())
    assert [(one / name).read_bytes() for name in files] == [(two / name).read_bytes() for name in files]
    assert samples(shuffled) == samples(one)
    assert list(samples(shuffled)) != list(samples(one))
    for out in (one, two, shuffled):
        assert verify_shards(str(out)).faults == ()


def test_scaling_down_leaves_clips_alone(root: Path) -> None:
    out = convert(
        root, [asks("a.mp4"), asks("frames")], settings=ShardSettings(max_side=20, encoder=Encoder.PNG)
    )
    first, second = samples(out).values()

    assert first["0.mp4"] == clip()
    assert second["0.000.png"] != (root / "frames" / "f_0.png").read_bytes()


# Out of shards


@pytest.mark.parametrize("sample", ["rand", "middle", "fps2"])
def test_the_frames_of_the_plan_are_those_in_the_batch(root: Path, sample: str) -> None:
    settings = config(sample=sample)
    out = convert(root, [asks("a.mp4", id=number) for number in range(6)])
    pipeline = wds.DataPipeline(
        stages.shards(str(out / "manifest.json"), group="vlm_sft", epochs=1),
        stages.read(),
        stages.decode(settings, "vlm_sft"),
        stages.plan(settings, "vlm_sft", tokenizer()),
    )
    plans = list(pipeline)
    frames = {plan.key: [view.frame for view in plan.views] for plan in plans}
    batches = list(stages.materialize(settings, SPECIAL_TOKENS)(stages.pack(settings)(iter(plans))))

    assert len(frames) == 6
    assert all(2 <= len(chosen) <= 5 for chosen in frames.values())
    if sample == "rand":
        assert len({tuple(chosen) for chosen in frames.values()}) > 1
    assert sorted(number for batch in batches for number in shown(batch)) == sorted(
        itertools.chain(*frames.values())
    )


def test_planning_looks_at_no_byte_of_a_clip_that_is_described(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sample,) = samples(convert(root, [asks("a.mp4")])).values()

    def never(*_: object) -> None:
        raise AssertionError("a process was asked")

    monkeypatch.setattr(ClipDecoder, "_take", never)
    (plan,) = plans_of(config(), {"__key__": "k", **sample, "0.mp4": b"bytes that nobody looks at"})
    assert 2 <= len(plan.views) <= 5


def test_a_clip_of_other_peoples_shards_is_looked_at_when_it_is_planned() -> None:
    raw = {"__key__": "k", "json": orjson.dumps(asks("a.mp4")), "mp4": clip()}
    tally = Tally()
    (plan,) = plans_of(config(), raw, {**raw, "mp4": b"<html>"}, tally=tally)

    assert 2 <= len(plan.views) <= 5
    assert tally.drops("vlm_sft") == {Reason.VIDEO_UNREADABLE: 1}


def test_video_tags_may_stand_in_any_turn_among_images_and_folders_of_frames(root: Path) -> None:
    parts = [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {
            "role": "user",
            "content": [
                {"type": "video", "video": "a.mp4"},
                {"type": "text", "text": "three"},
                {"type": "video", "video": "frames"},
            ],
        },
        {"role": "assistant", "content": "four"},
    ]
    out = convert(root, [{"messages": parts}])
    (sample,) = samples(out).values()
    assert list(sample) == ["json", "0.png", "1.mp4", "2.000.png", "2.001.png", "2.002.png"]
    raw = decode_sample({"__key__": "k", **sample})
    (plan,) = plans_of(config(max_num_frames=2), {"__key__": "k", **sample})

    assert raw.is_clip == (False, True, True)
    assert isinstance(raw.media[1], EncodedClip)
    outline = [
        (plan.views[segment.view].medium if segment.view >= 0 else "text") for segment in plan.segments
    ]
    assert outline == [0, "text", "text", 1, 1, "text", 2, 2, "text"]


@pytest.mark.parametrize("transport", ["float32", "uint8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_clip_that_cannot_be_decoded_leaves_its_pack_and_no_other_does(
    transport: str, threads: int
) -> None:
    import dataclasses

    settings = dataclasses.replace(config(sample="middle"), transport=transport, decode_threads=threads)
    described = {"ext": "mp4", "width": 64, "height": 48, "frames": 30, "fps": 10.0, "duration": 3.0}
    text = orjson.dumps({**asks("a.mp4"), "_bagel": {"media": [described]}})
    good = {"json": text, "0.mp4": clip()}
    whole = clip(key_every=1)
    raws = [
        {"__key__": "a", **good},
        {"__key__": "b", **good, "0.mp4": whole[: int(len(whole) * 0.6)]},
        {"__key__": "c", **good},
    ]
    tally = Tally()
    plans = plans_of(settings, *raws)
    batches = list(
        stages.materialize(settings, SPECIAL_TOKENS, tally=tally)(stages.pack(settings)(iter(plans)))
    )

    assert tally["vlm_sft", "packed"] == 2
    assert tally.drops("vlm_sft") == {Reason.VIDEO_TRUNCATED: 1}
    assert sum(len(batch["batch_data_indexes"]) for batch in batches) == 2


def test_c45_a_clip_that_is_stuck_in_training_is_a_counted_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import sys

    from bagel_wds import clips

    script = "import bagel_wds.video as v, threading; v.decode_frames = lambda *a, **k: threading.Event().wait(); v.main()"
    stuck = ClipDecoder([sys.executable, "-c", script])
    monkeypatch.setattr(clips, "clip_decoder", lambda: stuck)
    settings = dataclasses.replace(config(), video_seconds=0.3)
    tally = Tally()
    raws = [
        {"__key__": "stuck", "json": orjson.dumps(asks("a.mp4")), "mp4": clip()},
        vlm_sample(1) | {"json": orjson.dumps(vlm_sample(1)["json"])},
    ]
    plans = plans_of(settings, *raws)
    batches = list(
        stages.materialize(settings, SPECIAL_TOKENS, tally=tally)(stages.pack(settings)(iter(plans)))
    )

    assert tally.drops("vlm_sft") == {Reason.VIDEO_TIMEOUT: 1}
    assert tally["vlm_sft", "packed"] == 1
    assert len(batches) == 1


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("clips")
    raws: list[dict[str, Any]] = [
        {"__key__": f"clip-{n}", "json": {**asks("a.mp4"), "id": n}, "0.mp4": clip(key_every=5 + n)}
        for n in range(5)
    ]
    urls = [write_tar(folder / "a.tar", raws), write_tar(folder / "b.tar", [vlm_sample(n) for n in range(4)])]
    return {"vlm_sft": {"vlm": {"shards": urls}}}


def load(info: dict[str, Any], state: Any = None, *, workers: int = 0) -> PackedLoader:
    import dataclasses

    settings = dataclasses.replace(config(), dataset_info=info, num_streams=2, shuffle_samples=3)
    dataset = settings.build(tokenizer(), SPECIAL_TOKENS, 0, 1, workers, global_seed=3)
    loader = PackedLoader(dataset, workers, multiprocessing_context="fork")
    if state is not None:
        loader.load_state_dict(json.loads(json.dumps(state)))
    return loader


def test_batches_with_clips_are_the_same_in_workers_and_after_a_resume(info: dict[str, Any]) -> None:
    unbroken = [digest(batch.to_dict()) for batch in itertools.islice(load(info), 12)]
    loader = load(info)
    states = [loader.state_dict() for _ in itertools.islice(loader, 6)]
    size = len(json.dumps(states[-1]))

    assert len(set(unbroken)) == 12
    for cut in (0, 3, 5):
        again = [digest(batch.to_dict()) for batch in itertools.islice(load(info, states[cut]), 4)]
        assert again == unbroken[cut + 1 : cut + 5]
    # Workers of a DataLoader, which may have no children of multiprocessing's.
    in_workers = [digest(batch.to_dict()) for batch in itertools.islice(load(info, workers=2), 6)]
    assert in_workers == unbroken[:6]
    # References, and no bytes of a clip.
    assert size < 6000


def test_upstream_fidelity_takes_clips_as_files_too(info: dict[str, Any]) -> None:
    import dataclasses

    settings = dataclasses.replace(config(), fidelity="upstream", dataset_info=info)
    dataset = settings.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)
    batches = list(itertools.islice(dataset, 12))

    assert any("packed_vit_tokens" in batch for batch in batches)


# Which frames (C46)


RULES = st.builds(
    FrameRule,
    min_num_frames=st.integers(1, 12),
    max_num_frames=st.integers(12, 30),
    sample=st.sampled_from(["rand", "middle", "fps0.1", "fps1", "fps7.5", "fps240"]),
)


@settings(max_examples=400, deadline=None)
@given(rule=RULES, frames=st.integers(1, 400), fps=st.floats(0.5, 120), seed=st.integers(0, 50))
def test_c46_frames_of_a_file_rise_strictly_and_are_between_least_and_most_or_all(
    rule: FrameRule, frames: int, fps: float, seed: int
) -> None:
    chosen = rule.choose(frames, KeyedDraws(seed), fps)

    assert min(rule.min_num_frames, frames) <= len(chosen) <= min(rule.max_num_frames, frames)
    assert all(a < b for a, b in itertools.pairwise(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < frames


@pytest.mark.parametrize("frames", [1, 2, 7])
@pytest.mark.parametrize("sample", ["rand", "middle", "fps1", "fps240"])
def test_c46_a_clip_of_fewer_frames_than_wanted_is_used_whole(frames: int, sample: str) -> None:
    rule = FrameRule(min_num_frames=8, max_num_frames=8, sample=sample)

    assert rule.choose(frames, KeyedDraws(0), 25.0) == list(range(frames))


def test_c46_rates_literally() -> None:
    def at(sample: str, frames: int, fps: float, least: int = 1, most: int = 8) -> list[int]:
        rule = FrameRule(min_num_frames=least, max_num_frames=most, sample=sample)
        return rule.choose(frames, KeyedDraws(0), fps)

    # Three seconds at 10 a second: one a second, from the middle of each.
    assert at("fps1", 30, 10) == [5, 15, 25]
    assert at("fps2", 30, 10) == [2, 7, 12, 17, 22, 27]
    # A rate above the clip's own is all of its frames, as far as they may be.
    assert at("fps240", 6, 10) == list(range(6))
    assert at("fps240", 16, 10) == [0, 2, 4, 6, 8, 10, 12, 14]
    # Too few at that rate: the least, spread evenly.
    assert at("fps1", 30, 10, least=4) == [3, 10, 18, 25]
    # A folder of frames has no rate: one a second.
    rule = FrameRule(min_num_frames=1, max_num_frames=8, sample="fps1")
    assert rule.choose(3, KeyedDraws(0)) == [0, 1, 2]


def test_a_fixed_start_and_a_stretch_of_the_clip_literally() -> None:
    def rule(**more: Any) -> FrameRule:
        return FrameRule(min_num_frames=4, max_num_frames=4, sample="middle", **more)

    draws = KeyedDraws(0)
    assert rule().choose(40, draws, 10.0) == [4, 14, 24, 34]
    assert rule(fix_start=0).choose(40, draws, 10.0) == [0, 10, 20, 30]
    # Beyond its interval is the interval's end, so that frames go on rising; upstream goes over.
    assert rule(fix_start=12).choose(40, draws, 10.0) == [9, 19, 29, 39]
    with pytest.raises(ValueError, match="fix_start=12 leads to frame 42 of 40"):
        rule(fix_start=12, any_frame=False).choose(40, draws, 10.0)
    assert rule(clip=(1.0, 2.0)).choose(40, draws, 10.0) == [10, 13, 15, 18]
    assert rule(clip=(0.3, 0.5)).choose(40, draws, 10.0) == [3, 4]
    assert rule(clip=(3.8, 9.0)).choose(40, draws, 10.0) == [38, 39]
    assert rule(clip=(1.01, 1.02)).choose(40, draws, 10.0) == [11]
    with pytest.raises(ValueError, match=r"clip=\[4.0, 5.0\] leaves no frame of a video of 4 s"):
        rule(clip=(4.0, 5.0)).choose(40, draws, 10.0)


def test_a_stretch_beyond_the_clip_is_a_counted_drop() -> None:
    tally = Tally()
    raw = {"__key__": "k", "json": orjson.dumps(asks("a.mp4")), "mp4": clip()}

    assert plans_of(config(clip=[5, 6]), raw, tally=tally) == []
    assert tally.drops("vlm_sft") == {Reason.VIDEO: 1}


def test_as_upstream_a_file_with_too_few_frames_repeats_the_last() -> None:
    # BAGEL: so for a file; of a folder of frames it takes all.
    rule = FrameRule(min_num_frames=6, max_num_frames=6, sample="middle", any_frame=False)

    assert rule.choose(4, CallOrderDraws(0), 10.0) == [0, 1, 2, 3, 3, 3]
    assert rule.choose(4, CallOrderDraws(0)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (
            {"fix_start": 3},
            "fix_start=3 must be a number of frames from 0 on, and goes with sample='middle' alone",
        ),
        ({"fix_start": -1, "sample": "middle"}, "fix_start=-1"),
        ({"clip": [2, 1]}, r"clip=\[2.0, 1.0\] must be \[start, end\] in seconds"),
        ({"clip": [-1, 1]}, "clip="),
        ({"clip": [1]}, "frame_sampler_args.clip"),
        ({"sample": "fps0"}, "sample='fps0'"),
    ],
)
def test_settings_that_choose_no_frame_are_refused(frames: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_groups({"vlm_sft": {**GROUPS["vlm_sft"], "frame_sampler_args": frames}})


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="video_seconds="):
        small_config(video_seconds=seconds)


# Clips for the VAE


def vae_tools() -> PlanTools:
    return PlanTools(
        group="g",
        encode=lambda text: [ord(letter) for letter in text],
        resize={Kind.VAE_IMAGE: ResizeRule(max_size=48, min_size=32, stride=16)},
    )


def vae_plan(frames: list[int], **how: bool) -> SamplePlan:
    """A text, a clip of 64x48, and a text."""
    header = ClipHeader("mp4", (48, 64), 30, 10.0, 3.0)
    builder = PlanBuilder(RawSample("k", "u", {}, (EncodedClip(b"", header),), (True,)), vae_tools())
    builder.text("a")
    builder.clip(0, frames, **how)
    builder.text("b")
    return builder.build()


@pytest.mark.parametrize(("case", "kinds"), [("video", {True, False}), ("video_dropout", {False})])
def test_a_clip_for_the_vae_is_planned_as_upstream_plans_it(case: str, kinds: set[bool]) -> None:
    met: set[bool] = set()
    for sample in load_json(f"packing/{case}/samples.json")["samples"]:
        entries = [entry for entry in sample["sequence_plan"] if entry["type"] == "vae_image"]
        clips = [list(group) for _, group in itertools.groupby(entries, lambda entry: entry["loss"])]
        for entries in clips:
            deltas = [entry["frame_delta"] for entry in entries[:-1]]
            loss, cfg = bool(entries[0]["loss"]), bool(entries[-1]["enable_cfg"])
            plan = vae_plan(
                [0, *itertools.accumulate(deltas)] if deltas else [0], loss=loss, condition=not loss, cfg=cfg
            )
            if entries[0].get("split_start") is None:
                continue
            met |= {loss} if len(entries) > 1 else set()
            assert [
                (s.loss, s.enable_cfg, s.split_start, s.split_end, s.frame_delta)
                for s in plan.segments
                if s.kind is Kind.VAE_IMAGE
            ] == [
                (
                    bool(entry["loss"]),
                    bool(entry["enable_cfg"]),
                    entry["split_start"],
                    entry["split_end"],
                    entry.get("frame_delta"),
                )
                for entry in entries
            ]
    assert met == kinds


def test_a_clip_as_target_and_condition_literally() -> None:
    plan = vae_plan([3, 7, 12], loss=True, condition=True, cfg=True)
    clip_segments = [segment for segment in plan.segments if segment.kind is Kind.VAE_IMAGE]

    assert [(s.loss, s.enable_cfg, s.frame_delta) for s in clip_segments] == [
        (True, False, 4), (True, False, 5), (True, False, None),
        (False, True, 4), (False, True, 5), (False, True, None),
    ]  # fmt: skip
    assert [view.frame for view in plan.views] == [3, 7, 12, 3, 7, 12]
    # 64x48 becomes 48x32: 6 patches of 16 pixels, and two control tokens.
    assert {segment.num_tokens for segment in clip_segments} == {8}
    assert plan.length == 3 + 6 * 8 + 3


@settings(max_examples=60, deadline=None)
@given(frames=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_condition_is_dropped_whole_and_shares_no_timestep_with_the_target(frames: int, seed: int) -> None:
    plan = settle(
        vae_plan(list(range(frames)), loss=True, condition=True, cfg=True),
        DropoutRates(0.0, 0.0, 0.5),
        KeyedDraws(seed),
    )
    target, condition = (
        [s for s in plan.segments if s.kind is Kind.VAE_IMAGE and s.loss is loss] for loss in (True, False)
    )

    assert len({segment.timestep for segment in target}) == 1
    assert all(np.isfinite(segment.timestep) and not segment.dropped for segment in target)
    assert len({segment.dropped for segment in condition}) == 1
    assert all(np.isneginf(segment.timestep) for segment in condition)


def test_frames_of_a_clip_become_latent_inputs_and_each_is_decoded_once() -> None:
    builder = PlanBuilder(decode_sample({"__key__": "k", "json": b"{}", "0.mp4": clip()}), vae_tools())
    builder.text("a")
    builder.clip(0, [0, 10, 25], loss=True, condition=True)
    plan = settle(builder.build(), DropoutRates(0, 0, 0), KeyedDraws(0))
    settings = config()
    (batch,) = stages.materialize(settings, SPECIAL_TOKENS)(iter([Pack((plan,))]))
    levels = [round(float(np.median(image) + 1) * 127.5 / STEP) for image in batch["padded_images"].numpy()]

    assert levels == [0, 10, 25, 0, 10, 25]
    assert batch["patchified_vae_latent_shapes"] == [(2, 3)] * 6
    assert len(batch["mse_loss_indexes"]) == 3 * 6
