"""What can go wrong, and how a dropped sample is counted.

Three kinds, so that a caller knows what to do by the type alone:

* `ConfigError`: the settings cannot work. Raised before any data is read; the message names the setting, the
  values and what to set instead.
* `ShardError`: a shard cannot be trusted as a whole (cut short, not a tar, members of one sample apart).
* `BadSample`: one sample cannot be used. The stage that meets it counts it in a `Tally` by its `Reason` and goes on.
  Nothing else is ever skipped, unless the settings say `on_shard_error="skip"`.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from bagel_wds.redact import redact

if TYPE_CHECKING:
    from collections.abc import Mapping


class Reason(StrEnum):
    """Why a sample was left out: the code in `quarantine.jsonl` and in the counts of a run."""

    IMAGE_MISSING = "image_missing"
    """An image that the row names is not there, or is a folder; or a row that must have one has none."""
    IMAGE_EMPTY = "image_empty"
    """An image of zero bytes, or a null where an image belongs."""
    IMAGE_UNREADABLE = "image_unreadable"
    """The bytes are no image that Pillow knows, or its header is broken."""
    IMAGE_TRUNCATED = "image_truncated"
    """The header is sound but the pixels cannot be decoded to the end."""
    IMAGE_TOO_LARGE = "image_too_large"
    """More pixels, or more metadata, than the limit allows."""
    VIDEO = "video"
    """A video that is given in a way which is not read, or of which the group's settings choose no frame."""
    VIDEO_MISSING = "video_missing"
    """The video that the row names, a file or a folder of frames, is not there, or the folder holds no frame."""
    VIDEO_EMPTY = "video_empty"
    """A video file of zero bytes."""
    VIDEO_UNREADABLE = "video_unreadable"
    """The bytes are no mp4, mov, mkv, webm or avi, their codec is not known, or frames change their size."""
    VIDEO_NO_STREAM = "video_no_stream"
    """A video file without video: sound alone, or with a cover."""
    VIDEO_NO_FRAMES = "video_no_frames"
    """A video file of which not one frame can be decoded."""
    VIDEO_TRUNCATED = "video_truncated"
    """A video file that was cut, or whose frames cannot be decoded to the end."""
    VIDEO_FRAME_COUNT = "video_frame_count"
    """A video file whose header claims more frames than it holds."""
    VIDEO_TOO_LARGE = "video_too_large"
    """A video of more bytes, more frames, or more pixels a frame than the limit allows."""
    VIDEO_TIMEOUT = "video_timeout"
    """A video whose decoding took longer than the limit, and was ended."""
    PATH_OUTSIDE = "path_outside"
    """A media path that leads out of the media root, or a URL: none is fetched, download it first."""
    ROW_INVALID = "row_invalid"
    """The row is no JSON object, a field that it must have is missing or of another type, or two name the same media."""
    JSON_TOO_LARGE = "json_too_large"
    """A line of over 256 MiB, or more than 16 MiB of JSON once the media are taken out of it."""
    CAPTIONS_INVALID = "captions_invalid"
    """The captions are no string, list or object of strings."""
    CONVERSATIONS_INVALID = "conversations_invalid"
    """The conversation is no list of turns that say what is said and by whom: human, gpt or system."""
    PLACEHOLDER_MISMATCH = "placeholder_mismatch"
    """Over all turns, the k-th `<image>` or `<video>` does not stand for medium k, or one is left over; an item shows a
    medium that is not there, or none shows one that is."""
    ITEMS_INVALID = "items_invalid"
    """The items of an interleaved row are no list of texts, images and videos, are over 10 000, or one has a key or a
    value that it cannot."""
    TOO_FEW_IMAGES = "too_few_images"
    """An edit row with fewer than two images."""
    INSTRUCTION_MISSING = "instruction_missing"
    """An edit row without instructions, or with fewer than it has edits."""
    INSTRUCTION_EMPTY = "instruction_empty"
    """An edit step with no phrasing, or with a null or blank one."""
    INSTRUCTION_SURPLUS = "instruction_surplus"
    """An edit row with more instructions than it has edits: which belong together cannot be known."""
    INSTRUCTION_INVALID = "instruction_invalid"
    """Instructions that are no strings."""
    EMPTY_TEXT = "empty_text"
    """A conversation without any answer, captions that are null or blank, or a blank text with loss."""
    NO_LOSS = "no_loss"
    """An interleaved row of which no item has loss, or a plan of a recipe of one's own of which no segment has: there is
    nothing to learn from it."""
    TRANSFORM_MISSING = "transform_missing"
    """The row shows a picture to the ViT, or to the VAE, and its group's settings have no transform for that."""
    NO_TOKENS = "no_tokens"
    """Conditioning dropout left nothing of the sample."""
    OVER_LENGTH = "over_length"
    """The sample needs more tokens than a sample, or a pack, may have."""
    SHARD_UNREADABLE = "shard_unreadable"
    """Only with `on_shard_error="skip"`: the sample's shard cannot be read from here on."""
    LOST = "lost"
    """Only with `fidelity="upstream"`: the sample closed a pack, and upstream does not keep it."""


class ConfigError(ValueError):
    """Settings that cannot work; the message says which, why, and what to set instead."""

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class ShardError(RuntimeError):
    """A shard that cannot be read as a whole; the message names the shard and the place in it."""

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class NoUsableSampleError(RuntimeError):
    """A whole epoch's worth of a group's samples was dropped; the message names the group and the reasons."""


class PlannerError(RuntimeError):
    """A planner of the user's own failed; the message names it, the sample and the shard."""


class QuarantineLimitError(RuntimeError):
    """More rows of a conversion were left out than is allowed; the message names the dataset and the main reasons."""


class BadSample(Exception):  # noqa: N818 - a verdict on data, not a fault of the program
    """One sample that cannot be used.

    Args:
        reason: the code that it is counted under.
        detail: what was wrong, with the value, in one line.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[BadSample], tuple[Reason, str]]:
        return (BadSample, (self.reason, self.detail))


def name_type(value: object) -> str:
    """What a message calls the type of a JSON value."""
    return "null" if value is None else type(value).__name__


class Tally:
    """Counts of what was seen and what was dropped, by group and word.

    `tally["vlm_sft", "read"] += 1` and `tally.drop("vlm_sft", Reason.OVER_LENGTH)`; `as_dict()` gives
    `{"vlm_sft": {"read": 12, "dropped": {"over_length": 1}}}`.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._drops: Counter[tuple[str, Reason]] = Counter()

    def __getitem__(self, place: tuple[str, str]) -> int:
        return self._counts[place]

    def __setitem__(self, place: tuple[str, str], count: int) -> None:
        self._counts[place] = count

    def drop(self, group: str, reason: Reason, count: int = 1) -> int:
        """Count dropped samples of a group; returns how many were dropped for that reason so far."""
        self._drops[group, reason] += count
        return self._drops[group, reason]

    def drops(self, group: str) -> Mapping[Reason, int]:
        """How many samples of a group were dropped, by reason."""
        return {reason: count for (name, reason), count in sorted(self._drops.items()) if name == group}

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add counts that another tally gave as a dict."""
        for group, words in counts.items():
            for word, count in words.items():
                if word == "dropped":
                    self._drops.update({(group, Reason(reason)): times for reason, times in count.items()})
                else:
                    self._counts[group, word] += count

    def as_dict(self) -> dict[str, dict[str, int | dict[str, int]]]:
        """Every count as plain JSON values, groups in the order of their names."""
        groups = sorted({group for group, _ in (*self._counts, *self._drops)})
        return {
            group: {
                **{word: count for (name, word), count in sorted(self._counts.items()) if name == group},
                "dropped": {str(reason): count for reason, count in self.drops(group).items()},
            }
            for group in groups
        }
