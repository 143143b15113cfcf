"""Contestant (b) of `benchmarks.loader`: what one would write today with webdataset and torchvision alone.

The shards are ours, and so is the rule of sizes, so that token counts agree. Otherwise it does what a loader of this
kind does in webdataset's own manner: a shuffle of encoded samples, pictures decoded and transformed as each sample
comes (only those that it uses; nothing that dropout leaves out), then packed in the order of arrival until the next
one does not fit. It writes no bookmark.
"""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchvision.transforms import v2

from bagel_wds import storage
from bagel_wds.config import load_mapping, parse_groups
from bagel_wds.groups import transforms_of
from bagel_wds.records import Kind
from bagel_wds.shards import list_shards
from bagel_wds.tokens import add_special_tokens
from benchmarks.loader_tasks import MAX_NUM_TOKENS, PACKED_TOKENS, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.config import GroupConfig, TransformConfig
    from benchmarks.loader_tasks import Start, Task

    Sample = dict[str, Any]

VIT_PATCH, VAE_PATCH, VIT_SIDE, VAE_SIDE = 14, 16, 70, 64
TEXT_DROPOUT, VIT_DROPOUT, VAE_DROPOUT = 0.1, 0.4, 0.1
SHUFFLE = 100


@dataclass(frozen=True)
class Part:
    """A text or a picture of a sample, in the order in which the model meets them.

    Attributes:
        kind: "text", "vit" or "vae".
        value: token ids, or float32 pixels (3, H, W).
        loss: whether the model learns to give it.
    """

    kind: str
    value: Any
    loss: bool = False

    @property
    def num_tokens(self) -> int:
        """Its own and the two control tokens around them."""
        if self.kind == "text":
            return len(self.value) + 2
        height, width = map(int, self.value.shape[1:])
        patch = VIT_PATCH if self.kind == "vit" else VAE_PATCH
        return height // patch * (width // patch) + 2


class PlainPacks(IterableDataset[dict[str, Any]]):
    """Packed batches, without end.

    Args:
        shards: of each group.
        groups: the mixture.
        tokenizer: one that `add_special_tokens` has seen.
        special_tokens: the ids that it returned.
    """

    def __init__(
        self,
        shards: dict[str, list[str]],
        groups: dict[str, GroupConfig],
        tokenizer: Any,
        special_tokens: dict[str, int],
    ) -> None:
        self.shards = shards
        self.groups = groups
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        random.seed(info.id if info else 0)
        samples = {name: self._samples(name) for name in self.groups}
        mandatory = [name for name, group in self.groups.items() if group.is_mandatory]
        weights = [group.weight for group in self.groups.values()]
        held: list[Part] | None = None
        while True:
            pack, length = [], 0
            turn = list(mandatory)
            while length < PACKED_TOKENS:
                name = turn.pop(0) if turn else random.choices(list(self.groups), weights)[0]  # noqa: S311 - no secret
                sample, held = held or next(samples[name]), None
                needs = sum(part.num_tokens for part in sample)
                if length + needs > MAX_NUM_TOKENS:
                    held = sample
                    break
                pack.append(sample)
                length += needs
            yield self._lay_out(pack)

    def _samples(self, name: str) -> Iterator[list[Part]]:
        group = self.groups[name]
        recipe = {"t2i": self._t2i, "vlm": self._vlm, "edit": self._edit}[str(group.recipe)]
        raw = wds.WebDataset(self.shards[name], resampled=True, shardshuffle=False).shuffle(SHUFFLE)
        return (recipe(sample, json.loads(sample["json"]), group) for sample in raw)

    def _text(self, text: str, *, loss: bool = False) -> Part:
        return Part("text", self.tokenizer.encode(text), loss)

    def _t2i(self, sample: Sample, fields: Sample, group: GroupConfig) -> list[Part]:
        caption = random.choice(list(json.loads(fields["captions"]).values()))  # noqa: S311 - no secret
        texts = [] if _falls(TEXT_DROPOUT) else [self._text(caption)]
        image = decode(sample["0.jpg"])
        return [*texts, Part("vae", transform(image, transforms_of(group)[Kind.VAE_IMAGE]), loss=True)]

    def _vlm(self, sample: Sample, fields: Sample, group: GroupConfig) -> list[Part]:
        names, vit = fields["image"], transforms_of(group)[Kind.VIT_IMAGE]
        parts = [
            Part("vit", transform(decode(sample[f"{number}.jpg"]), vit, len(names)))
            for number in range(len(names))
        ]
        for turn in fields["conversations"]:
            text = turn["value"].replace("<image>", "").strip()
            parts.append(self._text(text, loss=turn["from"] == "gpt"))
        return parts

    def _edit(self, sample: Sample, fields: Sample, group: GroupConfig) -> list[Part]:
        """One or two edits of the chain."""
        count, steps = len(fields["instruction_list"]) + 1, fields["instruction_list"]
        start = random.randrange(count - 1)  # noqa: S311 - no secret
        end = random.randrange(start + 1, min(start + 3, count))  # noqa: S311 - no secret
        parts = []
        image = decode(sample[f"{start}.jpg"])
        for step in range(start, end):
            if not _falls(VAE_DROPOUT):
                parts.append(Part("vae", transform(image, transforms_of(group)[Kind.VAE_IMAGE])))
            if not _falls(VIT_DROPOUT) and group.vit_image_transform_args:
                parts.append(Part("vit", transform(image, group.vit_image_transform_args)))
            if not _falls(TEXT_DROPOUT):
                parts.append(self._text(random.choice(steps[step])))  # noqa: S311 - no secret
            image = decode(sample[f"{step + 1}.jpg"])
            parts.append(Part("vae", transform(image, transforms_of(group)[Kind.VAE_IMAGE]), loss=True))
        return parts

    def _lay_out(self, samples: Sequence[Sequence[Part]]) -> dict[str, Any]:
        ids: list[int] = []
        text_indexes: list[int] = []
        positions: list[int] = []
        labels: list[int] = []
        loss_indexes: list[int] = []
        image_indexes: dict[str, list[int]] = {"vit": [], "vae": []}
        timesteps: list[float] = []
        modes: list[str] = []
        lens: list[int] = []
        begin, stop = self.special_tokens["bos_token_id"], self.special_tokens["eos_token_id"]
        image_begin, image_stop = self.special_tokens["start_of_image"], self.special_tokens["end_of_image"]
        place = 0
        for sample in samples:
            rope = 0
            for part in sample:
                size = part.num_tokens
                if part.kind == "text":
                    ids += [begin, *part.value, stop]
                    text_indexes += range(place, place + size)
                    positions += range(rope, rope + size)
                    if part.loss:
                        loss_indexes += range(place, place + size - 1)
                        labels += [*part.value, stop]
                    rope += size
                else:
                    ids += [image_begin, image_stop]
                    text_indexes += [place, place + size - 1]
                    image_indexes[part.kind] += range(place + 1, place + size - 1)
                    positions += [rope] * size
                    if part.kind == "vae":
                        timesteps += [random.gauss(0, 1) if part.loss else -math.inf] * (size - 2)
                    rope += not part.loss
                modes.append("causal" if part.kind == "text" else "noise" if part.loss else "full")
                lens.append(size)
                place += size
        pictures = {
            kind: [part.value for sample in samples for part in sample if part.kind == kind]
            for kind in image_indexes
        }
        batch = {
            "sequence_length": place,
            "sample_lens": [sum(part.num_tokens for part in sample) for sample in samples],
            "split_lens": [*lens, MAX_NUM_TOKENS - place],
            "attn_modes": [*modes, "causal"],
            "packed_text_ids": torch.tensor(ids),
            "packed_text_indexes": torch.tensor(text_indexes),
            "packed_position_ids": torch.tensor(positions),
            "packed_label_ids": torch.tensor(labels),
            "ce_loss_indexes": torch.tensor(loss_indexes),
        }
        if pictures["vae"]:
            height, width = (max(picture.shape[edge] for picture in pictures["vae"]) for edge in (1, 2))
            padded = torch.zeros((len(pictures["vae"]), 3, height, width))
            for target, picture in zip(padded, pictures["vae"], strict=True):
                target[:, : picture.shape[1], : picture.shape[2]] = picture
            batch |= {
                "padded_images": padded,
                "patchified_vae_latent_shapes": [
                    (picture.shape[1] // VAE_PATCH, picture.shape[2] // VAE_PATCH)
                    for picture in pictures["vae"]
                ],
                "packed_latent_position_ids": torch.cat(
                    [grid(picture, VAE_PATCH, VAE_SIDE) for picture in pictures["vae"]]
                ),
                "packed_vae_token_indexes": torch.tensor(image_indexes["vae"]),
                "packed_timesteps": torch.tensor(timesteps),
            }
        if pictures["vit"]:
            patches = [patchify(picture, VIT_PATCH) for picture in pictures["vit"]]
            batch |= {
                "packed_vit_tokens": torch.cat(patches),
                "packed_vit_position_ids": torch.cat(
                    [grid(picture, VIT_PATCH, VIT_SIDE) for picture in pictures["vit"]]
                ),
                "packed_vit_token_indexes": torch.tensor(image_indexes["vit"]),
                "vit_token_seqlens": torch.tensor([len(own) for own in patches]),
            }
        return batch


def _falls(probability: float) -> bool:
    return random.random() < probability  # noqa: S311 - no secret


def decode(data: bytes) -> Image.Image:
    """The pixels of a picture, as RGB."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def transform(image: Image.Image, args: TransformConfig, count: int = 1) -> torch.Tensor:
    """Resized and normalized pixels, float32 (3, H, W), in the order that torchvision advises: resized as uint8."""
    size_hw = args.resize.size((image.height, image.width), count)
    steps = [
        v2.ToImage(),
        v2.Resize(list(size_hw), interpolation=v2.InterpolationMode.BICUBIC, antialias=True),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=list(args.image_mean), std=list(args.image_std)),
    ]
    pixels: torch.Tensor = v2.Compose(steps)(image)
    return pixels


def patchify(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """Patches in rows, float32 (count, patch * patch * 3), from pixels (3, H, W)."""
    channels, height, width = pixels.shape
    cut = pixels.reshape(channels, height // patch, patch, width // patch, patch)
    return cut.permute(1, 3, 2, 4, 0).reshape(-1, patch * patch * channels)


def grid(pixels: torch.Tensor, patch: int, side: int) -> torch.Tensor:
    """Position ids of the patches in a table of `side` columns, int64 (count,)."""
    rows, columns = torch.arange(pixels.shape[1] // patch), torch.arange(pixels.shape[2] // patch)
    return (rows[:, None] * side + columns).flatten()


def prepare(task: Task) -> Start:
    """Load the tokenizer; the rest is the contestant's own time."""
    tokenizer, special_tokens, _ = add_special_tokens(load_tokenizer(task))
    corpus = task.corpus

    def start() -> Iterator[dict[str, Any]]:
        info: Any = load_mapping(str(corpus.shard_info))
        groups = parse_groups(corpus.groups(task.groups))
        shards = {
            name: [
                str(storage.local_path(shard.url))
                for dataset in group.dataset_names
                for shard in list_shards(info[name][dataset]["shards"])
            ]
            for name, group in groups.items()
        }
        dataset = PlainPacks(shards, groups, tokenizer, special_tokens)
        return iter(DataLoader(dataset, batch_size=None, num_workers=task.workers))

    return start
