"""Upstream's class for conversations about images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagel_wds.conversations import Tag, read_turns
from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.images import decode_rgb_as_upstream
from bagel_wds.sources.jsonl import parse_line
from bagel_wds.upstream.distributed import DistributedIterableDataset, Row
from bagel_wds.upstream.lines import place_lines
from bagel_wds.upstream.samples import add_ids, data_indexes, keep_picture, new_sample, show_picture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from PIL import Image

    from bagel_wds.upstream.lines import PlacedLines

    Line = tuple[str, str]


class SftJSONLIterableDataset(DistributedIterableDataset):
    """JSONL files with a conversation a line, about images or the frames of a clip.

    A row that cannot be used, or that has no answer, is counted, told of and passed over.

    Args:
        dataset_name: `dataset_name` in the `data_indexes` of each sample.
        transform: makes the ViT's images, as `ImageTransform`; it is told how many images the sample has.
        tokenizer: for what is said.
        frame_sampler: gives the frames of a clip by its path, as `FrameSampler`.
        jsonl_path_list: files.
        data_dir_list: for each file the folder that the paths in it are relative to.
        num_used_data: for each file how many lines are taken, the first ones; None is all.
        local_rank, world_size, num_workers: as for `DistributedIterableDataset`.
        data_status: for each worker the row behind which it goes on; None is the start.
        shuffle_lines: take lines by a seeded choice instead.
        shuffle_seed: of that choice.
    """

    def __init__(
        self,
        dataset_name: str,
        transform: Any,
        tokenizer: Any,
        frame_sampler: Callable[[str], list[Image.Image]],
        jsonl_path_list: Sequence[str],
        data_dir_list: Sequence[str],
        num_used_data: Sequence[int | None],
        local_rank: int = 0,
        world_size: int = 1,
        num_workers: int = 8,
        data_status: Sequence[Any] | None = None,
        shuffle_lines: bool = False,
        shuffle_seed: int = 0,
    ) -> None:
        super().__init__(dataset_name, local_rank, world_size, num_workers)
        self.transform = transform
        self.tokenizer = tokenizer
        self.frame_sampler = frame_sampler
        self.set_data_status(data_status)
        self._files = [os.path.abspath(path) for path in jsonl_path_list]  # noqa: PTH100 - a URL is refused below
        self._placed: tuple[Sequence[Line], PlacedLines | None] = ([], None)
        self.data_paths = self.get_data_paths(
            jsonl_path_list, data_dir_list, num_used_data, shuffle_lines, shuffle_seed
        )
        self.set_epoch()

    def get_data_paths(
        self,
        jsonl_path_list: Sequence[str],
        data_dir_list: Sequence[str],
        num_used_data: Sequence[int | None],
        shuffle_lines: bool,
        shuffle_seed: int,
    ) -> list[Line]:
        """(line, folder) of all files.

        Raises:
            ConfigError: for a file that cannot be read.
        """
        found: list[Line] = []
        for path, folder, count in zip(jsonl_path_list, data_dir_list, num_used_data, strict=False):
            try:
                with open(path, encoding="utf-8") as file:  # noqa: PTH123 - a path as it is given
                    lines = file.readlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: cannot be read as UTF-8 lines: {error}") from error
            if shuffle_lines:
                self.rng.seed(shuffle_seed)
                self.rng.shuffle(lines)
            found += [(line, folder) for line in lines[:count]]
        return found

    def of_this_rank(self) -> Self:
        """A copy that has this rank's share of the lines alone, by where they lie in their files."""
        if self._placed[0] is not self.data_paths_per_rank:
            self._placed = (self.data_paths_per_rank, place_lines(self.data_paths_per_rank, self._files))
        other = super().of_this_rank()
        lines, placed = self._placed
        # Whoever has put other lines there has them told as they are.
        vars(other).update(data_paths_per_rank=lines if placed is None else placed, _placed=([], None))
        return other

    def change_format(self, data: Mapping[str, Any], num_images: int) -> list[dict[str, Any]]:
        """Texts and places of images, in order: `{"type": "text", "has_loss", "text"}` and `{"type": "image"}`.

        Args:
            data: a row with `conversations`; who is neither human nor gpt is passed over.
            num_images: that the row has; a turn shows no more of them.

        Raises:
            BadSample: if there is no conversation.
        """
        elements: list[dict[str, Any]] = []
        for turn in read_turns(data, upstream=True):
            parts = turn.text.split(Tag.IMAGE.value)
            if turn.speaker == "gpt" or (turn.speaker == "human" and len(parts) == 1):
                elements.append(_text(turn.text, has_loss=turn.speaker == "gpt"))
            elif turn.speaker == "human":
                for number, part in enumerate(parts):
                    if part.strip():
                        elements.append(_text(part.strip(), has_loss=False))
                    if number < min(num_images, len(parts) - 1):
                        elements.append({"type": "image"})
        return elements

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples without end.

        Raises:
            NoUsableSampleError: if a whole pass gives nothing.
        """
        return self.walk(self.rows, self._sample, self._drop)

    def rows(self, lines: Sequence[Line], behind: int | None) -> Iterator[Row]:
        """Some lines, behind a position."""
        first = 0 if behind is None else behind + 1
        for number, line in enumerate(lines[first:], first):
            yield Row(number, f"line {number} of this worker ({line[0][:60]!r})", line)

    def _sample(self, row: Row, worker: int) -> dict[str, Any]:
        line, folder = row.value
        fields = parse_line(line.encode("utf-8", "surrogatepass"))
        images, fields = self._images(fields, folder)
        data = new_sample()
        for image in images:
            keep_picture(data, self.transform(image, img_num=len(images)), self.transform.stride)
        for element in self.change_format(fields, len(images)):
            if element["type"] == "image":
                show_picture(data)
            elif ids := list(self.tokenizer.encode(element["text"])):
                add_ids(data, ids, loss=bool(element["has_loss"]), cfg=False)
        if not any(entry["loss"] for entry in data["sequence_plan"]):
            raise BadSample(Reason.EMPTY_TEXT, "no answer with any text")
        return {**data, "data_indexes": data_indexes(row.status, worker, self.dataset_name)}

    def _images(self, fields: dict[str, Any], folder: str) -> tuple[list[Image.Image], dict[str, Any]]:
        """The images of a row, or the frames of its clip, and the row with a tag for each frame."""
        if "image" in fields:
            return [decode_rgb_as_upstream(read_file(folder, path)) for path in named_images(fields)], fields
        if "video" not in fields:
            return [], fields
        path = media_path(folder, fields["video"])
        try:
            frames = self.frame_sampler(path)
        except BadSample:
            raise
        except Exception as error:
            raise BadSample(Reason.VIDEO, f"{path}: the frame sampler failed: {error!r}") from error
        return frames, with_frames(fields, len(frames))

    def _drop(self, row: Row, bad: BadSample) -> None:
        self._log_drop(str(bad.reason), "%s: %s", row.place, bad.detail)


def _text(text: str, *, has_loss: bool) -> dict[str, Any]:
    return {"type": "text", "has_loss": int(has_loss), "text": text}


def named_images(fields: Mapping[str, Any]) -> list[Any]:
    """The paths in a row's `image`: one, or a list of them."""
    named = fields["image"]
    return named if isinstance(named, list) else [named]


def media_path(folder: str, path: object) -> str:
    """Where a medium lies that a row names.

    Raises:
        BadSample: if it names none.
    """
    if not isinstance(path, str) or not path:
        raise BadSample(Reason.ROW_INVALID, f"a medium is {path!r}, not a path")
    return os.path.join(folder, path)  # noqa: PTH118 - a slash at its end says something


def read_file(folder: str, path: object) -> bytes:
    """The bytes of an image that a row names.

    Raises:
        BadSample: if it is not there.
    """
    place = media_path(folder, path)
    try:
        return Path(place).read_bytes()
    except (OSError, ValueError) as error:
        raise BadSample(
            Reason.IMAGE_MISSING, f"{place}: {getattr(error, 'strerror', None) or error}"
        ) from error


def with_frames(fields: dict[str, Any], count: int) -> dict[str, Any]:
    """A row whose `<video>` stands for so many frames: an `<image>` each, in its first turn.

    Raises:
        BadSample: if there is no `<video>`.
    """
    turns = fields.get("conversations")
    first = turns[0] if isinstance(turns, list) and turns else None
    text = first.get("value") if isinstance(first, dict) else None
    if not isinstance(turns, list) or not isinstance(text, str) or Tag.VIDEO.value not in text:
        raise BadSample(Reason.PLACEHOLDER_MISMATCH, "no <video> in the first turn")
    shown = {**turns[0], "value": text.replace(Tag.VIDEO.value, Tag.IMAGE.value * count)}
    return {**fields, "conversations": [shown, *turns[1:]]}
