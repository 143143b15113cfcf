"""A pack becomes a batch: images are decoded and resized here, and nowhere earlier.

All pictures of a pack are made into levels first, so that a sample with a broken one can still leave; then the pack is laid
out, and the levels become floats at their place in the batch, or go on as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from bagel_wds import images, shared_blocks
from bagel_wds.buffers import Buffers
from bagel_wds.clips import EncodedClip
from bagel_wds.config import Pixels, Transport
from bagel_wds.errors import BadSample
from bagel_wds.layout import KEY_ORDER, LayoutRules, lay_out
from bagel_wds.pixels import ReadyImage, Shown, allot, float_table, joined, pack_pixels, write_pixels
from bagel_wds.records import Kind, Pack, SamplePlan, View
from bagel_wds.resample import resize_into
from bagel_wds.scratch import Scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from bagel_wds.images import Levels
    from bagel_wds.shared_blocks import SharedBlocks


@dataclass(frozen=True)
class Normalization:
    """Mean and standard deviation of a group's pictures, a value a channel."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class PackMemory:
    """Where the pixels of packs lie.

    Attributes:
        levels: gives memory that only one pack needs, while it is being made.
        batch: gives what goes out in the batch.
        scratches: for what a thread needs for one picture.
    """

    levels: Buffers = field(default_factory=Buffers)
    batch: Buffers | SharedBlocks = field(default_factory=Buffers)
    scratches: deque[Scratch] = field(default_factory=deque)

    @classmethod
    def here(cls) -> PackMemory:
        """That of this process: in a worker, which hands its batches over, theirs is shared."""
        return cls(batch=shared_blocks.blocks() or Buffers(shared=get_worker_info() is not None))


@dataclass(frozen=True)
class ViewLoader:
    """Decodes and resizes the views of plans; each picture once, each view once.

    Attributes:
        normalizations: by group and kind of view.
        path: how pictures are decoded and resized.
        threads: how many plans are loaded at once.
        video_seconds: the limit for the frames of one clip.
    """

    normalizations: Mapping[tuple[str, Kind], Normalization] = field(default_factory=dict)
    path: Pixels = Pixels.FAST
    threads: int = 1
    video_seconds: float = 60.0

    def fill(
        self,
        plans: Sequence[SamplePlan],
        places: Sequence[Mapping[View, Sequence[Levels]]],
        scratches: deque[Scratch] | None = None,
    ) -> list[BadSample | None]:
        """Write the views of each plan into their places; what is wrong with each plan, None where nothing is.

        The answer is that of the plans' order, whichever is ready first.

        Args:
            plans: settled plans.
            places: of each plan, those of each of its views.
            scratches: memory for the threads; missing ones are added.
        """
        free = deque() if scratches is None else scratches

        def fill(plan: SamplePlan, place: Mapping[View, Sequence[Levels]]) -> BadSample | None:
            try:
                scratch = free.pop()
            except IndexError:
                scratch = Scratch()
            try:
                return self._fill(plan, place, scratch)
            finally:
                free.append(scratch)

        if self.threads == 1 or len(plans) < 2:
            return [fill(plan, place) for plan, place in zip(plans, places, strict=True)]
        # Made for one pack: starting threads costs nothing beside decoding, and none outlives it, or meets a fork.
        with ThreadPoolExecutor(min(self.threads, len(plans))) as pool:
            return list(pool.map(fill, plans, places))

    def _fill(
        self, plan: SamplePlan, places: Mapping[View, Sequence[Levels]], scratch: Scratch
    ) -> BadSample | None:
        of_picture: dict[int, dict[int, list[View]]] = {}
        for view in places:
            of_picture.setdefault(view.medium, {}).setdefault(view.frame, []).append(view)
        try:
            for medium, of_frame in of_picture.items():
                for frame, levels in self._pictures(plan, medium, of_frame, scratch):
                    for view in of_frame[frame]:
                        first, *others = places[view]
                        resize_into(levels, first, self.path, scratch)
                        for other in others:
                            other[:] = first
        except BadSample as bad:
            return bad
        return None

    def _pictures(
        self, plan: SamplePlan, medium: int, of_frame: Mapping[int, Sequence[View]], scratch: Scratch
    ) -> Iterator[tuple[int, Levels]]:
        """The pictures of a medium that are shown, decoded one at a time."""
        frames = plan.media[medium]
        if isinstance(frames, EncodedClip):
            yield from frames.levels(sorted(of_frame), self.video_seconds)
            return
        for frame, views in of_frame.items():
            yield frame, self._levels(plan, medium, frame, views, scratch)

    def _levels(
        self, plan: SamplePlan, medium: int, frame: int, views: Sequence[View], scratch: Scratch
    ) -> Levels:
        """A picture decoded, for these views of it."""
        picture = plan.media[medium][frame]
        if not isinstance(picture, images.EncodedImage | images.DecodedImage):
            raise TypeError(f"sample {plan.key!r}: a {type(picture).__name__} has no pixels to load")
        height, width = (max(view.size_hw[edge] for view in views) for edge in (0, 1))
        return picture.levels(self.path, (height, width), scratch)

    def table(self, group: str, kind: Kind) -> torch.Tensor:
        """What the levels of a group's views become, see `float_table`."""
        scale = self.normalizations.get((group, kind), Normalization())
        return float_table(scale.mean, scale.std)


def kept_views(plan: SamplePlan) -> list[View]:
    """The views that the pack shows, in order: those of the segments that dropout left."""
    return [
        plan.views[segment.view] for segment in plan.segments if segment.view >= 0 and not segment.dropped
    ]


def materialize_pack(
    pack: Pack,
    rules: LayoutRules,
    load: ViewLoader,
    on_bad: Callable[[SamplePlan, BadSample], None],
    transport: Transport = Transport.FLOAT32,
    memory: PackMemory | None = None,
) -> dict[str, Any] | None:
    """The batch of a pack: upstream's keys in upstream's order.

    A sample with an image that cannot be decoded leaves the pack before it is laid out.

    Args:
        pack: settled plans.
        rules: what the model expects.
        load: pixels of a plan's views.
        on_bad: told of each sample that leaves.
        transport: with uint8 the keys of pixels are not there, and one more is, `pixels`: a `PackedPixels`, whose
            `finish` gives them. A pack with a sample whose pictures are floats already has them as float32.
        memory: for pixels, the same for pack after pack; None takes fresh one.

    Returns:
        The batch; None if no sample is left of a pack that had some.
    """
    memory = memory or PackMemory()
    every_view = _shown(pack)
    ready = [_ready(pack.plans[number], view) for number, view in every_view]
    shown = [place for place, picture in zip(every_view, ready, strict=True) if not picture]
    if len(shown) < len(every_view):
        transport = Transport.FLOAT32
    levels, places = allot(
        [view.size_hw for _, view in shown],
        memory.batch if transport is Transport.UINT8 else memory.levels,
    )
    of_plan: list[dict[View, list[Levels]]] = [{} for _ in pack.plans]
    for (number, view), place in zip(shown, places, strict=True):
        of_plan[number].setdefault(view, []).append(place)
    bads = load.fill(pack.plans, of_plan, memory.scratches)
    for plan, bad in zip(pack.plans, bads, strict=True):
        if bad:
            on_bad(plan, bad)
    plans = [plan for plan, bad in zip(pack.plans, bads, strict=True) if not bad]
    if pack.plans and not plans:
        return None
    batch = lay_out(plans, rules)
    batch["batch_data_indexes"] = [_origin(plan, pack.stream) for plan in plans]
    vae, vit = (
        [
            Shown(place, load.table(pack.plans[number].group, kind))
            for (number, view), place in zip(shown, places, strict=True)
            if view.kind is kind and not bads[number]
        ]
        for kind in (Kind.VAE_IMAGE, Kind.VIT_IMAGE)
    )
    if transport is Transport.FLOAT32:
        pictures = (vae, vit) if len(shown) == len(every_view) else _merged(every_view, ready, bads, vae, vit)
        batch |= write_pixels(*pictures, rules.vit_patch, memory.batch)
    ordered = {key: batch[key] for key in KEY_ORDER if key in batch}
    if transport is Transport.UINT8 and (vae or vit):
        whole = levels if not any(bads) else joined([*vae, *vit])
        ordered["pixels"] = pack_pixels(whole, vae, vit, rules.vit_patch)
    return ordered


def _shown(pack: Pack) -> list[tuple[int, View]]:
    """The views of a pack, with the number of their plan: the VAE's first, then the ViT's, each in the order of the pack."""
    return [
        (number, view)
        for kind in (Kind.VAE_IMAGE, Kind.VIT_IMAGE)
        for number, plan in enumerate(pack.plans)
        for view in kept_views(plan)
        if view.kind is kind
    ]


def _ready(plan: SamplePlan, view: View) -> ReadyImage | None:
    """The picture of a view, if it is floats already."""
    picture = plan.media[view.medium][view.frame]
    return picture if isinstance(picture, ReadyImage) else None


def _merged(
    every_view: Sequence[tuple[int, View]],
    ready: Sequence[ReadyImage | None],
    bads: Sequence[BadSample | None],
    vae: Sequence[Shown],
    vit: Sequence[Shown],
) -> tuple[Sequence[Shown | ReadyImage], Sequence[Shown | ReadyImage]]:
    """Pictures of the VAE and of the ViT, with those that are floats already at their places among them."""
    levels = {Kind.VAE_IMAGE: iter(vae), Kind.VIT_IMAGE: iter(vit)}
    pictures: dict[Kind, list[Shown | ReadyImage]] = {kind: [] for kind in levels}
    for (number, view), picture in zip(every_view, ready, strict=True):
        if not bads[number]:
            pictures[view.kind].append(picture or next(levels[view.kind]))
    return pictures[Kind.VAE_IMAGE], pictures[Kind.VIT_IMAGE]


def _origin(plan: SamplePlan, stream: int) -> dict[str, Any]:
    if isinstance(plan.indexes, Mapping):
        return dict(plan.indexes)
    indexes = list(plan.indexes) if isinstance(plan.indexes, tuple) else plan.indexes
    return {"data_indexes": indexes, "worker_id": stream, "dataset_name": plan.group}
