"""bagel-wds: BAGEL-style multimodal training data, streamed from WebDataset shards into packed batches.

    config = BagelDatasetConfig(grouped_datasets_path="mixture.yaml", dataset_info_path="shards/dataset_info.yaml")
    tokenizer, special_tokens, _ = add_special_tokens(tokenizer)
    dataset = config.build(tokenizer, special_tokens, rank=0, world_size=1, num_workers=2, global_seed=0)
    for batch in DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=collate_wrapper()):
        ...

The names below are loaded when they are first used, so that the command line does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagel_wds import stages
    from bagel_wds.attention import prepare_attention_mask_per_sample
    from bagel_wds.batch import SimpleCustomBatch, bagel_packed_collate_fn, collate_wrapper
    from bagel_wds.config import BagelDatasetConfig, DataConfig
    from bagel_wds.datasets import PackedDataset, make_bagel_multimodal_dataset
    from bagel_wds.errors import (
        BadSample,
        ConfigError,
        NoUsableSampleError,
        PlannerError,
        Reason,
        ShardError,
        Tally,
    )
    from bagel_wds.images import pil_img2rgb
    from bagel_wds.layout import len2weight
    from bagel_wds.loader import CheckpointState, PackedLoader, gather_state
    from bagel_wds.pixels import patchify
    from bagel_wds.positions import (
        get_flattened_position_ids_extrapolate,
        get_flattened_position_ids_interpolate,
    )
    from bagel_wds.ranks import find_rank
    from bagel_wds.state import merge_states
    from bagel_wds.tokens import add_special_tokens
    from bagel_wds.transforms import ImageTransform, MaxLongEdgeMinShortEdgeResize
    from bagel_wds.upstream.distributed import DistributedIterableDataset
    from bagel_wds.upstream.frame_sampler import FrameSampler
    from bagel_wds.upstream.interleave import (
        InterleavedBaseIterableDataset,
        ParquetStandardIterableDataset,
        UnifiedEditIterableDataset,
    )
    from bagel_wds.upstream.parquet_paths import get_parquet_data_paths, init_arrow_pf_fs
    from bagel_wds.upstream.registry import DATASET_REGISTRY, DEFAULT_DATASET_INFO
    from bagel_wds.upstream.t2i import T2IIterableDataset
    from bagel_wds.upstream.vlm import SftJSONLIterableDataset

_HOMES = {
    "batch": ("SimpleCustomBatch", "bagel_packed_collate_fn", "collate_wrapper"),
    "config": ("BagelDatasetConfig", "DataConfig"),
    "datasets": ("PackedDataset", "make_bagel_multimodal_dataset"),
    "errors": (
        "BadSample",
        "ConfigError",
        "NoUsableSampleError",
        "PlannerError",
        "Reason",
        "ShardError",
        "Tally",
    ),
    "images": ("pil_img2rgb",),
    "loader": ("CheckpointState", "PackedLoader", "gather_state"),
    "ranks": ("find_rank",),
    "state": ("merge_states",),
    "attention": ("prepare_attention_mask_per_sample",),
    "layout": ("len2weight",),
    "pixels": ("patchify",),
    "positions": ("get_flattened_position_ids_extrapolate", "get_flattened_position_ids_interpolate"),
    "tokens": ("add_special_tokens",),
    "transforms": ("ImageTransform", "MaxLongEdgeMinShortEdgeResize"),
    "upstream.distributed": ("DistributedIterableDataset",),
    "upstream.frame_sampler": ("FrameSampler",),
    "upstream.interleave": (
        "InterleavedBaseIterableDataset",
        "ParquetStandardIterableDataset",
        "UnifiedEditIterableDataset",
    ),
    "upstream.parquet_paths": ("get_parquet_data_paths", "init_arrow_pf_fs"),
    "upstream.registry": ("DATASET_REGISTRY", "DEFAULT_DATASET_INFO"),
    "upstream.t2i": ("T2IIterableDataset",),
    "upstream.vlm": ("SftJSONLIterableDataset",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DATASET_REGISTRY",
    "DEFAULT_DATASET_INFO",
    "BadSample",
    "BagelDatasetConfig",
    "CheckpointState",
    "ConfigError",
    "DataConfig",
    "DistributedIterableDataset",
    "FrameSampler",
    "ImageTransform",
    "InterleavedBaseIterableDataset",
    "MaxLongEdgeMinShortEdgeResize",
    "NoUsableSampleError",
    "PackedDataset",
    "PackedLoader",
    "ParquetStandardIterableDataset",
    "PlannerError",
    "Reason",
    "SftJSONLIterableDataset",
    "ShardError",
    "SimpleCustomBatch",
    "T2IIterableDataset",
    "Tally",
    "UnifiedEditIterableDataset",
    "add_special_tokens",
    "bagel_packed_collate_fn",
    "collate_wrapper",
    "find_rank",
    "gather_state",
    "get_flattened_position_ids_extrapolate",
    "get_flattened_position_ids_interpolate",
    "get_parquet_data_paths",
    "init_arrow_pf_fs",
    "len2weight",
    "make_bagel_multimodal_dataset",
    "merge_states",
    "patchify",
    "pil_img2rgb",
    "prepare_attention_mask_per_sample",
    "stages",
]


def __getattr__(name: str) -> Any:
    if name == "stages":
        return import_module("bagel_wds.stages")
    if name in _HOME_OF:
        return getattr(import_module(f"bagel_wds.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
