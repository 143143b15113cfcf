"""Which parquet files upstream's datasets read, and the file system that they are read from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pf
import torch.distributed as dist

from bagel_wds import storage
from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

HDFS = "hdfs://"


def get_parquet_data_paths(
    data_dir_list: Sequence[str],
    num_sampled_data_paths: Sequence[int | None],
    rank: int = 0,
    world_size: int = 1,
) -> list[str]:
    """The parquet files of some folders, each folder's as often as it takes to have so many paths.

    Files of a folder come in the order in which the system lists them, as upstream has it; its datasets sort them. With
    more than one rank each lists its share of the folders, and all get all.

    Args:
        data_dir_list: folders.
        num_sampled_data_paths: how many paths each gives; None is each of its files once.
        rank: of this process.
        world_size: number of processes; above 1, torch.distributed must be initialized.

    Raises:
        ConfigError: for a folder that is not there, or holds no parquet file.
    """
    wanted = list(zip(data_dir_list, num_sampled_data_paths, strict=False))
    if world_size <= 1:
        return _list_all(wanted)
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"get_parquet_data_paths with world_size={world_size} lets each rank list a share of the folders and gathers the "
            "lists over torch.distributed, which is not initialized; call init_process_group, or leave world_size out"
        )
    share = -(-len(wanted) // world_size)
    gathered: list[list[str] | None] = [None] * world_size
    dist.all_gather_object(gathered, _list_all(wanted[rank * share : (rank + 1) * share]))
    return [path for paths in gathered for path in paths or ()]


def _list_all(wanted: Sequence[tuple[str, int | None]]) -> list[str]:
    return [path for folder, count in wanted for path in _repeated(_list_folder(folder), count)]


def _repeated(paths: Sequence[str], count: int | None) -> list[str]:
    if count is None:
        return list(paths)
    return [paths[number % len(paths)] for number in range(count)]


def _list_folder(folder: str) -> list[str]:
    try:
        if folder.startswith(HDFS):
            system, path = pf.FileSystem.from_uri(folder)
            host = folder.removesuffix(path)
            paths = [host + info.path for info in system.get_file_info(pf.FileSelector(path))]
        else:
            _check_local(folder)
            paths = [os.path.join(folder, name) for name in os.listdir(folder)]  # noqa: PTH118, PTH208 - upstream's paths
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be listed: {error.strerror or error}; it must be a folder of parquet files"
        ) from error
    found = [path for path in paths if path.endswith(".parquet")]
    if not found:
        raise ConfigError(
            f"{folder}: no parquet file among its {len(paths)} entries; name the folder that holds them"
        )
    return found


def _check_local(path: str) -> None:
    if not storage.is_local(path):
        raise ConfigError(
            f"{path}: upstream's datasets read folders of this machine; a bucket is read by a run with the default fidelity, "
            "or after `bagel-wds convert`"
        )


def init_arrow_pf_fs(parquet_file_path: str) -> pf.FileSystem:
    """The pyarrow file system that a parquet file is read from: the HDFS that its URL names, or the local one.

    Raises:
        ConfigError: for a path of a bucket.
    """
    if parquet_file_path.startswith(HDFS):
        system: pf.FileSystem = pf.FileSystem.from_uri(parquet_file_path)[0]
        return system
    _check_local(parquet_file_path)
    return pf.LocalFileSystem()


def open_parquet(path: str) -> pa.NativeFile:
    """A parquet file, opened to be read."""
    inside = pf.FileSystem.from_uri(path)[1] if path.startswith(HDFS) else path
    return init_arrow_pf_fs(path).open_input_file(inside)
