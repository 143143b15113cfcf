"""The frozen values that move from stage to stage. None of them holds pixels.

raw sample (compressed bytes) -> plan (segments and their lengths) -> pack (plans that fill one budget)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class SampleRef:
    """Where a sample lies, and in which epoch it was met: enough to fetch and plan it again.

    Attributes:
        shard: number of the shard in its group's table.
        offset: of the sample's first tar header, in bytes; of a raw row its number in the row group, or its line in the file.
        length: from there to the end of its last member, padding included, in bytes; of a raw row what that would be in a
            tar.
        epoch: the group's epoch, from 0.
    """

    shard: int
    offset: int
    length: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Samples of one shard that were skipped, since it cannot be read.

    Attributes:
        shard: number of the shard in its group's table.
        offset: where the first of them starts, in bytes; -1 for the first of a slice of which nothing was read.
        count: how many they are.
        epoch: the group's epoch, from 0.
    """

    shard: int
    offset: int
    count: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the reading of a group stands in one stream: the next sample.

    Attributes:
        epoch: the group's epoch, from 0.
        piece: number of the slice in the stream's share of that epoch.
        ordinal: number of the sample in the slice's shard.
        offset: where it starts, in bytes, or behind which row; -1 at the start of a slice, where the index tells.
    """

    epoch: int = 0
    piece: int = 0
    ordinal: int = -1
    offset: int = -1


class Picture(Protocol):
    """One encoded image: its size is read from the header, its pixels by `bagel_wds.images` when wanted."""

    @property
    def size_hw(self) -> tuple[int, int]:
        """Height and width in pixels. Raises BadSample if the header cannot be read."""

    @property
    def num_bytes(self) -> int:
        """Size of the encoded image, in bytes."""


@dataclass(frozen=True, slots=True)
class RawSample:
    """A sample whose JSON is parsed and whose media are still encoded.

    Attributes:
        key: unique in its dataset.
        url: of the shard that it came from.
        dataset: that it belongs to; its name is part of the address of every draw.
        fields: the source's fields, without our reserved one.
        media: for each medium its pictures: one for an image, one a frame for a clip. Of a clip that is a file, the
            sequence has a rate too, `fps`.
        is_clip: for each medium whether it is a clip.
        ref: where it lies; None where the reader gives no offsets.
        indexes: what `batch_data_indexes` says of where it came from.
    """

    key: str
    url: str
    fields: Mapping[str, object]
    media: tuple[Sequence[Picture], ...]
    is_clip: tuple[bool, ...]
    dataset: str = ""
    ref: SampleRef | None = None
    indexes: int | tuple[int, ...] = ()


class Kind(StrEnum):
    """What a segment holds. The values are upstream's names of plan entries."""

    TEXT = "text"
    """Token ids between bos and eos."""
    VIT_IMAGE = "vit_image"
    """Patches that the ViT understands, between start-of-image and end-of-image."""
    VAE_IMAGE = "vae_image"
    """Latent patches of the VAE, between the same two."""


@dataclass(frozen=True, slots=True)
class View:
    """One picture of a sample after one transform: what is resized and turned into a tensor.

    Attributes:
        medium: number of the medium in the sample.
        frame: number of the picture in the medium, 0 for an image.
        kind: which of the group's transforms applies.
        size_hw: height and width after the resize, in pixels.
    """

    medium: int
    frame: int
    kind: Kind
    size_hw: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Segment:
    """One entry of a plan: a text, or one image, in the order in which the model meets them.

    Attributes:
        kind: text, ViT image or VAE image.
        num_tokens: tokens it takes in the pack, its two control tokens included.
        loss: cross entropy on the text, or flow matching loss on the latent.
        enable_cfg: whether conditioning dropout may leave it out.
        token_ids: of a text, without bos and eos.
        view: of an image, its number in `SamplePlan.views`.
        special_token_loss: cross entropy also on the closing control token.
        special_token_label: the label there.
        split_start, split_end: first and last segment of an attention split (the frames of a clip share one).
        frame_delta: rope ids to the next frame of the clip; None outside a clip and on its last frame.
        shares_dropout: conditioning dropout leaves it out with the segment before it, or neither: a later frame of a clip
            that the ViT is shown, which has a split of its own.
        dropped: left out by conditioning dropout. It takes no tokens; an image still advances the rope id.
        timestep: of a VAE image with loss; minus infinity for a clean one.
    """

    kind: Kind
    num_tokens: int
    loss: bool = False
    enable_cfg: bool = False
    token_ids: tuple[int, ...] = ()
    view: int = -1
    special_token_loss: bool = False
    special_token_label: int | None = None
    split_start: bool = True
    split_end: bool = True
    frame_delta: int | None = None
    shares_dropout: bool = False
    dropped: bool = False
    timestep: float = -math.inf


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What one sample will be in a pack, with the encoded pictures that it needs.

    Attributes:
        key: the sample's key.
        group: the group's name, `dataset_name` in `batch_data_indexes`.
        segments: in order.
        views: the pictures after their transforms, in the order of the plan.
        media: of the raw sample.
        estimate: upstream's length before dropout: token ids, patches of every view, two for each segment.
        ref: where the sample lies.
        indexes: what `batch_data_indexes` says of where it came from; a mapping is all that it says, as a user's class has it.
        url: of the shard that it came from.
    """

    key: str
    group: str
    segments: tuple[Segment, ...]
    views: tuple[View, ...]
    media: tuple[Sequence[Picture], ...]
    estimate: int
    ref: SampleRef | None = None
    indexes: int | tuple[int, ...] | Mapping[str, object] = ()
    url: str = ""

    @property
    def length(self) -> int:
        """Tokens that the sample takes in a pack: those of the segments that dropout left."""
        return sum(segment.num_tokens for segment in self.segments if not segment.dropped)

    def with_segments(self, segments: tuple[Segment, ...]) -> SamplePlan:
        """The same plan with other segments."""
        return replace(self, segments=segments)


@dataclass(frozen=True, slots=True)
class Pack:
    """Plans chosen to fill one token budget, in order.

    Attributes:
        plans: in the order of the pack.
        stream: number of the stream that made it, `worker_id` in `batch_data_indexes`.
        state: where the stream is after it, a `StreamState`; None where a stage keeps no bookmark.
    """

    plans: tuple[SamplePlan, ...]
    stream: int = 0
    state: object = None

    @property
    def length(self) -> int:
        """Tokens in the pack."""
        return sum(plan.length for plan in self.plans)
