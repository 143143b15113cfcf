"""What a user sets: the dataset's fields (upstream's, with upstream's defaults, then ours) and the mixture file.

The mixture file and the dataset info are YAML or JSON. They are checked here, once, by pydantic; a key that is not
known is refused with the nearest one that is. Everything that comes out is a frozen dataclass.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args, get_type_hints

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.frames import FrameRule
from bagel_wds.geometry import ResizeRule
from bagel_wds.redact import redact
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from bagel_wds.datasets import PackedDataset

T = TypeVar("T")


class Fidelity(StrEnum):
    """Whose batches a run gives."""

    CORRECTED = "corrected"
    """Ours: draws by address, nothing lost, true lengths, upright pictures. The default."""
    UPSTREAM = "upstream"
    """Upstream's, bit for bit, with its mistakes; see docs/divergence.md."""


class Pixels(StrEnum):
    """How pictures are decoded and resized."""

    FAST = "fast"
    """JPEG by simplejpeg, resize by loops of our own: the pixels of Pillow 11 to 13, bit for bit."""
    EXACT = "exact"
    """Like "fast" where it is seen, once a process, that the Pillow at hand agrees; else Pillow: upstream's pixels."""
    DRAFT = "draft"
    """Like "fast", but a JPEG of at least twice the size that is wanted is decoded at 1/2, 1/4 or 1/8 of its own."""


class Transport(StrEnum):
    """What the pixels of a batch are on their way to the device."""

    FLOAT32 = "float32"
    """Normalized floats, as upstream has them. The default."""
    UINT8 = "uint8"
    """Levels, a quarter of the bytes; `SimpleCustomBatch.to` makes the same floats of them on the device."""


class OnShardError(StrEnum):
    """What becomes of a run when a shard cannot be read, after the last try."""

    RAISE = "raise"
    """It stops with an error that names the shard and the place. The default."""
    SKIP = "skip"
    """It goes on without the rest of that shard: counted, told of, and never more than `max_skipped`."""


class Packing(StrEnum):
    """Which samples go together in a pack."""

    GREEDY = "greedy"
    """In the order in which they come, upstream's rule: a pack is full once it has `expected_num_tokens`. The default."""
    BEST_FIT = "best_fit"
    """The longest of `look_ahead` samples that fits, until none does: packs are filled up to `max_num_tokens`."""


@dataclass(frozen=True, kw_only=True)
class TransformConfig:
    """`image_transform_args` of a group: how its pictures are resized and normalized.

    Attributes:
        max_image_size, min_image_size: longest and shortest edge after the resize, in pixels.
        image_stride: both edges become multiples of it: the patch size.
        max_pixels: area that the pictures of one sample share, in pixels.
        image_mean, image_std: of the normalization, a value a channel.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    max_image_size: int
    min_image_size: int
    image_stride: int
    max_pixels: int = 14 * 14 * 9 * 1024
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def resize(self) -> ResizeRule:
        """The resize alone."""
        return ResizeRule(
            max_size=self.max_image_size,
            min_size=self.min_image_size,
            stride=self.image_stride,
            max_pixels=self.max_pixels,
        )


@dataclass(frozen=True, kw_only=True)
class FrameConfig:
    """`frame_sampler_args` of a group: which frames of a clip are used; see `FrameRule`."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    max_num_frames: int = 16
    min_num_frames: int = 8
    sample: str = "rand"
    fix_start: int | None = None
    clip: tuple[float, float] | None = None

    def rule(self, fidelity: Fidelity) -> FrameRule:
        """The rule that chooses frames, under a fidelity."""
        return FrameRule(
            max_num_frames=self.max_num_frames,
            min_num_frames=self.min_num_frames,
            sample=self.sample,
            fix_start=self.fix_start,
            clip=self.clip,
            any_frame=fidelity is Fidelity.CORRECTED,
        )


BUILT_IN_RECIPES = {
    "t2i_pretrain": "t2i",
    "vlm_sft": "vlm",
    "unified_edit": "edit",
    "interleaved": "interleaved",
}
"""The recipe of the three groups that upstream knows, and of `interleaved`; any other group names its own with `recipe:`."""

_NEEDED_TRANSFORMS = {
    "t2i": ("image_transform_args",),
    "vlm": ("image_transform_args",),
    "edit": ("image_transform_args", "vit_image_transform_args"),
}
"""The transforms that a recipe always uses. Another needs one at least: its rows say which."""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """One entry of the mixture file: datasets that are mixed under one weight.

    Attributes:
        dataset_names: keys of the dataset info under this group.
        image_transform_args: of the VAE's pictures; in `vlm_sft`, of the ViT's.
        vit_image_transform_args: of the ViT's pictures where a sample may have both.
        frame_sampler_args: which frames of a clip are used.
        weight: share of the draws that fall on this group.
        is_mandatory: every pack opens with one of its samples.
        num_used_data: at most so many files (parquet) or lines (JSONL) a dataset; a conversion applies it.
        shuffle_lines, shuffle_seed: which lines those are: a seeded choice instead of the first.
        recipe: the recipe of a group whose name does not tell: t2i, vlm, edit, interleaved, a name that
            `register_planner` was given, or a planner as `package.module:function`.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    dataset_names: tuple[str, ...]
    image_transform_args: TransformConfig | None = None
    vit_image_transform_args: TransformConfig | None = None
    frame_sampler_args: FrameConfig = field(default_factory=FrameConfig)
    weight: float = 1.0
    is_mandatory: bool = False
    num_used_data: tuple[int, ...] | None = None
    shuffle_lines: bool = False
    shuffle_seed: int = 0
    recipe: str | None = None


def parse_groups(mixture: Mapping[str, object]) -> dict[str, GroupConfig]:
    """The groups of a mixture file, in its order.

    Raises:
        ConfigError: naming the group, the key and the value that cannot be.
    """
    if not mixture:
        raise ConfigError("the mixture has no group; name at least one, for example t2i_pretrain")
    groups = {name: _parse_group(name, entry) for name, entry in mixture.items()}
    if not any(group.weight > 0 or group.is_mandatory for group in groups.values()):
        raise ConfigError(
            f"no group of {', '.join(map(repr, groups))} has a weight above 0, so none would ever be drawn"
        )
    return groups


def _parse_group(name: str, entry: object) -> GroupConfig:
    if isinstance(entry, GroupConfig) and entry.recipe:
        return entry
    _refuse_booleans(name, entry)
    group = validate(GroupConfig, entry, f"group {name!r}")
    recipe = group.recipe or BUILT_IN_RECIPES.get(name)
    if recipe is None:
        close = difflib.get_close_matches(name, BUILT_IN_RECIPES, n=1)
        raise ConfigError(
            f"group {name!r} is none of {', '.join(BUILT_IN_RECIPES)}; "
            + (f"did you mean {close[0]!r}? Else " if close else "")
            + "name its recipe with `recipe: t2i`, `vlm`, `edit`, `interleaved`, or one of your own; or put a class that reads "
            "it into DATASET_REGISTRY"
        )
    if not 0 <= group.weight < math.inf:
        raise ConfigError(f"group {name!r}: weight={group.weight} must be a number from 0 on")
    _check_transforms(name, group, recipe)
    _check_frames(f"group {name!r}: frame_sampler_args", group.frame_sampler_args)
    if group.num_used_data is not None and len(group.num_used_data) != len(group.dataset_names):
        raise ConfigError(
            f"group {name!r}: num_used_data has {len(group.num_used_data)} values for "
            f"{len(group.dataset_names)} dataset_names; give one a dataset"
        )
    return GroupConfig(
        **{f.name: getattr(group, f.name) for f in fields(group) if f.name != "recipe"}, recipe=recipe
    )


def _refuse_booleans(name: str, entry: object) -> None:
    """Refuse true and false where a number belongs: the check of types would take them for 1 and 0."""
    for key in ("weight", "num_used_data", "shuffle_seed"):
        value = entry.get(key) if isinstance(entry, Mapping) else getattr(entry, key, None)
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool):
                raise ConfigError(f"group {name!r}: {key}={value!r} has {number!r} where a number belongs")


_FRAME_SAMPLE = re.compile(r"rand|middle|fps(?=.*[1-9])\d+(\.\d+)?")


def _check_frames(where: str, frames: FrameConfig) -> None:
    if not _FRAME_SAMPLE.fullmatch(frames.sample):
        raise ConfigError(
            f"{where}: sample={frames.sample!r} is none of 'rand', 'middle', 'fpsX' (X frames a second)"
        )
    if frames.min_num_frames < 1 or frames.max_num_frames < frames.min_num_frames:
        raise ConfigError(
            f"{where}: min_num_frames={frames.min_num_frames} must be at least 1 and at "
            f"most max_num_frames={frames.max_num_frames}"
        )
    if frames.fix_start is not None and (frames.sample != "middle" or frames.fix_start < 0):
        raise ConfigError(
            f"{where}: fix_start={frames.fix_start} must be a number of frames from 0 on, and "
            "goes with sample='middle' alone"
        )
    if frames.clip is not None and not 0 <= frames.clip[0] < frames.clip[1] < math.inf:
        raise ConfigError(
            f"{where}: clip={list(frames.clip)} must be [start, end] in seconds, start before end"
        )


def _check_transforms(name: str, group: GroupConfig, recipe: str) -> None:
    given = {
        key: transform
        for key in ("image_transform_args", "vit_image_transform_args")
        if (transform := getattr(group, key)) is not None
    }
    for key, transform in given.items():
        _check_transform(f"group {name!r}: {key}", transform)
    for key in _NEEDED_TRANSFORMS.get(recipe, ()):
        if key not in given:
            raise ConfigError(
                f"group {name!r}: an edit group needs vit_image_transform_args beside image_transform_args"
                if recipe == "edit" and given
                else f"group {name!r}: {key} is missing; say how its pictures are resized"
            )
    if not given:
        raise ConfigError(
            f"group {name!r}: give image_transform_args for pictures of the VAE, vit_image_transform_args for those of "
            "the ViT, or both"
        )


def _check_transform(where: str, transform: TransformConfig) -> None:
    for name in ("max_image_size", "min_image_size", "image_stride", "max_pixels"):
        if getattr(transform, name) < 1:
            raise ConfigError(f"{where}: {name}={getattr(transform, name)} must be at least 1")
    if not all(map(math.isfinite, (*transform.image_mean, *transform.image_std))) or 0 in transform.image_std:
        raise ConfigError(
            f"{where}: image_mean={transform.image_mean}, image_std={transform.image_std}: pixels are divided by the "
            "second, so each must be a number and none of those 0"
        )


def validate(kind: type[T], value: object, where: str) -> T:
    """A dataclass from a mapping out of a YAML or JSON file.

    Raises:
        ConfigError: naming `where`, the key and what is wrong; for an unknown key the nearest known one.
    """
    # pydantic takes 0.1 s to import, which a worker that only reads a built config need not pay.
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

    try:
        parsed: T = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        unknown = ("unexpected_keyword_argument", "extra_forbidden")
        first = min(error.errors(include_url=False), key=lambda found: found["type"] not in unknown)
        path = ".".join(str(part) for part in first["loc"])
        if first["type"] in unknown:
            raise ConfigError(f"{where}: unknown key {path!r}{_nearest(first['loc'], kind)}") from error
        raise ConfigError(
            f"{where}: {path or 'the entry'}: {first['msg']}, got {first['input']!r}"
        ) from error
    return parsed


def _nearest(path: Sequence[int | str], kind: type) -> str:
    """What may have been meant by the key at the end of a path into a dataclass of dataclasses."""
    for part in path[:-1]:
        hint = get_type_hints(kind).get(str(part))
        kind = next(
            (found for found in (hint, *get_args(hint)) if isinstance(found, type) and is_dataclass(found)),
            kind,
        )
    known = [f.name for f in fields(kind)]
    close = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def load_mapping(path: str, options: StorageOptions | None = None) -> dict[str, Any]:
    """A YAML or JSON file whose top level is a mapping.

    Args:
        path: of it, or its URL.
        options: how its store is reached.

    Raises:
        ConfigError: if it cannot be read or is no mapping.
    """
    import yaml  # noqa: PLC0415 - only where a file is read

    try:
        text = storage.read_bytes(path, options).decode("utf-8-sig")
        value = (
            json.loads(text)
            if storage.base_name(path).endswith(".json")
            else yaml.load(text, _strict_loader())  # noqa: S506 - a SafeLoader
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML or JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: the top level is {type(value).__name__}; a mapping of groups belongs there"
        )
    return value


def _strict_loader() -> Any:
    """YAML's safe loader, but that a key which comes twice is an error: the first would be gone without a word."""
    import yaml  # noqa: PLC0415 - only where a file is read

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            merge = "tag:yaml.org,2002:merge"
            keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"key {key!r} comes twice, the first time {node.start_mark}")
            return super().construct_mapping(node, deep)

    return Loader


def parse_storage(block: StorageOptions | Mapping[str, object] | None) -> StorageOptions | None:
    """The setting `storage`.

    Raises:
        ConfigError: for a key that is not known, or that looks like a credential.
    """
    if block is None or isinstance(block, StorageOptions):
        return block
    for key in block if isinstance(block, Mapping) else ():
        if _CREDENTIAL.search(str(key)):
            raise ConfigError(
                f"storage: {key!r} looks like a credential, and settings end up in logs and repositories; set it in the "
                "environment (such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), see docs/object-storage.md"
            )
    return validate(StorageOptions, block, "storage")


_CREDENTIAL = re.compile(r"key|secret|token|passw|credential|sas|signature", re.IGNORECASE)


def resolve_mapping(
    inline: Mapping[str, object] | None, path: str | None, name: str, options: StorageOptions | None = None
) -> dict[str, object]:
    """The mapping given inline, or else the one in the file.

    Raises:
        ConfigError: if neither or both are given.
    """
    if inline is not None and path is not None:
        raise ConfigError(f"{name} and {name}_path are both given; give one")
    if inline is not None:
        return dict(inline)
    if path is None:
        raise ConfigError(f"neither {name} nor {name}_path is given; give one")
    return load_mapping(path, options)


@dataclass(frozen=True)
class BagelDatasetConfig:
    """Settings of a packed BAGEL dataset; `build` makes it.

    The fields down to `max_num_patch_per_side` are upstream's, with upstream's defaults.

    Attributes:
        grouped_datasets, grouped_datasets_path: the mixture, inline or as a YAML or JSON file.
        dataset_info, dataset_info_path: where each dataset of each group lies, likewise.
        expected_num_tokens: a pack is given out once it has so many tokens.
        max_num_tokens_per_sample: a sample that needs more is dropped and counted.
        max_num_tokens: no pack has more.
        prefer_buffer_before: while a pack has fewer tokens than this, samples held back come first.
        max_buffer_size: at most so many samples are held back.
        interpolate_pos: position ids of patches by interpolation instead of by grid.
        use_flex: attention as split lengths and modes, instead of dense masks.
        data_seed: orders the shards.
        text_cond_dropout_prob, vit_cond_dropout_prob, vae_cond_dropout_prob: of conditioning dropout.
        vae_image_downsample: pixels a latent patch, along each edge.
        max_latent_size: rows and columns of the model's table of latent positions.
        vit_patch_size: pixels a ViT patch, along each edge.
        max_num_patch_per_side: rows and columns of the model's table of ViT positions.
        fidelity: "corrected" or "upstream".
        num_streams: how many independent pack producers there are; None is one a rank and worker. The order of
            batches depends on this number and on nothing else of the machine, so set it to the largest number
            of ranks times workers ever wanted.
        shuffle_samples, shuffle_bytes: bounds of the shuffle buffer of a group in a stream.
        allow_control_tokens: let `<|im_end|>` and the like in the data become control tokens, as upstream does.
        packing: "greedy" or "best_fit".
        look_ahead, look_ahead_bytes: bounds of the planned samples that "best_fit" chooses from, in a stream; one
            sample is always there, and the last to come in may be over the second.
        read_ahead_bytes: how far a shard is read ahead of the sample that is wanted: of local ones in each group of a
            stream, by the system; of others in each group of a worker, whose streams share it. 0 reads nothing ahead.
        memory_bytes: of encoded samples that wait, in one worker; those above it are forgotten and read again when
            their turn comes. It changes no batch.
        pixels: "fast", "exact" or "draft"; None is fast, and exact under `fidelity="upstream"`.
        transport: "float32", or "uint8", whose batches become whole by `batch.to(device)`.
        decode_threads: threads of a worker that decode and resize the pictures of a pack. They change no batch.
        video_seconds: a clip that takes longer to decode is dropped and counted.
        on_shard_error: "raise" or "skip": what happens when a shard cannot be read, after the last try.
        max_skipped: with "skip", the share of a group's samples that may be lost in an epoch; more is an error.
        storage: how buckets are reached, a `StorageOptions` or a mapping of its fields; None is as the environment says.
            It changes no batch, and a run may be resumed with another one.
    """

    grouped_datasets: Mapping[str, object] | None = None
    grouped_datasets_path: str | None = None
    dataset_info: Mapping[str, object] | None = None
    dataset_info_path: str | None = None
    expected_num_tokens: int = 32768
    max_num_tokens_per_sample: int = 16384
    max_num_tokens: int = 36864
    prefer_buffer_before: int = 16384
    max_buffer_size: int = 50
    interpolate_pos: bool = False
    use_flex: bool = False
    data_seed: int = 42
    text_cond_dropout_prob: float = 0.1
    vit_cond_dropout_prob: float = 0.4
    vae_cond_dropout_prob: float = 0.1
    vae_image_downsample: int = 16
    max_latent_size: int = 32
    vit_patch_size: int = 14
    max_num_patch_per_side: int = 70
    fidelity: str = "corrected"
    num_streams: int | None = None
    shuffle_samples: int = 1000
    shuffle_bytes: int = 64 << 20
    allow_control_tokens: bool = False
    packing: str = "greedy"
    look_ahead: int = 256
    look_ahead_bytes: int = 64 << 20
    read_ahead_bytes: int = 8 << 20
    memory_bytes: int = 512 << 20
    pixels: str | None = None
    transport: str = "float32"
    decode_threads: int = 1
    video_seconds: float = 60.0
    on_shard_error: str = "raise"
    max_skipped: float = 0.01
    storage: StorageOptions | Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.fidelity not in list(Fidelity):
            raise ConfigError(f"fidelity={self.fidelity!r} is neither 'corrected' nor 'upstream'")
        if self.packing not in list(Packing):
            raise ConfigError(
                f"packing={self.packing!r} is none of {', '.join(map(repr, map(str, Packing)))}"
            )
        if self.packing != Packing.GREEDY and self.fidelity == Fidelity.UPSTREAM:
            raise ConfigError(
                f'packing={self.packing!r}: fidelity="upstream" packs as upstream does; leave packing out, or take the '
                "default fidelity"
            )
        self._check_pixels()
        self._check_skips()
        # Parsed once: workers, which get the result, need not import what checks it.
        object.__setattr__(self, "storage", parse_storage(self.storage))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not _is_integer(value) or value < least:
                raise ConfigError(f"{name}={value!r} must be an integer from {least} on")
        if self.num_streams is not None and (not _is_integer(self.num_streams) or self.num_streams < 1):
            raise ConfigError(
                f"num_streams={self.num_streams!r} must be an integer from 1 on; None is one a rank and worker"
            )
        for name in ("text_cond_dropout_prob", "vit_cond_dropout_prob", "vae_cond_dropout_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is no probability: it must lie in 0..1")
        if self.expected_num_tokens > self.max_num_tokens and self.fidelity == Fidelity.CORRECTED:
            raise ConfigError(
                f"expected_num_tokens={self.expected_num_tokens} is above max_num_tokens={self.max_num_tokens}: "
                "a pack would never be full; lower the first or raise the second"
            )

    def __repr__(self) -> str:
        settings = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self))
        return redact(f"{type(self).__name__}({settings})")

    def _check_pixels(self) -> None:
        if self.pixels is not None and self.pixels not in list(Pixels):
            raise ConfigError(f"pixels={self.pixels!r} is none of {', '.join(map(repr, map(str, Pixels)))}")
        if self.pixels not in (None, Pixels.EXACT) and self.fidelity == Fidelity.UPSTREAM:
            raise ConfigError(
                f'pixels={self.pixels!r}: fidelity="upstream" has upstream\'s pixels; leave pixels out, or take the '
                "default fidelity"
            )
        if self.transport not in list(Transport):
            raise ConfigError(
                f"transport={self.transport!r} is none of {', '.join(map(repr, map(str, Transport)))}"
            )
        if not 0 < self.video_seconds < math.inf:
            raise ConfigError(f"video_seconds={self.video_seconds!r} must be a number above 0")

    def _check_skips(self) -> None:
        if self.on_shard_error not in list(OnShardError):
            raise ConfigError(
                f"on_shard_error={self.on_shard_error!r} is none of {', '.join(map(repr, map(str, OnShardError)))}"
            )
        if self.on_shard_error == OnShardError.SKIP and self.fidelity == Fidelity.UPSTREAM:
            raise ConfigError(
                'on_shard_error="skip": fidelity="upstream" draws in call order and cannot go on without samples; take '
                "the default fidelity"
            )
        if not 0 <= self.max_skipped <= 1:
            raise ConfigError(f"max_skipped={self.max_skipped} is no share: it must lie in 0..1")

    @property
    def storage_options(self) -> StorageOptions | None:
        """The setting `storage`; None where the environment says how buckets are reached."""
        return self.storage if isinstance(self.storage, StorageOptions) else None

    @property
    def pixel_path(self) -> Pixels:
        """How pictures become pixels, with the default filled in."""
        default = Pixels.EXACT if self.fidelity == Fidelity.UPSTREAM else Pixels.FAST
        return Pixels(self.pixels or default)

    @staticmethod
    def _resolve_mapping(
        inline: Mapping[str, object] | None, path: str | None, name: str
    ) -> dict[str, object]:
        return resolve_mapping(inline, path, name)

    def build(
        self,
        tokenizer: PreTrainedTokenizerBase,
        special_tokens: Mapping[str, object],
        rank: int | None,
        world_size: int | None,
        num_workers: int,
        global_seed: int,
        data_status: object | None = None,
    ) -> PackedDataset:
        """The dataset that these settings describe.

        Args:
            tokenizer: a Qwen2 tokenizer that `add_special_tokens` has seen.
            special_tokens: the ids that it returned.
            rank: of this process; None finds rank and world size, see `find_rank`.
            world_size: number of processes.
            num_workers: of the DataLoader that will read the dataset.
            global_seed: of every draw; 0 is a seed like any other.
            data_status: with `fidelity="upstream"`, positions in upstream's form to go on behind.

        Raises:
            ConfigError: if the settings cannot work.
        """
        from bagel_wds.datasets import PackedDataset  # noqa: PLC0415 - the one import that goes up

        return PackedDataset(
            self,
            tokenizer,
            special_tokens,
            local_rank=rank,
            world_size=world_size,
            num_workers=num_workers,
            expected_num_tokens=self.expected_num_tokens,
            max_num_tokens_per_sample=self.max_num_tokens_per_sample,
            max_num_tokens=self.max_num_tokens,
            prefer_buffer_before=self.prefer_buffer_before,
            max_buffer_size=self.max_buffer_size,
            interpolate_pos=self.interpolate_pos,
            use_flex=self.use_flex,
            data_status=data_status,
            global_seed=global_seed,
        )


_LEAST = {
    "expected_num_tokens": 1,
    "max_num_tokens_per_sample": 1,
    "max_num_tokens": 1,
    "prefer_buffer_before": 0,
    "max_buffer_size": 0,
    "vae_image_downsample": 1,
    "max_latent_size": 1,
    "vit_patch_size": 1,
    "max_num_patch_per_side": 1,
    "shuffle_samples": 1,
    "shuffle_bytes": 0,
    "look_ahead": 1,
    "look_ahead_bytes": 0,
    "read_ahead_bytes": 0,
    "memory_bytes": 0,
    "decode_threads": 1,
}
"""Counts among the settings, and the least that each may be."""


def _is_integer(value: object) -> bool:
    """NumPy's are integers too; True is none."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


DataConfig = BagelDatasetConfig
"""Upstream's older name of it."""
