"""Settings are checked once, before any data is read: what cannot work is refused by name, with what would."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from bagel_wds.config import (
    BagelDatasetConfig,
    DataConfig,
    FrameConfig,
    GroupConfig,
    TransformConfig,
    load_mapping,
    parse_groups,
    resolve_mapping,
)
from bagel_wds.errors import ConfigError
from bagel_wds.groups import groups_of, resolve, transforms_of
from bagel_wds.records import Kind

MIXTURE_FILE = """
t2i_pretrain:
  dataset_names: [t2i]
  image_transform_args: {image_stride: 16, max_image_size: 1024, min_image_size: 512}
  is_mandatory: true
  num_used_data: [10]
  weight: 1
unified_edit:
  dataset_names: [seed]
  image_transform_args: {image_stride: 16, max_image_size: 1024, min_image_size: 512}
  vit_image_transform_args: {image_stride: 14, max_image_size: 518, min_image_size: 224}
  is_mandatory: false
  num_used_data: [10]
  weight: 1
vlm_sft:
  dataset_names: [vlm]
  image_transform_args: {image_stride: 14, max_image_size: 980, min_image_size: 378, max_pixels: 2_007_040}
  frame_sampler_args: {max_num_frames: 12, min_num_frames: 8}
  is_mandatory: true
  shuffle_lines: true
  shuffle_seed: 0
  num_used_data: [1000]
  weight: 1
"""
"""The mixture file that BAGEL's users have."""

VAE: dict[str, Any] = {"image_stride": 16, "max_image_size": 1024, "min_image_size": 512}
VIT: dict[str, Any] = {"image_stride": 14, "max_image_size": 518, "min_image_size": 224}


def mixture(group: str = "t2i_pretrain", **settings: Any) -> dict[str, Any]:
    """A mixture of one group."""
    return {group: {"dataset_names": ["d"], "image_transform_args": VAE, **settings}}


def parse_one(entry: dict[str, Any]) -> GroupConfig:
    """The one group of a mixture."""
    [group] = parse_groups(entry).values()
    return group


def test_the_mixture_file_that_users_have_is_read_as_it_is() -> None:
    text = yaml.safe_load(MIXTURE_FILE)
    untouched = copy.deepcopy(text)

    assert parse_groups(text) == {
        "t2i_pretrain": GroupConfig(
            dataset_names=("t2i",),
            image_transform_args=TransformConfig(image_stride=16, max_image_size=1024, min_image_size=512),
            is_mandatory=True,
            num_used_data=(10,),
            recipe="t2i",
        ),
        "unified_edit": GroupConfig(
            dataset_names=("seed",),
            image_transform_args=TransformConfig(image_stride=16, max_image_size=1024, min_image_size=512),
            vit_image_transform_args=TransformConfig(image_stride=14, max_image_size=518, min_image_size=224),
            num_used_data=(10,),
            recipe="edit",
        ),
        "vlm_sft": GroupConfig(
            dataset_names=("vlm",),
            image_transform_args=TransformConfig(
                image_stride=14, max_image_size=980, min_image_size=378, max_pixels=2007040
            ),
            frame_sampler_args=FrameConfig(max_num_frames=12, min_num_frames=8, sample="rand"),
            is_mandatory=True,
            shuffle_lines=True,
            num_used_data=(1000,),
            recipe="vlm",
        ),
    }
    # BAGEL: empties the caller's config with pop.
    assert text == untouched


def test_parsing_what_was_parsed_changes_nothing() -> None:
    groups = parse_groups(yaml.safe_load(MIXTURE_FILE))

    assert parse_groups(groups) == groups


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"wieght": 2}, "group 't2i_pretrain': unknown key 'wieght'; did you mean 'weight'?"),
        (
            {"image_transform_args": {**VAE, "max_img_size": 9}},
            "group 't2i_pretrain': unknown key 'image_transform_args.max_img_size'; did you mean 'max_image_size'?",
        ),
        (
            {"vit_image_transform_args": {**VIT, "stride": 9}},
            "unknown key 'vit_image_transform_args.stride'; did you mean 'image_stride'?",
        ),
        (
            {"frame_sampler_args": {"max_frames": 9}},
            "unknown key 'frame_sampler_args.max_frames'; did you mean 'max_num_frames'?",
        ),
        # What is known elsewhere is not known here.
        (
            {"frame_sampler_args": {"weight": 9}},
            "unknown key 'frame_sampler_args.weight'; known are max_num_frames, min_num_frames, sample",
        ),
        ({"zzz": 1}, "unknown key 'zzz'; known are dataset_names, image_transform_args, "),
        # An unknown key is told of before what else is wrong.
        ({"wieght": 2, "dataset_names": 3}, "did you mean 'weight'?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one_of_its_level(
    entry: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        parse_groups(mixture(**entry))

    assert says in str(error.value)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dataset_names": "t2i"}, "dataset_names: Input should be a valid tuple, got 't2i'"),
        ({"weight": "much"}, "weight: Input should be a valid number"),
        ({"weight": -1}, "weight=-1.0 must be a number from 0 on"),
        ({"weight": float("nan")}, "weight=nan must be a number from 0 on"),
        ({"weight": float("inf")}, "weight=inf must be a number from 0 on"),
        ({"is_mandatory": "perhaps"}, "is_mandatory: Input should be a valid boolean"),
        ({"image_transform_args": 3}, "image_transform_args: Input should be"),
        (
            {"image_transform_args": {"image_stride": 16}},
            "image_transform_args.max_image_size: Field required",
        ),
        (
            {"image_transform_args": {**VAE, "image_stride": "x"}},
            "image_transform_args.image_stride: Input should be",
        ),
        (
            {"image_transform_args": {**VAE, "image_stride": 0}},
            "image_transform_args: image_stride=0 must be at least 1",
        ),
        (
            {"image_transform_args": {**VAE, "max_pixels": -1}},
            "image_transform_args: max_pixels=-1 must be at least 1",
        ),
        (
            {"vit_image_transform_args": {**VIT, "min_image_size": 0}},
            "vit_image_transform_args: min_image_size=0",
        ),
        ({"image_transform_args": {**VAE, "image_std": [1, 1]}}, "image_std.2: Field required"),
        ({"image_transform_args": {**VAE, "image_std": [1, 1, 0]}}, "pixels are divided by the second"),
        ({"image_transform_args": {**VAE, "image_mean": [1, 1, float("nan")]}}, "each must be a number"),
        ({"num_used_data": [1, 2]}, "num_used_data has 2 values for 1 dataset_names; give one a dataset"),
        ({"num_used_data": [1.5]}, "num_used_data.0: Input should be a valid integer"),
        ({"num_used_data": [True]}, "num_used_data=[True] has True where a number belongs"),
        ({"weight": False}, "weight=False has False where a number belongs"),
        ({"recipe": 3}, "recipe: Input should be a valid string, got 3"),
        ({"image_transform_args": None}, "image_transform_args is missing"),
        (
            {"image_transform_args": None, "recipe": "interleaved"},
            "give image_transform_args for pictures of the VAE",
        ),
        (
            {"frame_sampler_args": {"max_num_frames": 4}},
            "min_num_frames=8 must be at least 1 and at most max_num_frames=4",
        ),
        ({"frame_sampler_args": {"min_num_frames": 0}}, "min_num_frames=0 must be at least 1"),
        ({"frame_sampler_args": {"sample": "last"}}, "sample='last' is none of 'rand', 'middle', 'fpsX'"),
        ({"frame_sampler_args": {"sample": "fps0"}}, "sample='fps0' is none of"),
        ({"frame_sampler_args": {"sample": "fps"}}, "sample='fps' is none of"),
        ({"frame_sampler_args": {"sample": "fps-1"}}, "sample='fps-1' is none of"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_group_and_key(entry: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_groups(mixture(**entry))

    assert str(error.value).startswith("group 't2i_pretrain': ")
    assert says in str(error.value)


def test_upstreams_default_frame_sampler_which_never_yields_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="min_num_frames=8 must be at least 1 and at most max_num_frames=-1"
    ):
        parse_groups(mixture(frame_sampler_args={"max_num_frames": -1, "min_num_frames": 8}))

    assert parse_one(mixture()).frame_sampler_args == FrameConfig(max_num_frames=16, min_num_frames=8)


@pytest.mark.parametrize("sample", ["rand", "middle", "fps1", "fps0.5", "fps24"])
def test_every_way_to_sample_frames_is_taken(sample: str) -> None:
    assert parse_one(mixture(frame_sampler_args={"sample": sample})).frame_sampler_args.sample == sample


@pytest.mark.parametrize("entry", [None, [], "t2i", 3])
def test_an_entry_that_is_no_mapping_is_refused(entry: object) -> None:
    with pytest.raises(ConfigError, match="group 't2i_pretrain': the entry: Input should be"):
        parse_groups({"t2i_pretrain": entry})


def test_a_mixture_without_a_group_and_one_that_draws_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="the mixture has no group"):
        parse_groups({})
    with pytest.raises(ConfigError, match="no group of 't2i_pretrain' has a weight above 0"):
        parse_groups(mixture(weight=0))

    # A group that is only mandatory is drawn by nobody and packed by all.
    assert parse_one(mixture(weight=0, is_mandatory=True)).weight == 0


def test_a_group_of_another_name_must_name_its_recipe() -> None:
    with pytest.raises(
        ConfigError,
        match="group 'my_group' is none of t2i_pretrain, vlm_sft, unified_edit, interleaved; name its recipe",
    ):
        parse_groups(mixture("my_group"))

    assert parse_one(mixture("my_group", recipe="t2i")).recipe == "t2i"
    # A built-in name may have another recipe than its own.
    assert parse_one(mixture("vlm_sft", recipe="t2i")).recipe == "t2i"


def test_an_edit_group_needs_both_transforms() -> None:
    with pytest.raises(
        ConfigError, match="group 'unified_edit': an edit group needs vit_image_transform_args"
    ):
        parse_groups(mixture("unified_edit"))


# Files


def test_a_mapping_is_read_from_yaml_and_from_json(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MIXTURE_FILE, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(yaml.safe_load(MIXTURE_FILE)), encoding="utf-8")
    (tmp_path / "with mark.json").write_text('{"gruppe": "größe"}', encoding="utf-8-sig")

    assert load_mapping(str(tmp_path / "a.yaml")) == load_mapping(str(tmp_path / "a.json"))
    assert parse_groups(load_mapping(str(tmp_path / "a.yaml"))).keys() == {
        "t2i_pretrain",
        "unified_edit",
        "vlm_sft",
    }
    assert load_mapping(f"file://{tmp_path}/a.json").keys() == {"t2i_pretrain", "unified_edit", "vlm_sft"}
    assert load_mapping(str(tmp_path / "with mark.json")) == {"gruppe": "größe"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", b"", "the top level is NoneType; a mapping of groups belongs there"),
        ("a.yaml", b"- a\n- b\n", "the top level is list"),
        ("a.json", b"[1]", "the top level is list"),
        ("a.yaml", b"a: [1", "cannot be read as YAML or JSON"),
        ("a.json", b"{'a': 1}", "cannot be read as YAML or JSON"),
        ("a.yaml", b"a: \xff\xfe", "cannot be read as YAML or JSON"),
        ("a.yaml", b"a: 2024-13-45", "cannot be read as YAML or JSON"),
        (
            "a.yaml",
            b"a: !!python/object/apply:os.system ['touch made-by-yaml']",
            "cannot be read as YAML or JSON",
        ),
        ("absent.yaml", None, "cannot be read as YAML or JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes | None, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError) as error:
        load_mapping(name)
    assert str(error.value).startswith(f"{name}: ")
    assert says in str(error.value)
    assert not Path("made-by-yaml").exists()


def test_inline_or_path_and_neither_both_nor_none(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("from_file: 1", encoding="utf-8")

    assert resolve_mapping({"inline": 1}, None, "dataset_info") == {"inline": 1}
    assert resolve_mapping(None, str(path), "dataset_info") == {"from_file": 1}
    with pytest.raises(ConfigError, match="dataset_info and dataset_info_path are both given; give one"):
        resolve_mapping({}, str(path), "dataset_info")
    with pytest.raises(ConfigError, match="neither dataset_info nor dataset_info_path is given; give one"):
        resolve_mapping(None, None, "dataset_info")


def test_groups_come_from_the_file_or_from_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "mixture.yaml"
    path.write_text(MIXTURE_FILE, encoding="utf-8")
    from_file = BagelDatasetConfig(grouped_datasets_path=str(path), max_latent_size=64)
    inline = BagelDatasetConfig(grouped_datasets=yaml.safe_load(MIXTURE_FILE), max_latent_size=64)

    assert groups_of(from_file) == groups_of(inline)
    assert list(groups_of(from_file)) == ["t2i_pretrain", "unified_edit", "vlm_sft"]
    # Workers need not read the file again.
    resolved = resolve(from_file)
    path.unlink()
    assert groups_of(resolved) == groups_of(inline)


# The settings of a dataset


def test_the_defaults_are_upstreams() -> None:
    config = BagelDatasetConfig()

    assert DataConfig is BagelDatasetConfig
    assert (config.expected_num_tokens, config.max_num_tokens_per_sample, config.max_num_tokens) == (
        32768,
        16384,
        36864,
    )
    assert (config.prefer_buffer_before, config.max_buffer_size, config.data_seed) == (16384, 50, 42)
    assert (config.text_cond_dropout_prob, config.vit_cond_dropout_prob, config.vae_cond_dropout_prob) == (
        0.1,
        0.4,
        0.1,
    )
    assert (config.vae_image_downsample, config.max_latent_size) == (16, 32)
    assert (config.vit_patch_size, config.max_num_patch_per_side) == (14, 70)
    assert (config.fidelity, config.allow_control_tokens, config.num_streams) == ("corrected", False, None)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fidelity": "exact"}, "fidelity='exact' is neither 'corrected' nor 'upstream'"),
        ({"expected_num_tokens": 0}, "expected_num_tokens=0 must be an integer from 1 on"),
        ({"max_num_tokens": "36864"}, "max_num_tokens='36864' must be an integer from 1 on"),
        ({"max_num_tokens": 36864.0}, "max_num_tokens=36864.0 must be an integer from 1 on"),
        ({"max_num_tokens_per_sample": True}, "max_num_tokens_per_sample=True must be an integer from 1 on"),
        ({"max_buffer_size": -1}, "max_buffer_size=-1 must be an integer from 0 on"),
        ({"prefer_buffer_before": -1}, "prefer_buffer_before=-1 must be an integer from 0 on"),
        ({"vae_image_downsample": 0}, "vae_image_downsample=0 must be an integer from 1 on"),
        ({"vit_patch_size": 0}, "vit_patch_size=0 must be an integer from 1 on"),
        ({"max_latent_size": 0}, "max_latent_size=0 must be an integer from 1 on"),
        ({"max_num_patch_per_side": None}, "max_num_patch_per_side=None must be an integer from 1 on"),
        ({"shuffle_samples": 0}, "shuffle_samples=0 must be an integer from 1 on"),
        ({"shuffle_bytes": -1}, "shuffle_bytes=-1 must be an integer from 0 on"),
        ({"look_ahead": 0}, "look_ahead=0 must be an integer from 1 on"),
        ({"look_ahead_bytes": -1}, "look_ahead_bytes=-1 must be an integer from 0 on"),
        ({"read_ahead_bytes": -1}, "read_ahead_bytes=-1 must be an integer from 0 on"),
        ({"memory_bytes": 1.5}, "memory_bytes=1.5 must be an integer from 0 on"),
        ({"packing": "first_fit"}, "packing='first_fit' is none of 'greedy', 'best_fit'"),
        (
            {"packing": "best_fit", "fidelity": "upstream"},
            "packing='best_fit': fidelity=\"upstream\" packs as upstream does; leave packing out, or take the default",
        ),
        ({"num_streams": 0}, "num_streams=0 must be an integer from 1 on; None is one a rank and worker"),
        ({"text_cond_dropout_prob": 1.5}, "text_cond_dropout_prob=1.5 is no probability"),
        ({"vit_cond_dropout_prob": -0.1}, "vit_cond_dropout_prob=-0.1 is no probability"),
        ({"vae_cond_dropout_prob": float("nan")}, "vae_cond_dropout_prob=nan is no probability"),
        (
            {"expected_num_tokens": 9, "max_num_tokens": 8},
            "expected_num_tokens=9 is above max_num_tokens=8: a pack would never be full; lower the first or raise",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_when_they_are_made(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        BagelDatasetConfig(**settings)

    assert says in str(error.value)


def test_the_bounds_of_settings_are_taken() -> None:
    config = BagelDatasetConfig(
        expected_num_tokens=8,
        max_num_tokens=8,
        max_buffer_size=0,
        prefer_buffer_before=0,
        shuffle_bytes=0,
        text_cond_dropout_prob=0,
        vit_cond_dropout_prob=1,
        num_streams=1,
        max_latent_size=int(np.int64(64)),
    )

    assert (config.max_num_tokens, config.vit_cond_dropout_prob) == (8, 1)


# Tables of positions: case C49


def test_c49_a_group_beyond_the_table_of_latents_is_refused_with_the_size_that_works() -> None:
    config = BagelDatasetConfig(grouped_datasets=mixture(), max_latent_size=32)

    with pytest.raises(ConfigError) as error:
        groups_of(config)
    assert str(error.value) == (
        "group 't2i_pretrain': max_image_size=1024 gives 64 patches of 16 pixels along an edge, but the model's table has "
        "max_latent_size=32; set max_latent_size to 64 or more (the model's too), or max_image_size to 512"
    )


@pytest.mark.parametrize(("side", "largest"), [(64, 1024), (32, 512), (33, 528), (64, 1031)])
def test_c49_a_group_within_the_table_of_latents_is_accepted(side: int, largest: int) -> None:
    entry = mixture(image_transform_args={**VAE, "max_image_size": largest})
    config = BagelDatasetConfig(grouped_datasets=entry, max_latent_size=side)

    assert transforms_of(groups_of(config)["t2i_pretrain"])[Kind.VAE_IMAGE].max_image_size == largest


def test_c49_the_table_of_the_vit_is_checked_apart_from_that_of_the_vae() -> None:
    entry = mixture("unified_edit", vit_image_transform_args={**VIT, "max_image_size": 994})

    with pytest.raises(ConfigError) as error:
        groups_of(BagelDatasetConfig(grouped_datasets=entry, max_latent_size=64))
    assert "group 'unified_edit': max_image_size=994 gives 71 patches of 14 pixels" in str(error.value)
    assert "max_num_patch_per_side=70; set max_num_patch_per_side to 71 or more" in str(error.value)
    groups_of(BagelDatasetConfig(grouped_datasets=entry, max_latent_size=64, max_num_patch_per_side=71))


def test_c49_a_stride_that_cuts_patches_is_refused() -> None:
    entry = mixture(image_transform_args={**VAE, "image_stride": 14})

    with pytest.raises(
        ConfigError, match="image_stride=14 of its vae_image is no multiple of vae_image_downsample=16"
    ):
        groups_of(BagelDatasetConfig(grouped_datasets=entry, max_latent_size=64))


def test_c49_interpolated_positions_have_no_limit() -> None:
    config = BagelDatasetConfig(grouped_datasets=mixture(), max_latent_size=32, interpolate_pos=True)

    assert list(groups_of(config)) == ["t2i_pretrain"]


def test_c49_upstream_fidelity_is_only_warned(caplog: pytest.LogCaptureFixture) -> None:
    config = BagelDatasetConfig(grouped_datasets=mixture(), max_latent_size=32, fidelity="upstream")
    with caplog.at_level(logging.WARNING, logger="bagel_wds"):
        groups = groups_of(config)

    assert list(groups) == ["t2i_pretrain"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "set max_latent_size to 64 or more" in caplog.text


def test_c49_the_largest_picture_that_a_transform_makes_is_the_one_that_is_checked() -> None:
    transform = transforms_of(parse_one(mixture()))[Kind.VAE_IMAGE].resize
    sizes = [
        transform.size(size_hw) for size_hw in ((40, 4000), (4000, 40), (1024, 1024), (1, 1025), (4096, 4096))
    ]

    assert max(max(size) for size in sizes) == 1024 == transform.largest_edge()


def test_each_recipe_has_the_transforms_of_its_views() -> None:
    groups = parse_groups(yaml.safe_load(MIXTURE_FILE))

    assert {name: list(transforms_of(group)) for name, group in groups.items()} == {
        "t2i_pretrain": [Kind.VAE_IMAGE],
        "unified_edit": [Kind.VAE_IMAGE, Kind.VIT_IMAGE],
        "vlm_sft": [Kind.VIT_IMAGE],
    }


def test_a_key_that_comes_twice_is_an_error(tmp_path: Path) -> None:
    # YAML would keep the last without a word.
    (tmp_path / "info.yaml").write_text("vlm_sft: {a: {shards: x}}\nvlm_sft: {b: {shards: y}}\n")

    with pytest.raises(ConfigError, match="key 'vlm_sft' comes twice"):
        load_mapping(str(tmp_path / "info.yaml"))


def test_merge_keys_of_yaml_still_work(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &base {x: 1, y: 2}\nmine: {<<: *base, y: 3}\n")

    assert load_mapping(str(tmp_path / "a.yaml"))["mine"] == {"x": 1, "y": 3}
