"""Upstream's sample dicts: put together piece by piece, and taken as plans of this project.

    {"sequence_plan": [entry, ...], "text_ids_list": [[id, ...], ...], "image_tensor_list": [float32 (3, H, W), ...],
     "num_tokens": ids, and H * W / stride**2 of each image, "data_indexes": {...}}

An entry has `type`, `enable_cfg`, `loss`, `special_token_loss`, `special_token_label`, and in a clip `split_start`,
`split_end` and `frame_delta`. The texts and the images of the entries come in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.pixels import ReadyImage
from bagel_wds.records import Kind, SamplePlan, Segment, View

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Sample = dict[str, Any]


def new_sample() -> Sample:
    """A sample with nothing in it."""
    return {"sequence_plan": [], "text_ids_list": [], "image_tensor_list": [], "num_tokens": 0}


def add_ids(data: Sample, ids: list[int], *, loss: bool, cfg: bool) -> None:
    """Add a text."""
    data["text_ids_list"].append(ids)
    data["num_tokens"] += len(ids)
    _add_entry(data, Kind.TEXT, loss, cfg)


def add_picture(
    data: Sample,
    kind: Kind,
    tensor: torch.Tensor,
    stride: int,
    *,
    loss: bool = False,
    cfg: bool = False,
    **split: Any,
) -> None:
    """Add an image and its entry."""
    keep_picture(data, tensor, stride)
    _add_entry(data, kind, loss, cfg, **split)


def keep_picture(data: Sample, tensor: torch.Tensor, stride: int) -> None:
    """Add an image that an entry may show later."""
    height, width = tensor.shape[1:]
    data["image_tensor_list"].append(tensor)
    data["num_tokens"] += width * height // stride**2


def show_picture(data: Sample) -> None:
    """Add the entry of an image that the ViT understands."""
    _add_entry(data, Kind.VIT_IMAGE, loss=False, cfg=False)


def _add_entry(data: Sample, kind: Kind, loss: bool, cfg: bool, **split: Any) -> None:
    data["sequence_plan"].append(
        {
            "type": str(kind),
            "enable_cfg": int(cfg),
            "loss": int(loss),
            "special_token_loss": 0,
            "special_token_label": None,
            **split,
        }
    )


def data_indexes(position: Any, worker: int, dataset_name: str) -> Sample:
    """What a sample says of where it came from."""
    return {"data_indexes": position, "worker_id": worker, "dataset_name": dataset_name}


def plan_of(sample: Mapping[str, Any], group: str, patch: Mapping[Kind, int], key: str = "") -> SamplePlan:
    """A sample as a plan, whose pictures are its tensors. The sample stays as it is.

    Args:
        sample: upstream's dict; texts and images that no entry asks for count in `estimate` alone, as there.
        group: that it belongs to.
        patch: pixels a token, along each edge, for each kind.
        key: of the sample.

    Raises:
        BadSample: if its entries ask for more texts or images than it has.
        ConfigError: naming what else is missing, or of another form.
    """
    where = f"a sample of group {group!r} ({sample.get('data_indexes', 'without data_indexes')})"
    for name in ("sequence_plan", "text_ids_list", "image_tensor_list", "num_tokens"):
        if name not in sample:
            raise ConfigError(f"{where} has no {name!r}; it has {', '.join(map(repr, sample))}")
    texts, images = iter(sample["text_ids_list"]), iter(sample["image_tensor_list"])
    segments: list[Segment] = []
    pictures: list[ReadyImage] = []
    views: list[View] = []
    for number, entry in enumerate(sample["sequence_plan"]):
        kind = _kind_of(entry, f"{where}, entry {number}")
        view, ids = -1, ()
        if kind is Kind.TEXT:
            ids = tuple(_next_of(texts, f"{where}, entry {number}", "text", sample["text_ids_list"]))
            tokens = len(ids)
        else:
            tensor = _next_of(images, f"{where}, entry {number}", "image", sample["image_tensor_list"])
            tokens = _patches(tensor, patch[kind], f"{where}, entry {number}")
            view = len(views)
            pictures.append(ReadyImage(tensor))
            views.append(View(view, 0, kind, pictures[-1].size_hw))
        segments.append(_segment(entry, kind, tokens + 2, ids, view))
    given = sample.get("data_indexes")
    origin = dict(given) if isinstance(given, dict) else {"data_indexes": given}
    origin.setdefault("dataset_name", group)
    return SamplePlan(
        key=key,
        group=group,
        segments=tuple(segments),
        views=tuple(views),
        media=tuple((picture,) for picture in pictures),
        estimate=int(sample["num_tokens"]) + 2 * len(segments),
        indexes=origin,
    )


def _segment(entry: Mapping[str, Any], kind: Kind, tokens: int, ids: tuple[int, ...], view: int) -> Segment:
    label = entry.get("special_token_label")
    return Segment(
        kind,
        tokens,
        loss=entry["loss"] == 1,
        enable_cfg=entry["enable_cfg"] == 1,
        token_ids=ids,
        view=view,
        special_token_loss=entry.get("special_token_loss", 0) == 1,
        special_token_label=label,
        split_start=bool(entry.get("split_start", True)),
        split_end=bool(entry.get("split_end", True)),
        frame_delta=entry.get("frame_delta"),
    )


def _kind_of(entry: Any, where: str) -> Kind:
    known = [str(kind) for kind in Kind]
    if not isinstance(entry, dict) or entry.get("type") not in known:
        raise ConfigError(f"{where} is {entry!r}; its `type` must be one of {', '.join(known)}")
    missing = [name for name in ("loss", "enable_cfg") if name not in entry]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}: {entry!r}")
    return Kind(entry["type"])


def _next_of(values: Any, where: str, what: str, listed: Sequence[Any]) -> Any:
    found = next(values, None)
    if found is None:
        raise BadSample(
            Reason.PLACEHOLDER_MISMATCH,
            f"{where} asks for one {what} more than the {len(listed)} that the sample has",
        )
    return found


def _patches(tensor: Any, patch: int, where: str) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.ndim != 3 or tensor.shape[0] != 3:
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConfigError(f"{where}: its image is {shape}; a float tensor (3, H, W) belongs there")
    height, width = tensor.shape[1:]
    if height % patch or width % patch:
        raise ConfigError(
            f"{where}: its image of {height}x{width} pixels is no multiple of the patch of {patch}; set image_stride of its "
            "transform to that"
        )
    return (height // patch) * (width // patch)
