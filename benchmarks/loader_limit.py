"""Contestant (c) of `benchmarks.loader`, the limit: decode and resize of just the pictures that our packs show.

The packs are made before the clock starts. What it gives is no batch: nothing is normalized, patchified or laid out.
"""

from __future__ import annotations

import importlib
import io
from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import webdataset as wds
from PIL import Image
from torch.nn.functional import interpolate

from bagel_wds import stages
from bagel_wds.config import load_mapping
from bagel_wds.groups import groups_of
from bagel_wds.materialize import kept_views
from bagel_wds.shards import list_shards
from bagel_wds.tokens import add_special_tokens
from benchmarks.loader_tasks import SEED, load_tokenizer, our_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bagel_wds.records import Pack
    from benchmarks.loader_tasks import Start, Task


@dataclass(frozen=True)
class Pictures:
    """What is decoded and resized for one pack.

    Attributes:
        tokens: of the pack.
        shown: how many pictures the batch has; an edit's result that the next edit starts from is shown twice.
        views: for each encoded picture, height and width of each view of it.
    """

    tokens: int
    shown: int
    views: tuple[tuple[bytes, tuple[tuple[int, int], ...]], ...]


def prepare(task: Task) -> Start:
    """Make as many packs as the task asks for, those that ours makes with one stream."""
    packs = [pictures_of(pack) for pack in islice(our_packs(task), task.warmup + task.batches)]
    decode = find_decoder()

    def start() -> Iterator[dict[str, Any]]:
        for pack in packs:
            for data, sizes in pack.views:
                pixels = decode(data)
                for size_hw in sizes:
                    resize(pixels, size_hw)
            yield {"sequence_length": pack.tokens, "images": pack.shown}

    return start


def our_packs(task: Task) -> Iterator[Pack]:
    """The packs of a run with one stream, out of the stages that a user can take, too."""
    config = our_config(task)
    tokenizer, _, _ = add_special_tokens(load_tokenizer(task))
    info: Any = load_mapping(str(task.corpus.shard_info))
    plans = {}
    for name, group in groups_of(config).items():
        listed = [
            shard
            for dataset in group.dataset_names
            for shard in list_shards(info[name][dataset]["shards"], dataset)
        ]
        plans[name] = wds.DataPipeline(
            stages.shards(listed, group=name, seed=config.data_seed),
            stages.read(),
            stages.shuffle(config, name, seed=SEED),
            stages.decode(config, name),
            stages.plan(config, name, tokenizer, seed=SEED),
        )
    return iter(wds.DataPipeline(stages.mix(plans, config, seed=SEED), stages.pack(config)))


def pictures_of(pack: Pack) -> Pictures:
    """The pictures that a pack shows, each once, with all its views."""
    shown, pictures = 0, []
    for plan in pack.plans:
        sizes: dict[tuple[int, int], dict[Any, tuple[int, int]]] = defaultdict(dict)
        for view in kept_views(plan):
            shown += 1
            sizes[view.medium, view.frame][view] = view.size_hw
        for (medium, frame), views in sizes.items():
            picture: Any = plan.media[medium][frame]
            pictures.append((picture.data, tuple(views.values())))
    return Pictures(sum(plan.length for plan in pack.plans), shown, tuple(pictures))


def find_decoder() -> Callable[[bytes], torch.Tensor]:
    """The fast one, or Pillow's where it is not installed; pixels are uint8 (1, 3, H, W), channels last."""
    try:
        decode_jpeg = importlib.import_module("simplejpeg").decode_jpeg
    except ImportError:
        return lambda data: _tensor(np.array(Image.open(io.BytesIO(data)).convert("RGB")))
    return lambda data: _tensor(decode_jpeg(data, colorspace="RGB"))


def _tensor(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)


def resize(pixels: torch.Tensor, size_hw: tuple[int, int]) -> torch.Tensor:
    """Bicubic with antialiasing, from uint8 to uint8."""
    if pixels.shape[2:] == size_hw:
        return pixels
    return interpolate(pixels, size=size_hw, mode="bicubic", antialias=True)
