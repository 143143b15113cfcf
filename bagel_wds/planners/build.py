"""What every planner is given, and the builder that puts a plan together item by item."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, Reason
from bagel_wds.frames import FrameRule
from bagel_wds.geometry import ResizeRule, patch_grid
from bagel_wds.records import Kind, RawSample, SamplePlan, Segment, View

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bagel_wds.rng import Draws


@dataclass(frozen=True, kw_only=True)
class PlanTools:
    """What a planner works with.

    Attributes:
        group: name of the group.
        encode: text to token ids.
        resize: the rule of each kind of picture that the group has.
        patch: pixels a token, along each edge, for each kind.
        frames: which frames of a clip are used.
        upstream: plan as upstream does, mistakes included.
        has_id: whether the tokenizer has a token id; None where nothing tells.
    """

    group: str
    encode: Callable[[str], list[int]]
    resize: dict[Kind, ResizeRule]
    patch: dict[Kind, int] = field(default_factory=lambda: {Kind.VIT_IMAGE: 14, Kind.VAE_IMAGE: 16})
    frames: FrameRule = field(default_factory=FrameRule)
    upstream: bool = False
    has_id: Callable[[int], bool] | None = None


_MISSING_TRANSFORM = {
    Kind.VIT_IMAGE: "medium {} is shown to the ViT, and group {!r} has no vit_image_transform_args",
    Kind.VAE_IMAGE: "medium {} is for the VAE, and group {!r} has no image_transform_args",
}


class PlanBuilder:
    """Collects the segments of one sample in order.

    Args:
        sample: whose pictures the views refer to.
        tools: the group's.
    """

    def __init__(self, sample: RawSample, tools: PlanTools) -> None:
        self._sample = sample
        self._tools = tools
        self._segments: list[Segment] = []
        self._views: list[View] = []

    def text(self, text: object, *, loss: bool = False, cfg: bool = False, keep_empty: bool = True) -> bool:
        """Add a text; with `keep_empty=False` one that encodes to nothing gets no segment. Tells whether it has one.

        Raises:
            BadSample: if it is no string.
        """
        if not isinstance(text, str):
            raise BadSample(Reason.ROW_INVALID, f"a text is {type(text).__name__}, not a string")
        ids = self._tools.encode(text)
        if not ids and not keep_empty:
            return False
        self._segments.append(
            Segment(Kind.TEXT, num_tokens=len(ids) + 2, loss=loss, enable_cfg=cfg, token_ids=tuple(ids))
        )
        return True

    def view(self, kind: Kind, medium: int, frame: int = 0, *, img_num: int = 1) -> int:
        """Add a picture after its transform, without a segment; gives its number.

        Raises:
            BadSample: if the sample has no such medium, its header cannot be read, or the group has no transform for it.
            ValueError: if the kind is a text's, a number is below 0, or the medium has no such frame.
        """
        if kind == Kind.TEXT or min(medium, frame) < 0:
            raise ValueError(
                f"view({kind!s}, medium={medium}, frame={frame}): the kind is a picture's, and media and frames are counted from 0"
            )
        if kind not in self._tools.resize:
            raise BadSample(
                Reason.TRANSFORM_MISSING, _MISSING_TRANSFORM[kind].format(medium, self._tools.group)
            )
        if medium >= len(self._sample.media):
            raise BadSample(
                Reason.IMAGE_MISSING,
                f"medium {medium} is shown, and the sample has {len(self._sample.media)}",
            )
        pictures = self._sample.media[medium]
        if frame >= len(pictures):
            raise ValueError(
                f"frame {frame} of medium {medium} is shown, which has {len(pictures)}, counted from 0"
            )
        size_hw = pictures[frame].size_hw
        self._views.append(View(medium, frame, kind, self._tools.resize[kind].size(size_hw, img_num)))
        return len(self._views) - 1

    def segment(self, kind: Kind, view: int, *, loss: bool = False, cfg: bool = False) -> None:
        """Add the segment of a view. One of a view beyond the last has no tokens; `check_views` refuses such plans.

        Raises:
            ValueError: if the view is below 0, or of another kind.
        """
        if view < 0:
            raise ValueError(
                f"segment({kind!s}, view={view}): views are counted from 0, as `view` gives their numbers"
            )
        tokens = 0
        if view < len(self._views):
            if self._views[view].kind != kind:
                raise ValueError(f"segment({kind!s}, view={view}): the view is a {self._views[view].kind!s}")
            rows, columns = patch_grid(self._views[view].size_hw, self._tools.patch[kind])
            tokens = rows * columns + 2
        self._segments.append(Segment(kind, num_tokens=tokens, loss=loss, enable_cfg=cfg, view=view))

    def image(
        self, kind: Kind, medium: int, frame: int = 0, *, loss: bool = False, cfg: bool = False
    ) -> None:
        """Add a picture and its segment."""
        self.segment(kind, self.view(kind, medium, frame), loss=loss, cfg=cfg)

    def clip(
        self,
        medium: int,
        frames: Sequence[int],
        *,
        loss: bool = False,
        condition: bool = False,
        cfg: bool = False,
    ) -> None:
        """Add frames of a clip for the VAE, as one split of attention: noised with loss, clean as a condition, or both.

        Rope ids go on by the distance between frames. Dropout leaves a condition out whole; what has loss always stays.

        Args:
            medium: number of the clip.
            frames: their numbers, strictly rising.
            loss: add them noised, with flow matching loss.
            condition: add them clean; after the noised ones, where there are both.
            cfg: whether dropout may leave the condition out.

        Raises:
            BadSample: if the clip's header cannot be read.
        """
        for noised in [True] * loss + [False] * condition:
            for place, frame in enumerate(frames):
                is_last = place == len(frames) - 1
                self.image(Kind.VAE_IMAGE, medium, frame, loss=noised, cfg=cfg and not noised)
                self._segments[-1] = replace(
                    self._segments[-1],
                    split_start=place == 0,
                    split_end=is_last,
                    frame_delta=None if is_last else frames[place + 1] - frame,
                )

    def frames(self, medium: int, frames: Sequence[int], *, cfg: bool = False, img_num: int = 1) -> None:
        """Add frames of a clip for the ViT, or its only one of an image; each is a picture with a split of its own.

        Args:
            medium: number of the clip.
            frames: their numbers.
            cfg: whether dropout may leave them out: all of them or none.
            img_num: pictures that share the `max_pixels` of the transform.

        Raises:
            BadSample: as `view`.
            ValueError: as `view`.
        """
        for place, frame in enumerate(frames):
            self.segment(Kind.VIT_IMAGE, self.view(Kind.VIT_IMAGE, medium, frame, img_num=img_num), cfg=cfg)
            if cfg and place > 0:
                self._segments[-1] = replace(self._segments[-1], shares_dropout=True)

    def build(self) -> SamplePlan:
        """The plan.

        Under the upstream fidelity it may hold segments without a view: upstream plans such rows and fails when it
        packs them. `check_views` refuses them.
        """
        text = sum(len(segment.token_ids) for segment in self._segments)
        return SamplePlan(
            key=self._sample.key,
            group=self._tools.group,
            segments=tuple(self._segments),
            views=tuple(self._views),
            media=self._sample.media,
            estimate=text + sum(self._estimate(view) for view in self._views) + 2 * len(self._segments),
            ref=self._sample.ref,
            indexes=self._sample.indexes,
            url=self._sample.url,
        )

    def _estimate(self, view: View) -> int:
        """Upstream counts a picture's tokens by the stride of its transform."""
        height, width = view.size_hw
        return height * width // self._tools.resize[view.kind].stride ** 2


def choose_frames(sample: RawSample, medium: int, tools: PlanTools, draws: Draws) -> list[int]:
    """Numbers of the frames that are used of a clip, by the group's rule.

    Raises:
        BadSample: if the clip's header cannot be read, or the rule chooses none.
    """
    frames = sample.media[medium]
    try:
        return tools.frames.choose(len(frames), draws, getattr(frames, "fps", None))
    except ValueError as error:
        raise BadSample(Reason.VIDEO, str(error)) from error


def check_views(plan: SamplePlan) -> None:
    """Refuse a plan that shows more pictures than the sample has.

    Raises:
        BadSample: `placeholder_mismatch`.
    """
    shown = sum(segment.kind is not Kind.TEXT for segment in plan.segments)
    if shown > len(plan.views):
        raise BadSample(Reason.PLACEHOLDER_MISMATCH, f"{shown} image tags for {len(plan.views)} images")
