"""Which process of how many this is."""

from __future__ import annotations

import os

import torch.distributed as dist

from bagel_wds.errors import ConfigError

_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


def find_rank() -> tuple[int, int]:
    """Rank and world size: of the process group, else what the launcher (torchrun, SLURM, Open MPI) says, else 0 of 1.

    Raises:
        ConfigError: if the launcher's variables are no rank of a world.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank_name, world_name in _LAUNCHERS:
        rank, world_size = os.environ.get(rank_name), os.environ.get(world_name)
        if rank is None or world_size is None:
            continue
        if not rank.isdecimal() or not world_size.isdecimal() or int(rank) >= int(world_size):
            raise ConfigError(
                f"{rank_name}={rank} and {world_name}={world_size} are no rank of a world; unset or correct them"
            )
        return int(rank), int(world_size)
    return 0, 1
