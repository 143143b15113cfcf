"""A plan as lines for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.console import format_size
from bagel_wds.plan.footprint import WAITING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.plan.figures import GroupPlan, RunPlan, Spread


def plan_lines(plan: RunPlan) -> Iterator[str]:
    """All there is to say of a plan, line by line."""
    for group in plan.groups:
        optional = "mandatory" if group.is_mandatory else "optional"
        yield f"{group.name} (weight {group.weight:g}, {optional})"
        for label, value in _of_group(group, plan.text_tokens):
            yield f"  {label:<13}{value}"
    yield f"run of {_count(plan.world_size, 'rank')} with {_count(plan.num_workers, 'worker')} each"
    for label, value in _of_run(plan):
        yield f"  {label:<13}{value}"
    for sentence in plan.advice:
        yield f"advice: {sentence}"


def _of_group(group: GroupPlan, text_tokens: int) -> Iterator[tuple[str, str]]:
    samples = "samples unknown" if group.samples is None else _count(group.samples, "sample")
    size = "bytes unknown" if group.bytes is None else format_size(group.bytes)
    units = f" ({_count(group.raw_units, 'unit')} of raw files)" if group.raw_units else ""
    yield (
        "data",
        f"{_count(group.datasets, 'dataset')}, {_count(group.shards, 'shard')}{units}, {samples}, {size}",
    )
    if group.samples_per_stream is not None:
        yield "samples", f"{_spread(group.samples_per_stream)} a stream in an epoch"
    yield "shards", f"{_spread(group.shards_per_stream)} a stream in an epoch"
    yield "", f"{_count(group.openings, 'opening')} in all; {group.sharing_streams} streams share a shard"
    if group.mean_tokens is not None:
        sampled = f", taking each text for {text_tokens}" if group.tokens_from == "sampled" else ""
        yield "tokens", f"{group.mean_tokens:.0f} a sample, {group.tokens_from}{sampled}"
    if group.rates is not None:
        rates = group.rates
        yield "a pack", f"{rates.samples_per_pack:.2f} samples, {rates.token_share:.1%} of its tokens"
        yield "an epoch", f"{rates.packs_per_epoch:.0f} packs, {rates.steps_per_epoch:.1f} steps"
        yield "", f"comes round {rates.epochs_per_1000_steps:.3g} times in 1000 steps"


def _of_run(plan: RunPlan) -> Iterator[tuple[str, str]]:
    yield "streams", f"{plan.num_streams}, {plan.streams_per_worker} a worker"
    yield "ranks", f"may be {_some(plan.world_sizes)}"
    yield "pack", f"{plan.pack_tokens} tokens assumed"
    sizes = map(format_size, (plan.state_bytes, plan.rank_state_bytes, plan.run_state_bytes))
    yield "state", "up to {} a stream, {} a rank, {} in all, as JSON".format(*sizes)
    memory = plan.memory
    yield "memory", f"about {format_size(memory.total)} a worker with full buffers:"
    for label, num_bytes in (
        ("libraries", memory.libraries),
        ("shard table", memory.table),
        ("buffers", memory.buffers),
        ("packer", memory.held),
        ("read ahead", memory.read_ahead),
        (f"batches, {WAITING if plan.num_workers else 0} waiting", memory.batches),
    ):
        yield "", f"{label:<22}{format_size(num_bytes)}"
    if plan.traffic is not None:
        traffic = plan.traffic
        yield (
            "reads",
            f"{traffic.requests:.1f} requests and {format_size(int(traffic.bytes))} a second, all ranks",
        )
        yield "", f"{traffic.openings:.2f} shards opened a second, at {traffic.step_seconds:g} s a step"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _spread(spread: Spread) -> str:
    if spread.least == spread.most:
        return f"{spread.least:g}"
    return f"{spread.least:g} to {spread.most:g} (median {spread.median:g}, skew {spread.skew:.1%})"


def _some(numbers: tuple[int, ...]) -> str:
    """At most a dozen of them: the first, and the last."""
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return (
        f"{', '.join(map(str, numbers[:9]))}, ... {', '.join(map(str, numbers[-2:]))} ({len(numbers)} in all)"
    )
