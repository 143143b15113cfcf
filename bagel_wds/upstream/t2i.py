"""Upstream's class for text to image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagel_wds.images import decode_rgb_as_upstream
from bagel_wds.records import Kind
from bagel_wds.texts import read_captions
from bagel_wds.upstream.distributed import DistributedIterableDataset, Row
from bagel_wds.upstream.draws import ProcessDraws
from bagel_wds.upstream.interleave import count_row_groups, encoded, read_row_group
from bagel_wds.upstream.parquet_paths import get_parquet_data_paths
from bagel_wds.upstream.samples import add_ids, add_picture, data_indexes, new_sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bagel_wds.errors import BadSample

COLUMNS = ("image", "captions")


class T2IIterableDataset(DistributedIterableDataset):
    """Parquet files with an encoded `image` and `captions`, the JSON of an object of captions, a row.

    A sample is one of the captions, drawn from the process-wide `random`, and the image with flow matching loss. A row that
    cannot be used is counted, told of and passed over.

    Args:
        dataset_name: `dataset_name` in the `data_indexes` of each sample.
        transform: makes the VAE's image, as `ImageTransform`.
        tokenizer: for captions.
        data_dir_list: folders of parquet files.
        num_used_data: for each folder how many files are taken, each more than once if need be; None is each once.
        local_rank, world_size, num_workers: as for `DistributedIterableDataset`.
        data_status: for each worker the [file, row group, row] behind which it goes on; None is the start.
    """

    def __init__(
        self,
        dataset_name: str,
        transform: Any,
        tokenizer: Any,
        data_dir_list: Sequence[str],
        num_used_data: Sequence[int | None],
        local_rank: int = 0,
        world_size: int = 1,
        num_workers: int = 8,
        data_status: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(dataset_name, local_rank, world_size, num_workers)
        self.transform = transform
        self.tokenizer = tokenizer
        self.set_data_status(data_status)
        self.data_paths = self.get_data_paths(data_dir_list, num_used_data)
        self.set_epoch()

    def get_data_paths(self, data_dir_list: Sequence[str], num_used_data: Sequence[int | None]) -> list[str]:
        """The parquet files, see `get_parquet_data_paths`."""
        return get_parquet_data_paths(data_dir_list, num_used_data)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Samples without end.

        Raises:
            NoUsableSampleError: if a whole pass gives nothing.
        """
        return self.walk(self.rows, self._sample, self._drop)

    def rows(self, paths: Sequence[str], behind: Sequence[int] | None) -> Iterator[Row]:
        """The rows of some files, behind a position."""
        file, group, row = (behind[0], behind[1], behind[2] + 1) if behind else (0, 0, 0)
        for number, path in enumerate(paths[file:], file):
            for of_file in range(group, count_row_groups(path)):
                table = read_row_group(path, of_file, COLUMNS)
                for place in range(row, table.num_rows):
                    value = {name: table[name][place].as_py() for name in table.column_names}
                    yield Row(
                        (number, of_file, place), f"row {place} of row group {of_file} of {path}", value
                    )
                row = 0
            group = 0

    def _sample(self, row: Row, worker: int) -> dict[str, Any]:
        image = self.transform(decode_rgb_as_upstream(encoded(row.value.get("image"))))
        captions = read_captions(row.value, upstream=True)
        chosen = captions[ProcessDraws().choice(len(captions), "caption")] if captions else " "
        data = new_sample()
        add_ids(data, list(self.tokenizer.encode(chosen)), loss=False, cfg=True)
        add_picture(data, Kind.VAE_IMAGE, image, self.transform.stride, loss=True)
        return {**data, "data_indexes": data_indexes(row.status, worker, self.dataset_name)}

    def _drop(self, row: Row, bad: BadSample) -> None:
        self._log_drop(str(bad.reason), "%s: %s", row.place, bad.detail)
