"""A training loop as a user writes it: consumes batches, logs what came, and checkpoints; run by `torchrun`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from golden_data import tokenizer
from shard_factory import SPECIAL_TOKENS, small_config
from test_datasets import digest

from bagel_wds import CheckpointState, PackedLoader, gather_state


def main() -> None:
    """Consume batches from a checkpoint on, saving after every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--info", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--form", choices=["json", "dcp"], required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--epochs", type=int)
    arguments = parser.parse_args()
    # A launcher starts each rank in a session of its own; whoever wants to kill them all needs their numbers.
    with (arguments.checkpoint.parent / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)

    config = small_config(dataset_info_path=str(arguments.info), num_streams=8, shuffle_samples=4)
    dataset = config.build(tokenizer(), SPECIAL_TOKENS, None, None, num_workers=1, global_seed=0)
    loader = PackedLoader(dataset, num_workers=1, epochs=arguments.epochs)
    data = CheckpointState(loader)
    saved = sorted(arguments.checkpoint.glob("step-*"))
    if saved and arguments.form == "json":
        loader.load_state_dict(json.loads(saved[-1].read_text()))
    elif saved:
        dcp.load({"data": data}, checkpoint_id=saved[-1])  # type: ignore[attr-defined] # it is public

    for batch in islice(loader, arguments.steps):
        (arguments.checkpoint.parent / f"workers-{dist.get_rank()}").write_text(
            " ".join(str(worker.pid) for worker in multiprocessing.active_children())
        )
        number = loader.state_dict()["next_batch"]
        entry = {"step_end": number, "rank": dist.get_rank(), "digest": digest(batch.to_dict())}
        entry["samples"] = len(batch.batch_data_indexes)
        # Written beside its name and renamed when it is whole: the run may be killed at any moment.
        target = arguments.checkpoint / f"step-{number:06d}"
        partial = target.with_name(f".{target.name}")
        if arguments.form == "json":
            state = gather_state(loader)
            if dist.get_rank() == 0:
                partial.write_text(json.dumps(state))
        else:
            dcp.save({"data": data}, checkpoint_id=partial)  # type: ignore[attr-defined] # it is public
        dist.barrier()
        if dist.get_rank() == 0:
            partial.rename(target)
        # What is logged is covered by a checkpoint.
        dist.barrier()
        with arguments.record.open("a") as log:
            log.write(json.dumps(entry) + "\n")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
