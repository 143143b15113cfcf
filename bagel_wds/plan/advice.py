"""What is legal in a plan and may hurt, one sentence each, with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bagel_wds.console import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bagel_wds.config import BagelDatasetConfig
    from bagel_wds.plan.figures import GroupPlan, RunPlan

MOST_SKEW = 0.05
"""More than this between the longest run of an epoch and the mean is told."""
MOST_READERS = 2
"""A shard that more streams than this read in an epoch, on average, is too large for the run."""
MOST_OVER_LENGTH = 0.01


def divisors(number: int) -> tuple[int, ...]:
    """What divides a number, in order."""
    small = [count for count in range(1, int(number**0.5) + 1) if number % count == 0]
    return tuple(sorted({*small, *(number // count for count in small)}))


def advise(config: BagelDatasetConfig, plan: RunPlan, memory_limit: int | None) -> Iterator[str]:
    """Sentences about a plan.

    Args:
        config: whose settings they speak of.
        plan: its figures.
        memory_limit: bytes that a worker may have.
    """
    for group in plan.groups:
        yield from _of_group(group, plan)
    yield from _of_streams(config, plan)
    yield from _of_packs(plan)
    yield from _of_memory(config, plan, memory_limit)


def _of_group(group: GroupPlan, plan: RunPlan) -> Iterator[str]:
    name, streams, spread = f"group {group.name!r}", plan.num_streams, group.samples_per_stream
    if group.samples is None or spread is None:
        yield (
            f"{name}: shards without an index or manifest do not tell how many samples they hold, so "
            + (
                f"each of the {streams} streams reads all {group.shards} shards and keeps every {streams}th sample; "
                if group.shards < streams
                else f"whole shards are dealt out, {group.shards_per_stream.least:g} to "
                f"{group.shards_per_stream.most:g} a stream; "
            )
            + "shards made by `bagel-wds convert` are divided by samples"
        )
        return
    if group.samples < streams:
        yield (
            f"{name}: {group.samples} samples are fewer than the {streams} streams, so {streams - group.samples} streams "
            f"have none in an epoch; {_fewer_streams(group.samples, plan)}"
        )
        return
    if spread.skew > MOST_SKEW:
        yield (
            f"{name}: streams have {spread.least:g} to {spread.most:g} samples an epoch, a skew of {spread.skew:.0%}, and "
            "their epochs drift apart; set num_streams lower"
        )
    if group.openings > MOST_READERS * group.shards:
        if group.raw_units:
            yield (
                f"{name}: a unit of its raw files (a row group, or rows of JSON) is opened "
                f"{group.openings / group.shards:.1f} times an epoch, each time for a part of it, and what lies before that is "
                f"passed over; row groups of at most {group.samples // streams} rows would be opened once or twice, or convert "
                "it to shards"
            )
            return
        size = "" if group.bytes is None else f", here of {format_size(group.bytes // streams)}"
        yield (
            f"{name}: a shard is opened {group.openings / group.shards:.1f} times an epoch, each time for a slice of it and "
            f"with its index; shards of at most {group.samples // streams} samples{size} would be opened once or twice"
        )


def _fewer_streams(samples: int, plan: RunPlan) -> str:
    """What is to be done where streams are more than samples."""
    workers = max(1, plan.num_workers)
    own = plan.world_size * workers
    if samples >= own:
        return f"set num_streams to {samples // own * own} or less"
    return (
        f"take fewer ranks or workers, of which there are {plan.world_size} with {workers} each, or add data"
    )


def _of_streams(config: BagelDatasetConfig, plan: RunPlan) -> Iterator[str]:
    if config.num_streams is None:
        yield (
            f"num_streams is not set: the first start fixes it at {plan.num_streams}; set it to the largest ranks times "
            "workers ever wanted"
        )
    streams, own = plan.num_streams, plan.world_size * max(1, plan.num_workers)
    # A power of two has as many divisors as it has binary digits.
    if len(plan.world_sizes) < streams.bit_length():
        better = max(range(own, 2 * streams + 1, own), key=lambda count: (len(divisors(count)), -count))
        if len(divisors(better)) > len(plan.world_sizes):
            yield (
                f"num_streams={streams} has {len(plan.world_sizes)} divisors, so few numbers of ranks can host the run; "
                f"num_streams={better} has {len(divisors(better))}"
            )


def _of_packs(plan: RunPlan) -> Iterator[str]:
    for group in plan.groups:
        if group.over_length > MOST_OVER_LENGTH:
            yield (
                f"group {group.name!r}: {group.over_length:.0%} of the sampled samples are longer than any may be, and would "
                "be dropped; raise max_num_tokens_per_sample, or lower max_image_size"
            )
    opening = sum(group.mean_tokens or 0 for group in plan.groups if group.is_mandatory)
    if opening > plan.pack_tokens:
        yield (
            f"a sample of each mandatory group has {opening:.0f} tokens in the mean, more than the {plan.pack_tokens} of a "
            "pack; raise max_num_tokens, or make a group optional"
        )
    unknown = [group.name for group in plan.groups if group.mean_tokens is None]
    if unknown:
        yield (
            f"steps and requests depend on the tokens of a sample, and those of {', '.join(unknown)} are unknown; give "
            f"--tokens-per-sample {unknown[0]}=N, or --sample-index to judge them by the pictures' sizes"
        )


def _of_memory(config: BagelDatasetConfig, plan: RunPlan, memory_limit: int | None) -> Iterator[str]:
    memory = plan.memory
    if memory.buffers < memory.buffers_wanted:
        yield (
            f"the buffers of a worker's {plan.streams_per_worker} streams would take {format_size(memory.buffers_wanted)}, "
            f"and memory_bytes={config.memory_bytes} keeps {format_size(memory.buffers)}: the rest is read a second time; "
            "raise memory_bytes, or lower shuffle_bytes"
        )
    if memory_limit is not None and memory.total > memory_limit:
        parts = {
            "batches": (memory.batches, 'take use_flex=True, transport="uint8" or a lower max_num_tokens'),
            "buffers": (memory.buffers, "lower memory_bytes"),
            "held": (memory.held, "lower max_buffer_size, or take more workers"),
            "read_ahead": (memory.read_ahead, "lower read_ahead_bytes"),
        }
        largest = max(parts, key=lambda name: parts[name][0])
        yield (
            f"a worker takes about {format_size(memory.total)}, more than the {format_size(memory_limit)} of --memory; most of "
            f"it beside the libraries is {largest.replace('_', ' ')}, {format_size(parts[largest][0])}: {parts[largest][1]}"
        )
