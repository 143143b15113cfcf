"""A pack becomes a batch: images are decoded and resized here, and nowhere earlier."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from bagel_wds import images
from bagel_wds.errors import BadSample
from bagel_wds.layout import KEY_ORDER, LayoutRules, lay_out
from bagel_wds.pixels import patchify, to_tensor
from bagel_wds.records import Kind, Pack, SamplePlan, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from PIL import Image

    LoadViews = Callable[[SamplePlan, Iterable[View]], dict[View, torch.Tensor]]


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of a group's pictures, a value a channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ViewLoader:
    """Decodes, resizes and normalizes the views of a plan; each picture once, each view once.

    Attributes:
        normalizations: by group and kind of view.
    """

    normalizations: Mapping[tuple[str, Kind], Normalization] = field(default_factory=dict)

    def __call__(self, plan: SamplePlan, views: Iterable[View]) -> dict[View, torch.Tensor]:
        """The pixels of each view, float32 (3, H, W).

        Raises:
            BadSample: if a picture cannot be decoded.
        """
        decoded: dict[tuple[int, int], Image.Image] = {}
        tensors: dict[View, torch.Tensor] = {}
        for view in views:
            if view in tensors:
                continue
            place = (view.medium, view.frame)
            if place not in decoded:
                picture = plan.media[view.medium][view.frame]
                if not isinstance(picture, images.EncodedImage | images.DecodedImage):
                    raise TypeError(f"sample {plan.key!r}: a {type(picture).__name__} has no pixels to load")
                decoded[place] = picture.rgb()
            scale = self.normalizations.get((plan.group, view.kind), Normalization())
            tensors[view] = to_tensor(images.resize(decoded[place], view.size_hw), scale.mean, scale.std)
        return tensors


def kept_views(plan: SamplePlan) -> list[View]:
    """The views that the pack shows, in order: those of the segments that dropout left."""
    return [
        plan.views[segment.view] for segment in plan.segments if segment.view >= 0 and not segment.dropped
    ]


def materialize_pack(
    pack: Pack,
    rules: LayoutRules,
    load: LoadViews,
    on_bad: Callable[[SamplePlan, BadSample], None],
) -> dict[str, Any] | None:
    """The batch of a pack: upstream's keys in upstream's order.

    A sample with an image that cannot be decoded leaves the pack before it is laid out.

    Args:
        pack: settled plans.
        rules: what the model expects.
        load: pixels of a plan's views.
        on_bad: told of each sample that leaves.

    Returns:
        The batch; None if no sample is left of a pack that had some.
    """
    plans: list[SamplePlan] = []
    pixels: list[dict[View, torch.Tensor]] = []
    for plan in pack.plans:
        try:
            pixels.append(load(plan, kept_views(plan)))
        except BadSample as bad:
            on_bad(plan, bad)
        else:
            plans.append(plan)
    if pack.plans and not plans:
        return None
    batch = lay_out(plans, rules)
    batch["batch_data_indexes"] = [_origin(plan, pack.stream) for plan in plans]
    shown = [
        (view, tensors[view])
        for plan, tensors in zip(plans, pixels, strict=True)
        for view in kept_views(plan)
    ]
    vae = [tensor for view, tensor in shown if view.kind is Kind.VAE_IMAGE]
    vit = [tensor for view, tensor in shown if view.kind is Kind.VIT_IMAGE]
    if vae:
        batch["padded_images"] = _padded(vae)
    if vit:
        batch["packed_vit_tokens"] = torch.cat([patchify(tensor, rules.vit_patch) for tensor in vit])
    return {key: batch[key] for key in KEY_ORDER if key in batch}


def _origin(plan: SamplePlan, stream: int) -> dict[str, Any]:
    indexes = list(plan.indexes) if isinstance(plan.indexes, tuple) else plan.indexes
    return {"data_indexes": indexes, "worker_id": stream, "dataset_name": plan.group}


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Images (3, H, W) of any size in one (count, 3, max H, max W), zero outside."""
    height = max(tensor.shape[1] for tensor in tensors)
    width = max(tensor.shape[2] for tensor in tensors)
    padded = torch.zeros((len(tensors), 3, height, width))
    for place, tensor in zip(padded, tensors, strict=True):
        place[:, : tensor.shape[1], : tensor.shape[2]] = tensor
    return padded
