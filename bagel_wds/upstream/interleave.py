"""Upstream's classes for samples whose texts, images and clips alternate, and for parquet by row groups."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bagel_wds.errors import BadSample, ConfigError, Reason
from bagel_wds.images import decode_rgb_as_upstream
from bagel_wds.planners.edit import walk_edits
from bagel_wds.records import Kind
from bagel_wds.upstream.distributed import DistributedIterableDataset, Row
from bagel_wds.upstream.draws import ProcessDraws
from bagel_wds.upstream.parquet_paths import get_parquet_data_paths, open_parquet
from bagel_wds.upstream.samples import add_ids, add_picture, data_indexes, new_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch
    from PIL import Image

    Transform = Callable[[Image.Image], torch.Tensor]
    RowGroup = tuple[str, int]

logger = logging.getLogger(__name__)


class InterleavedBaseIterableDataset(DistributedIterableDataset):
    """What a `parse_row` puts a sample together with. A subclass has `transform`, `vit_transform` and `tokenizer`.

    `transform` makes the VAE's image of a PIL image, `vit_transform` the ViT's; both have a `stride`.
    """

    transform: Any
    vit_transform: Any
    tokenizer: Any

    def _init_data(self) -> dict[str, Any]:
        """A sample with nothing in it."""
        return new_sample()

    def _add_text(
        self, data: dict[str, Any], text: str, need_loss: bool, enable_cfg: bool = True
    ) -> dict[str, Any]:
        """Add a text, with cross entropy on it or not; gives the same sample."""
        add_ids(data, list(self.tokenizer.encode(text)), loss=need_loss, cfg=enable_cfg)
        return data

    def _add_image(
        self,
        data: dict[str, Any],
        image: Image.Image,
        need_loss: bool,
        need_vae: bool,
        need_vit: bool,
        enable_cfg: bool = True,
    ) -> dict[str, Any]:
        """Add an image: noised with loss, clean for the VAE, for the ViT, or several of these in this order.

        Raises:
            AssertionError: if it is to be none of them (upstream's error).
        """
        if not (need_loss or need_vae or need_vit):
            raise AssertionError(
                "an image is added for nothing: one of need_loss, need_vae and need_vit must be true"
            )
        if need_loss or need_vae:
            tensor, stride = self.transform(image), self.transform.stride
        if need_loss:
            add_picture(data, Kind.VAE_IMAGE, tensor, stride, loss=True)
        if need_vae:
            add_picture(data, Kind.VAE_IMAGE, tensor.clone(), stride, cfg=enable_cfg)
        if need_vit:
            vit = self.vit_transform(image)
            add_picture(data, Kind.VIT_IMAGE, vit, self.vit_transform.stride, cfg=enable_cfg)
        return data

    def _add_video(
        self,
        data: dict[str, Any],
        frames: Sequence[Image.Image],
        frame_indexes: Sequence[int],
        need_loss: bool,
        need_vae: bool,
        enable_cfg: bool = True,
    ) -> dict[str, Any]:
        """Add the frames of a clip as one split of attention: noised with loss, or clean for the VAE.

        Args:
            data: the sample.
            frames: the frames.
            frame_indexes: where in the clip they are: rope ids go on by the distance to the next one.
            need_loss: noised; or
            need_vae: clean.
            enable_cfg: whether dropout may leave clean frames out.

        Raises:
            AssertionError: if it is both or neither (upstream's error).
        """
        if bool(need_loss) == bool(need_vae):
            raise AssertionError(
                "a clip is either noised or clean: one of need_loss and need_vae must be true"
            )
        places = list(frame_indexes)
        for number, image in enumerate(frames[: len(places)]):
            distance = (
                {"frame_delta": places[number + 1] - places[number]} if number < len(places) - 1 else {}
            )
            add_picture(
                data,
                Kind.VAE_IMAGE,
                self.transform(image),
                self.transform.stride,
                loss=need_loss,
                cfg=enable_cfg and not need_loss,
                split_start=number == 0,
                split_end=number == len(frames) - 1,
                **distance,
            )
        return data


class ParquetStandardIterableDataset(DistributedIterableDataset):
    """Rows of parquet files, row group by row group; a subclass makes a sample of each in `parse_row`.

    Args:
        dataset_name: `dataset_name` in the `data_indexes` of each sample.
        transform, vit_transform: for the VAE and the ViT, as `ImageTransform`.
        tokenizer: for texts.
        data_dir_list: folders of parquet files.
        num_used_data: for each folder how many paths are taken, a file more than once if need be; None is each once.
        parquet_info: for each path `{"num_row_groups": n}`; a file that is not in it is left out. None asks the files.
        local_rank, world_size, num_workers: as for `DistributedIterableDataset`.
        data_status: for each worker the [row group, row] behind which it goes on; None is the start.
    """

    def __init__(
        self,
        dataset_name: str,
        transform: Any,
        tokenizer: Any,
        vit_transform: Any,
        data_dir_list: Sequence[str],
        num_used_data: Sequence[int | None],
        parquet_info: Mapping[str, Mapping[str, Any]] | None,
        local_rank: int = 0,
        world_size: int = 1,
        num_workers: int = 8,
        data_status: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(dataset_name, local_rank, world_size, num_workers)
        self.transform = transform
        self.vit_transform = vit_transform
        self.tokenizer = tokenizer
        self.set_data_status(data_status)
        self.data_paths = self.get_data_paths(data_dir_list, num_used_data, parquet_info)
        self.set_epoch()

    def get_data_paths(
        self,
        data_dir_list: Sequence[str],
        num_used_data: Sequence[int | None],
        parquet_info: Mapping[str, Mapping[str, Any]] | None,
    ) -> list[RowGroup]:
        """(file, row group) of all folders.

        Raises:
            ConfigError: if none of the files is in `parquet_info`.
        """
        paths = get_parquet_data_paths(data_dir_list, num_used_data)
        known = {path for path in paths if parquet_info is None or path in parquet_info}
        left_out = sorted(set(paths) - known)
        if not known:
            raise ConfigError(
                f"dataset {self.dataset_name!r}: parquet_info names none of the {len(left_out)} files, such as {left_out[0]}; "
                f"it names {', '.join(list(parquet_info or ())[:3]) or 'none'}"
            )
        if left_out:
            logger.warning(
                "dataset %r: %d files are left out, since parquet_info does not name them, such as %s",
                self.dataset_name,
                len(left_out),
                left_out[0],
            )
        counts = {
            path: int(parquet_info[path]["num_row_groups"])
            if parquet_info is not None
            else count_row_groups(path)
            for path in known
        }
        return [(path, group) for path in paths if path in known for group in range(counts[path])]

    def parse_row(self, row: Any) -> dict[str, Any]:
        """The sample of a row, or an empty dict to pass it over; a subclass has it.

        Args:
            row: a pandas row where pandas is installed, else a `ParquetRow`, which has the same values under the same names.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples without end. A row for which `parse_row` raises is counted, told of and passed over.

        Raises:
            NoUsableSampleError: if a whole pass gives nothing.
        """
        return self.walk(self.rows, self._sample, self._drop)

    def rows(self, groups: Sequence[RowGroup], behind: Sequence[int] | None) -> Iterator[Row]:
        """The rows of some row groups, behind a position."""
        for place, row, name, table in self.tables(groups, behind):
            for number, value in parquet_rows(table, row):
                yield Row((place, number), f"row {number} of {name}", value)

    def tables(
        self, groups: Sequence[RowGroup], behind: Sequence[int] | None, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[int, int, str, pa.Table]]:
        """Number, first row that is wanted, name and content of each row group, from a position on.

        Args:
            groups: row groups.
            behind: the position.
            columns: those of the content, where the file has them; None is all.
        """
        first, row = (behind[0], behind[1] + 1) if behind else (0, 0)
        for place, (path, group) in enumerate(groups[first:], first):
            name = f"row group {group} of {path}"
            try:
                yield place, row, name, read_row_group(path, group, columns)
            except ConfigError as error:
                self._log_drop("parquet_row_group_parse", "%s", error)
            row = 0

    def _sample(self, row: Row, worker: int) -> dict[str, Any] | None:
        try:
            data = self.parse_row(row.value)
        except BadSample:
            raise
        except Exception as error:
            raise BadSample(
                Reason.ROW_INVALID, f"{type(self).__name__}.parse_row: {type(error).__name__}: {error}"
            ) from error
        if not data:
            return None
        return {**data, "data_indexes": data_indexes(row.status, worker, self.dataset_name)}

    def _drop(self, row: Row, bad: BadSample) -> None:
        self._log_drop("parquet_row_parse", "%s: %s", row.place, bad.detail)


def count_row_groups(path: str) -> int:
    """How many row groups a file has.

    Raises:
        ConfigError: if it cannot be read.
    """
    count: int = _opened(path, lambda parquet: parquet.metadata.num_row_groups)
    return count


def read_row_group(path: str, group: int, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a row group.

    Raises:
        ConfigError: if it cannot be read.
    """

    def read(parquet: pq.ParquetFile) -> pa.Table:
        if group >= parquet.metadata.num_row_groups:
            raise ConfigError(
                f"{path}: there is no row group {group}, it has {parquet.metadata.num_row_groups}"
            )
        there = None if columns is None else [name for name in columns if name in parquet.schema_arrow.names]
        return parquet.read_row_group(group, columns=there, use_threads=False)

    return _opened(path, read)


def encoded(value: object) -> bytes:
    """The bytes of an image in a row.

    Raises:
        BadSample: for anything else.
    """
    if not isinstance(value, bytes):
        raise BadSample(Reason.IMAGE_EMPTY, f"an image is {type(value).__name__}, not bytes")
    return value


def _opened(path: str, use: Callable[[pq.ParquetFile], Any]) -> Any:
    try:
        with open_parquet(path) as file, pq.ParquetFile(file) as parquet:
            return use(parquet)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as parquet: {error}") from error


class ParquetRow(dict[str, Any]):
    """A row of a parquet file as pandas would give it: columns by name, lists as NumPy arrays; `name` is its number."""

    name: int

    def __getattr__(self, column: str) -> Any:
        try:
            return self[column]
        except KeyError:
            raise AttributeError(f"the row has no column {column!r}; it has {', '.join(self)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The columns as a plain dict."""
        return dict(self)


def parquet_rows(table: pa.Table, first: int = 0) -> Iterator[tuple[int, Any]]:
    """Number and value of each row from one on, as upstream's `parse_row` gets them."""
    try:
        import_module("pandas")  # not needed, but upstream's rows are its, so where it is there ours are, too
    except ImportError:
        columns = {name: table[name].to_numpy() for name in table.column_names}
        for number in range(first, table.num_rows):
            row = ParquetRow({name: values[number] for name, values in columns.items()})
            row.name = number
            yield number, row
    else:
        yield from table.to_pandas().iloc[first:].iterrows()


class UnifiedEditIterableDataset(InterleavedBaseIterableDataset, ParquetStandardIterableDataset):
    """Chains of edits: `image_list` holds two encoded images or more, `instruction_list` for each edit its phrasings."""

    def parse_row(self, row: Any) -> dict[str, Any]:
        """One or two consecutive edits of a row's chain; draws from the process-wide generators.

        Raises:
            BadSample: if the row cannot be used.
        """
        images = plain(row["image_list"]) or []
        if len(images) < 2:
            raise BadSample(Reason.TOO_FEW_IMAGES, f"an edit needs two images, the row has {len(images)}")
        instructions = plain(row["instruction_list"]) or []
        data = self._init_data()
        for item in walk_edits(len(images), instructions, ProcessDraws(), upstream=True):
            if isinstance(item, str):
                data = self._add_text(data, item, need_loss=False)
            else:
                data = self._add_image(
                    data,
                    decode_rgb_as_upstream(encoded(images[item.image])),
                    need_loss=item.target,
                    need_vae=item.condition,
                    need_vit=item.condition,
                )
        return data


def plain(value: Any) -> Any:
    """A value out of a row with lists for arrays, and None for what pandas has for a missing one."""
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(element) for element in value]
    return None if isinstance(value, float) and np.isnan(value) else value
