"""Batches from workers: the same to the bit as without, whoever keeps what of them for how long, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from multiprocessing import active_children, get_context
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import Queue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from golden_data import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_info, small_config, write_tar
from torch.utils.data import DataLoader

from bagel_wds import PackedLoader, SimpleCustomBatch, collate_wrapper, handover, shared_blocks
from bagel_wds.ahead import in_thread
from bagel_wds.config import Transport
from bagel_wds.shared_blocks import SharedBlocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from bagel_wds import PackedDataset

    Alone = Callable[..., list[str]]

COUNT = 32
"""Batches of a run: over twice as many as wait, travel and are trained with at once."""


@pytest.fixture(scope="module")
def info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = foreign_info(tmp_path_factory.mktemp("shards"))
    # What is compiled is loaded here, and not by each worker that is forked.
    assert digests(load(made, 0), 1)
    return made


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    # As a worker has: torch's threads wait for each other long where the processors are busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    RECEIVER.blocks.clear()


def build(info: dict[str, Any], **more: Any) -> PackedDataset:
    config = small_config(**{"dataset_info": info, "num_streams": 4, **more})
    return config.build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)


def load(
    info: dict[str, Any], workers: int, *, context: str = "fork", options: Any = None, **more: Any
) -> PackedLoader:
    return PackedLoader(build(info, **more), workers, multiprocessing_context=context, **(options or {}))


def tensors(batch: SimpleCustomBatch) -> list[torch.Tensor]:
    """All of a batch, also those of pixels that are not finished."""
    found: list[torch.Tensor] = []

    def see(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    copy.copy(batch).map_values(torch.Tensor, see)
    return found


def digest(batch: SimpleCustomBatch) -> str:
    """Content of a batch: each tensor's type, shape and bytes, each plain value, and where its stream is."""
    content = hashlib.sha256()
    for tensor in tensors(batch):
        content.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    plain = {
        key: value
        for key, value in vars(batch).items()
        if key not in {"_pixels", "nested_attention_masks"} and not isinstance(value, torch.Tensor)
    }
    content.update(repr(plain).encode())
    return content.hexdigest()


def digests(batches: Any, count: int | None = None) -> list[str]:
    return [digest(batch) for batch in islice(batches, count)]


@pytest.fixture(scope="module")
def alone(info: dict[str, Any]) -> Alone:
    """The first batches that come without workers, by settings; made once."""
    known: dict[tuple[str, bool], list[str]] = {}

    def expected(transport: str = "float32", use_flex: bool = False) -> list[str]:
        settings = str(transport), use_flex
        if settings not in known:
            known[settings] = digests(load(info, 0, transport=settings[0], use_flex=use_flex), 48)
        return known[settings]

    return expected


def memory_maps() -> list[tuple[int, int, int]]:
    """Memory of this process, as the system says: from where to where, and the inode, which is 0 for what no other has."""
    maps = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        bounds, _, _, _, inode, *_ = line.split()
        first, last = (int(bound, 16) for bound in bounds.split("-"))
        maps.append((first, last, int(inode)))
    return maps


def inodes(of: Sequence[torch.Tensor]) -> set[int]:
    """In which shared memory tensors lie; 0 for memory of this process alone."""
    maps = memory_maps()
    return {
        next(inode for first, last, inode in maps if first <= tensor.data_ptr() < last)
        for tensor in of
        if tensor.numel()
    }


# The same batches


@pytest.mark.parametrize(
    ("transport", "use_flex", "prefetch_factor"),
    [("float32", False, 1), ("float32", True, 4), ("uint8", True, 1), ("uint8", False, 4)],
)
def test_workers_give_the_batches_that_come_without_them(
    info: dict[str, Any], alone: Alone, transport: str, use_flex: bool, prefetch_factor: int
) -> None:
    more: dict[str, Any] = {"transport": transport, "use_flex": use_flex}

    got = digests(load(info, 2, options={"prefetch_factor": prefetch_factor}, **more), COUNT)

    assert got == alone(transport, use_flex)[:COUNT]
    assert len(set(got)) == COUNT


def digests_by_context(context: str, info: dict[str, Any], answers: Any) -> None:
    answers.put(digests(load(info, 1, context=context, transport="uint8"), 12))


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_may_start_in_any_way(info: dict[str, Any], alone: Alone, context: str) -> None:
    # In a process of its own: a worker that was spawned and is ended while it sends may abort, which torch reports there.
    assert in_a_process(partial(digests_by_context, context), info) == alone("uint8")[:12]


def test_finished_on_their_device_they_are_those_without_workers(info: dict[str, Any], alone: Alone) -> None:
    got = digests(load(info, 1, options={"device": "cpu"}, transport="float32"), COUNT)

    assert got == alone()[:COUNT]


# Of many streams, a round of batches is held at once, until it is known that the pass goes on.
@pytest.mark.parametrize(
    ("remainder", "epochs", "num_streams"),
    [("pad", 2, 4), ("drop", 2, 4), ("repeat", 1, 4), ("pad", 1, 16)],
)
def test_epochs_that_end_are_those_without_workers(
    info: dict[str, Any], remainder: str, epochs: int, num_streams: int
) -> None:
    options = {"epochs": epochs, "remainder": remainder}

    expected, got = (
        digests(load(info, workers, options=options, num_streams=num_streams)) for workers in (0, 2)
    )

    assert got == expected
    assert len(got) > 10
    assert len(got) % num_streams == 0


def test_a_run_goes_on_over_resumes_as_without_workers(info: dict[str, Any], alone: Alone) -> None:
    state: dict[str, Any] | None = None
    got: list[str] = []
    for workers, steps, prefetch in [(2, 11, 4), (1, 7, 1), (2, 13, 2)]:
        loader = load(info, workers, options={"prefetch_factor": prefetch}, transport="uint8")
        if state is not None:
            loader.load_state_dict(state)
        got += digests(loader, steps)
        state = json.loads(json.dumps(loader.state_dict()))

    assert got == alone("uint8")[:31]


def test_what_the_trainer_writes_into_its_batches_stays_in_them(info: dict[str, Any], alone: Alone) -> None:
    got = []
    for batch in islice(load(info, 2, options={"prefetch_factor": 1}), COUNT):
        got.append(digest(batch))
        for tensor in tensors(batch):
            tensor.fill_(1)

    assert got == alone()[:COUNT]


def test_masks_of_any_sizes_travel_in_one_batch(tmp_path: Path) -> None:
    # A mask of 1100 tokens has over 4 MiB, and goes another way than those of a few tokens.
    rows = [
        {
            "__key__": f"t{n}",
            "json": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": text}]},
        }
        for n, text in enumerate(["a b " * 3, "a b " * 600] * 6)
    ]
    more: dict[str, Any] = {
        "dataset_info": {"vlm_sft": {"vlm": {"shards": write_tar(tmp_path / "text.tar", rows)}}},
        "grouped_datasets": {"vlm_sft": MIXTURE["vlm_sft"]},
        "expected_num_tokens": 3000,
        "max_num_tokens": 6000,
        "max_num_tokens_per_sample": 4000,
        "num_streams": 1,
    }
    lengths = {length for batch in islice(load({}, 0, **more), 4) for length in batch.sample_lens}
    assert min(lengths) < 100
    assert max(lengths) > 1024

    assert digests(load({}, 1, **more), 4) == digests(load({}, 0, **more), 4)


# What the trainer keeps


def pictures(batch: SimpleCustomBatch) -> torch.Tensor:
    return batch.padded_images if hasattr(batch, "padded_images") else batch.packed_vit_tokens


WAYS_TO_KEEP: dict[str, Callable[[SimpleCustomBatch], Sequence[Any]]] = {
    "the batch": lambda batch: [batch, *tensors(batch)],
    "its tensors": tensors,
    "a view of its pixels": lambda batch: [pictures(batch)[:1, ..., :2]],
    "an array of its pixels": lambda batch: [pictures(batch).numpy()],
    "an array of a view": lambda batch: [pictures(batch)[-1].numpy()[..., 1:]],
    "a slice of a small tensor": lambda batch: [batch.packed_position_ids[3:]],
    "an array of a slice": lambda batch: [batch.packed_text_ids[1:].numpy()[::2]],
    "another type": lambda batch: [batch.packed_text_ids.view(torch.uint8)],
    "a transposed mask": lambda batch: [batch.nested_attention_masks[-1].t()],
    "what dlpack gives": lambda batch: [
        np.from_dlpack(pictures(batch)),
        np.from_dlpack(batch.packed_text_ids),
    ],
    "a storage's tensor": lambda batch: [torch.empty(0).set_(pictures(batch).untyped_storage())],
}


def as_bytes(kept: Any) -> bytes:
    return b"" if isinstance(kept, SimpleCustomBatch) else np.asarray(kept).tobytes()


def assert_kept(held: Mapping[Any, tuple[Sequence[Any], list[bytes]]]) -> None:
    for which, (kept, content) in held.items():
        assert [as_bytes(one) for one in kept] == content, which


def test_what_is_kept_of_every_batch_keeps_its_values(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process is the worker, too, and takes its memory again as soon as it may.
    shared = SharedBlocks()
    monkeypatch.setattr(shared_blocks, "_of_this_process", shared)
    held = {}
    for number, made in enumerate(islice(build(info), 3 * len(WAYS_TO_KEEP))):
        data = send(shared, collate_wrapper()([made]))
        del made
        batch = receive(data)
        assert 0 not in inodes(tensors(batch))
        # Each batch in one way, so that nothing else holds it.
        how = list(WAYS_TO_KEEP)[number % len(WAYS_TO_KEEP)]
        kept = WAYS_TO_KEEP[how](batch)
        held[number, how] = kept, [as_bytes(one) for one in kept]
        del batch, kept

    assert_kept(held)
    assert len(held) == 3 * len(WAYS_TO_KEEP)


@pytest.mark.parametrize("transport", Transport)
def test_what_is_kept_of_some_batches_for_a_while_keeps_its_values(
    info: dict[str, Any], alone: Alone, transport: str
) -> None:
    draws = random.Random(5)
    ways = list(WAYS_TO_KEEP.values())
    held: dict[int, tuple[Sequence[Any], list[bytes]]] = {}
    got, most = [], 0
    for number, batch in enumerate(islice(load(info, 2, transport=transport), 48)):
        got.append(digest(batch))
        if transport == Transport.UINT8:
            if number % 3:
                batch.to("cpu")
            else:
                held[-number] = (levels := tensors(batch)), [as_bytes(one) for one in levels]
                del levels
        if transport == Transport.FLOAT32 or number % 3:
            kept = draws.choice(ways)(batch)
            held[number] = kept, [as_bytes(one) for one in kept]
            del kept
        del batch
        most = max(most, len(held))
        for old in draws.sample(sorted(held), min(len(held), draws.choice([0, 0, 1, 2]))):
            del held[old]
        assert_kept(held)
    assert most > 8
    assert got == alone(transport)[:48]


def test_threads_of_the_trainer_may_keep_and_drop_batches_as_they_like(
    info: dict[str, Any], alone: Alone
) -> None:
    waiting: deque[SimpleCustomBatch] = deque()

    def use(number: int) -> str:
        # Of the batch, this thread alone has the tensors, and lets go of one after another.
        batch = waiting.popleft()
        seen = digest(batch)
        parts = deque(tensors(batch))
        del batch
        content = [as_bytes(part) for part in parts]
        for _ in range(number % 5):
            parts.popleft()
            content.pop(0)
            assert [as_bytes(part) for part in parts] == content
        return seen

    with ThreadPoolExecutor(4) as pool:
        uses = []
        for number, batch in enumerate(islice(load(info, 2, options={"prefetch_factor": 1}), COUNT)):
            waiting.append(batch)
            del batch
            uses.append(pool.submit(use, number))
        got = [one.result() for one in uses]

    # They may have taken turns in any order.
    assert sorted(got) == sorted(alone()[:COUNT])


# A worker and a trainer in one process: who holds what, step by step


def packed(number: int, large: int, small: Sequence[int], shared: SharedBlocks) -> SimpleCustomBatch:
    """A batch with two tensors in blocks, as a worker makes them, and small ones; all values are its number."""
    content: dict[str, Any] = {
        "sequence_length": number,
        "padded_images": shared.empty((large,), torch.int32, "vae").fill_(number),
        "packed_vit_tokens": shared.empty((2, large), torch.int32, "vit").fill_(number),
        "nested_attention_masks": [torch.full((size,), number) for size in small],
        "packed_text_ids": torch.full((3, 5), number, dtype=torch.int16),
    }
    return SimpleCustomBatch([content])


RECEIVER = handover.Receiver()
"""Of this process, where it is the trainer as well."""


def send(shared: SharedBlocks, batch: SimpleCustomBatch, receiver: handover.Receiver = RECEIVER) -> bytes:
    """As a worker's queue does, when the worker itself may have let go of the batch already."""
    return bytes(ForkingPickler.dumps(handover._reduce(shared, receiver.number, batch)))


def receive(data: bytes) -> SimpleCustomBatch:
    rebuild, values = pickle.loads(data)
    batch = rebuild(*values)
    assert isinstance(batch, SimpleCustomBatch)
    return batch


def in_all(shared: SharedBlocks) -> int:
    return sum(len(blocks) for blocks in shared._blocks.values())


@dataclass
class Both:
    """A worker and its trainer: the batches that are made, those on their way, and what is held of those that came."""

    shared: SharedBlocks = field(default_factory=SharedBlocks)
    made: deque[SimpleCustomBatch] = field(default_factory=deque)
    underway: deque[tuple[int, bytes]] = field(default_factory=deque)
    held: list[tuple[int, list[torch.Tensor]]] = field(default_factory=list)

    def make(self, number: int, large: int, small: Sequence[int]) -> None:
        self.made.append(packed(number, large, small, self.shared))

    def send(self, number: int) -> None:
        if self.made:
            batch = self.made.popleft()
            self.underway.append((batch.sequence_length, send(self.shared, batch)))

    def receive(self, number: int) -> None:
        if self.underway:
            own, data = self.underway.popleft()
            batch = receive(data)
            assert batch.sequence_length == own
            self.held.append((own, tensors(batch)))

    def make_send_and_receive(self, number: int, large: int, small: Sequence[int]) -> None:
        self.make(number, large, small)
        self.send(number)
        self.receive(number)

    def keep_a_view(self, number: int, place: int, which: int) -> None:
        """Of one tensor of a batch, and no more of it."""
        if self.held:
            own, kept = self.held[place % len(self.held)]
            self.held[place % len(self.held)] = own, [one.view(-1)[1:] for one in kept[which : which + 1]]

    def drop(self, number: int, place: int) -> None:
        if self.held:
            del self.held[place % len(self.held)]

    def check(self) -> int:
        """That each batch has its values still; how many there are."""
        of_worker = [(batch.sequence_length, tensors(batch)) for batch in self.made]
        assert all(bool((one == own).all()) for own, kept in of_worker + self.held for one in kept)
        return len(self.made) + len(self.underway) + len(self.held)


SMALL = st.lists(st.integers(1, 50), max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just(Both.make), st.integers(0, 3000), SMALL),
        st.tuples(st.just(Both.send)),
        st.tuples(st.just(Both.receive)),
        st.tuples(st.just(Both.make_send_and_receive), st.integers(1, 3000), SMALL),
        st.tuples(st.just(Both.keep_a_view), st.integers(0, 20), st.integers(0, 3)),
        st.tuples(st.just(Both.drop), st.integers(0, 20)),
    ),
    min_size=8,
    max_size=50,
)


@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_no_memory_that_anybody_holds_is_written_to_and_all_is_taken_again(
    steps: list[tuple[Any, ...]],
) -> None:
    both, most = Both(), 0
    for number, (step, *values) in enumerate(steps, start=1):
        step(both, number, *values)
        most = max(most, both.check())
    while both.made or both.underway:
        both.send(0)
        both.receive(0)
        both.check()
    # Three kinds; and of each as many as there were at a time, beside the few that are spare.
    assert in_all(both.shared) <= 3 * (most + 5)

    both.held.clear()
    places = set()
    for number in range(1000, 1010):
        batch = receive(send(both.shared, packed(number, 3000, [50, 50, 50], both.shared)))
        places.add(tuple(tensor.data_ptr() for tensor in tensors(batch)))
        del batch
    # All are free again, so that each kind needs one block, and keeps it.
    assert len(places) == 1


def odd_tensors() -> dict[str, torch.Tensor]:
    floats = torch.arange(24, dtype=torch.float32)
    return {
        "of no dimension": torch.tensor(2.5),
        "without elements": torch.empty((0, 3)),
        "bool": torch.tensor([True, False, True]),
        "bfloat16": floats.to(torch.bfloat16),
        "float64": floats.to(torch.float64)[1:6],
        "complex": torch.complex(floats, -floats),
        "one byte": torch.tensor([7], dtype=torch.uint8),
        "transposed": floats.view(4, 6).t(),
        "with steps": floats[1::3],
        "expanded": torch.tensor([[3.0]]).expand(4, 5),
        "channels last": floats.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "part of a larger one": floats.view(4, 6)[1:3, 2:4],
        "larger than small": torch.arange(3 << 20, dtype=torch.int16).view(1 << 10, -1),
        "part of a large one": torch.arange(3 << 20, dtype=torch.int16)[5 : 5 + (5 << 19)],
    }


def test_tensors_of_every_form_arrive_as_they_are() -> None:
    batch = SimpleCustomBatch([odd_tensors()])

    got = receive(send(SharedBlocks(), batch)).to_dict()

    assert list(got) == list(odd_tensors())
    for name, tensor in odd_tensors().items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("sizes", [(1100, 4), (4, 1100), (4, 0), (0, 4), (1100, 1200), (0, 0)])
def test_lists_of_tensors_of_every_size_arrive_as_they_are(sizes: tuple[int, int]) -> None:
    masks = [torch.full((size, size), float(size)) for size in sizes]

    got = receive(send(SharedBlocks(), SimpleCustomBatch([{"nested_attention_masks": masks}])))

    for one, other in zip(masks, got.nested_attention_masks, strict=True):
        assert torch.equal(one, other)


def test_a_tensor_that_is_in_a_batch_twice_arrives_twice() -> None:
    shared = SharedBlocks()
    pixels = shared.empty((40, 50), torch.float32).fill_(3)
    ids = torch.arange(5)

    got = receive(
        send(shared, SimpleCustomBatch([{"a": pixels, "b": pixels, "c": pixels[:3], "d": ids, "e": ids}]))
    )

    for name, expected in [("a", pixels), ("b", pixels), ("c", pixels[:3]), ("d", ids), ("e", ids)]:
        assert torch.equal(getattr(got, name), expected)


def test_a_batch_without_tensors_takes_no_block() -> None:
    shared = SharedBlocks()

    got = receive(send(shared, SimpleCustomBatch([{"sequence_length": 3, "sample_lens": [1, 2]}])))

    assert (got.sequence_length, got.sample_lens) == (3, [1, 2])
    assert in_all(shared) == 0


def test_small_tensors_take_one_block_and_no_other_is_made_for_the_next() -> None:
    shared = SharedBlocks()
    seen: set[int] = set()
    for number in range(5):
        batch = receive(
            send(shared, SimpleCustomBatch([{f"t{n}": torch.full((9,), number) for n in range(20)}]))
        )
        seen |= inodes(tensors(batch))
        assert {int(tensor[0]) for tensor in tensors(batch)} == {number}
        del batch

    assert len(seen) == 1
    assert 0 not in seen


def test_sending_does_not_change_the_batch_that_is_sent() -> None:
    shared = SharedBlocks()
    batch = packed(7, 100, [3, 4], shared)
    before = digest(batch)
    masks = batch.nested_attention_masks

    data = send(shared, batch)

    assert digest(batch) == before
    assert batch.nested_attention_masks is masks
    assert digest(receive(data)) == before


# Memory comes round


@pytest.mark.parametrize(("transport", "prefetch_factor"), [("float32", 1), ("uint8", 2)])
def test_a_run_needs_few_blocks_and_maps_none_again(
    info: dict[str, Any], transport: str, prefetch_factor: int
) -> None:
    known: set[int] = set()
    late = received = again = 0
    iterator = iter(load(info, 2, options={"prefetch_factor": prefetch_factor}, transport=transport))
    for number in range(48):
        mapped = {inode for _, _, inode in memory_maps()}
        blocks = inodes(tensors(next(iterator)))
        assert 0 not in blocks
        received += len(blocks)
        again += len((blocks & known) - mapped)
        late += len(blocks - known) if number >= 32 else 0
        known |= blocks
    close(iterator)

    kinds = {Transport.FLOAT32: 3, Transport.UINT8: 2}[Transport(transport)]
    assert received == kinds * 48
    # Those that wait, one with the trainer and the one before it, and one in the making; half of them may be outgrown.
    assert len(known) <= 2 * kinds * (prefetch_factor + 3) * 3 // 2
    assert late <= received // 10
    assert again == 0


def test_a_block_travels_once_and_then_its_name_does() -> None:
    shared = SharedBlocks()
    travelled: list[list[bool]] = []
    for number in range(4):
        batch = packed(number, 1000, [30], shared)
        parcel = handover._reduce(shared, RECEIVER.number, batch)[1][1]
        travelled.append([whole is not None for _, whole, _ in parcel.blocks])
        received = handover._rebuild(vars(batch), parcel)
        del batch, received, parcel

    assert travelled == [[True] * 3, [False] * 3, [False] * 3, [False] * 3]


def test_a_receiver_forgets_blocks_that_are_no_more_and_is_told_of_each_once() -> None:
    shared, receiver = SharedBlocks(), handover.Receiver()
    known: list[set[str]] = []
    for size in (1000, 1000, 5000, 25_000, 900):
        batch = receive(send(shared, packed(1, size, [], shared), receiver))
        del batch
        known.append(set(receiver.blocks))

    assert known[0] == known[1]
    assert [len(names) for names in known] == [3] * 5
    # Both large ones were outgrown twice; what holds the small tensors stays.
    assert len(known[0] & known[2]) == 1
    assert len(known[2] & known[3]) == 1
    assert known[3] == known[4]
    assert in_all(shared) == 3
    assert shared.take_gone() == []


def shared_maps() -> int:
    return sum("/torch_" in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


def test_after_an_iteration_nothing_is_mapped_but_what_somebody_holds(info: dict[str, Any]) -> None:
    gc.collect()
    before = shared_maps()
    iterator = iter(load(info, 2))
    batches = list(islice(iterator, 12))
    content = [digest(batch) for batch in batches]
    assert shared_maps() - before >= 12
    close(iterator)
    del iterator
    assert [digest(batch) for batch in batches] == content
    held, expected = batches.pop(), content.pop()
    batches.clear()
    gc.collect()

    assert 1 <= shared_maps() - before <= 3
    assert digest(held) == expected
    del held
    gc.collect()
    assert shared_maps() == before


def test_a_batch_that_comes_when_nobody_knows_its_memory_is_an_error_that_says_so() -> None:
    shared, receiver = SharedBlocks(), handover.Receiver()
    first = receive(send(shared, packed(1, 1000, [30], shared), receiver))
    expected = digest(first)
    del first
    late = send(shared, packed(2, 1000, [30], shared), receiver)
    shared.empty((5000,), torch.int32, "vae")
    with_new_blocks = send(SharedBlocks(), packed(1, 1000, [30], SharedBlocks()), receiver)
    receiver.end()

    # What comes with its blocks needs nobody.
    assert digest(receive(with_new_blocks)) == expected
    with pytest.raises(RuntimeError, match="does not know the shared memory it lies in"):
        receive(late)


def test_who_receives_is_there_until_the_workers_have_ended(
    info: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others, workers_at_its_end = set(active_children()), []

    class Watched(handover.Receiver):
        def end(self) -> None:
            workers_at_its_end.append(len(set(active_children()) - others))
            super().end()

    monkeypatch.setattr(handover, "Receiver", Watched)
    iterator = iter(load(info, 2))
    digests(iterator, 3)
    assert len(set(active_children()) - others) == 2
    close(iterator)
    assert workers_at_its_end == [0]

    # In a cycle, whose weak references are gone before anything in it ends.
    cycle: list[Any] = [iter(load(info, 1))]
    cycle.append(cycle)
    next(cycle[0])
    known = set(handover._receivers)
    del cycle, iterator
    gc.collect()
    assert workers_at_its_end == [0, 0]
    assert len(known - set(handover._receivers)) == 1


def test_iterations_at_the_same_time_do_not_meet(info: dict[str, Any], alone: Alone) -> None:
    loader = load(info, 2)
    found: list[list[str]] = [[], []]
    for batches in zip(loader, load(info, 1), strict=False):
        for own, batch in zip(found, batches, strict=True):
            own.append(digest(batch))
        if len(found[0]) == COUNT:
            break

    assert found == [alone()[:COUNT]] * 2


def test_the_memory_and_files_of_a_worker_do_not_become_more(info: dict[str, Any]) -> None:
    others = set(active_children())
    iterator = iter(load(info, 1))
    digests(iterator, 30)
    (worker,) = set(active_children()) - others

    def has() -> tuple[int, int]:
        maps = Path(f"/proc/{worker.pid}/maps").read_text(encoding="utf-8")
        return len(os.listdir(f"/proc/{worker.pid}/fd")), maps.count("/torch_")  # noqa: PTH208 - as it is there

    early = has()
    digests(iterator, 60)
    late = has()

    # A file that is on its way, and a block that is outgrown.
    assert late[0] <= early[0] + 12
    assert late[1] <= early[1] + 4
    assert late[1] <= 3 * (2 + 3 + 4)
    close(iterator)


def close(iterator: Iterator[Any]) -> None:
    iterator.close()  # type: ignore[attr-defined]


# Forks, copies and other processes


def in_a_process(target: Callable[[dict[str, Any], Any], None], info: dict[str, Any]) -> Any:
    """What a function puts into the queue that it is given, in a process forked for it."""
    context = get_context("fork")
    answers = context.Queue()
    process = context.Process(target=target, args=(info, answers))
    process.start()
    answer = answers.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    return answer


CHILDREN = """
import gc, multiprocessing, os, sys
from itertools import islice
from pathlib import Path
from shard_factory import foreign_info
from test_handover import digest, digests, load

iterator = iter(load(foreign_info(Path(sys.argv[1])), 1, options={"prefetch_factor": 1}))
digests(iterator, 5)
held = list(islice(iterator, 3))
before = [digest(batch) for batch in held]

child = os.fork()
if not child:
    # Else it would end its parent's workers, as any child does that exits so.
    multiprocessing.process._children.clear()
    sys.exit(0)
assert os.waitpid(child, 0) == (child, 0)

child = os.fork()
if not child:
    held.clear()
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0) == (child, 0)

process = multiprocessing.get_context("fork").Process(target=held.clear)
process.start()
process.join()
assert process.exitcode == 0

digests(iterator, 12)
assert [digest(batch) for batch in held] == before
print("kept", len(before))
"""


def test_a_child_of_the_trainer_has_no_say_in_what_is_free_however_it_ends(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, run.stdout) == (0, "kept 3\n"), run.stderr


def through_pickle(batch: SimpleCustomBatch) -> SimpleCustomBatch:
    loaded = pickle.loads(pickle.dumps(batch))
    assert isinstance(loaded, SimpleCustomBatch)
    return loaded


def through_torch_save(batch: SimpleCustomBatch) -> SimpleCustomBatch:
    file = io.BytesIO()
    torch.save(batch.to_dict(), file)
    file.seek(0)
    loaded = SimpleCustomBatch([torch.load(file, weights_only=True)])
    loaded.state = batch.state
    return loaded


@pytest.mark.parametrize("how", [copy.deepcopy, through_pickle, through_torch_save])
def test_copies_are_whole_and_independent(
    info: dict[str, Any], how: Callable[[SimpleCustomBatch], SimpleCustomBatch]
) -> None:
    iterator = iter(load(info, 1, options={"prefetch_factor": 1}))
    digests(iterator, 5)
    batch = next(iterator)
    before = digest(batch)

    kept, written_to = how(batch), how(batch)
    assert digest(kept) == before
    for tensor in tensors(written_to):
        tensor.fill_(1)
    assert digest(batch) == before
    del batch
    digests(iterator, 10)

    assert digest(kept) == before
    assert digest(written_to) != before
    close(iterator)


def answer_digests(asked: Any, answers: Any) -> None:
    while (batch := asked.get()) is not None:
        answers.put(digest(batch))


def test_the_trainer_can_send_batches_on_to_another_process(info: dict[str, Any], alone: Alone) -> None:
    context = torch.multiprocessing.get_context("fork")
    asked, answers = context.Queue(), context.Queue()
    process = context.Process(target=answer_digests, args=(asked, answers))
    process.start()
    got = []
    for batch in islice(load(info, 2, options={"prefetch_factor": 1}), 30):
        asked.put(batch)
        got.append(answers.get(timeout=60))
        # Sent, the batch is still whole here.
        assert digest(batch) == got[-1]
    asked.put(None)
    process.join(60)

    assert got == alone()[:30]
    assert process.exitcode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch pins for an accelerator alone")
def test_pinned_batches_are_those_that_are_not(info: dict[str, Any], alone: Alone) -> None:
    batches = list(islice(load(info, 2, options={"pin_memory": True}), COUNT))

    assert [digest(batch) for batch in batches] == alone()[:COUNT]
    assert all(tensor.is_pinned() for batch in batches for tensor in tensors(batch) if tensor.numel())


def start_sending(receiver: int, worker: int) -> None:
    handover.begin(receiver)


def test_a_thread_may_receive_batches_and_pass_on_copies_as_the_one_that_pins_does(
    info: dict[str, Any], alone: Alone
) -> None:
    batches: DataLoader[Any] = DataLoader(
        build(info),
        batch_size=1,
        collate_fn=collate_wrapper(),
        num_workers=2,
        prefetch_factor=1,
        multiprocessing_context="fork",
        worker_init_fn=partial(start_sending, RECEIVER.number),
    )
    ready: Queue[SimpleCustomBatch] = Queue(2)

    def receive_and_copy() -> None:
        for batch in islice(batches, COUNT):
            ready.put(batch.map_values(torch.Tensor, torch.clone))

    # No pool: a worker that is forked from its thread would wait for that thread, which it is itself, and fail at its end.
    received = in_thread(receive_and_copy)
    got, held = [], []
    for number in range(COUNT):
        batch = ready.get(timeout=60)
        # Nothing of it lies where the worker writes on.
        assert inodes(tensors(batch)) == {0}
        got.append(digest(batch))
        if number % 5 == 0:
            held.append(batch)
        del batch
    received.result(60)

    assert got == alone()[:COUNT]
    assert [digest(batch) for batch in held] == got[::5]


# The other way to share memory


def use_file_system(worker: int) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]


def digests_by_file_system(info: dict[str, Any], answers: Any) -> None:
    # Workers that are forked have it from here.
    use_file_system(0)
    held: list[SimpleCustomBatch] = []
    content: list[str] = []
    for batch in islice(load(info, 2, options={"prefetch_factor": 1}), COUNT):
        content.append(digest(batch))
        if len(held) < 10:
            held.append(batch)
    answers.put((content, [digest(batch) for batch in held]))


@pytest.mark.parametrize("where", ["trainer and workers", "workers alone"])
def test_shared_memory_may_have_names_in_the_file_system(
    info: dict[str, Any], alone: Alone, where: str
) -> None:
    if where == "workers alone":
        loader = load(info, 2, options={"worker_init_fn": use_file_system})
        held = list(islice(loader, COUNT))
        assert [digest(batch) for batch in held] == alone()[:COUNT]
        return
    got, kept = in_a_process(digests_by_file_system, info)

    assert got == alone()[:COUNT]
    assert kept == got[:10]


# Ends of all kinds


def lose_a_worker(info: dict[str, Any], answers: Any) -> None:
    # In a process of its own: torch raises the error wherever the program happens to be.
    iterator = iter(load(info, 1, options={"prefetch_factor": 1}))
    digests(iterator, 5)
    held = list(islice(iterator, 4))
    before = [digest(batch) for batch in held]
    (worker,) = active_children()
    error = ""
    try:
        worker.kill()
        digests(iterator, 50)
    except RuntimeError as raised:
        error = str(raised)
    worker.join()
    answers.put((error, worker.exitcode, before, [digest(batch) for batch in held]))


def test_a_worker_that_is_killed_takes_no_values_along(info: dict[str, Any]) -> None:
    error, exitcode, before, after = in_a_process(lose_a_worker, info)

    assert re.match(r"DataLoader worker .*(killed by signal|exited unexpectedly)", error)
    assert exitcode == -signal.SIGKILL
    assert after == before
    assert len(set(after)) == 4


def fail_for_small_ones(worker: int) -> None:
    empty = SharedBlocks.empty

    def without_small(
        self: SharedBlocks, shape: Sequence[int], dtype: torch.dtype, kind: str = ""
    ) -> torch.Tensor:
        if kind == "small":
            raise RuntimeError("none left for small ones")
        return empty(self, shape, dtype, kind)

    SharedBlocks.empty = without_small  # type: ignore[method-assign]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_goes_wrong_when_a_batch_is_sent_is_raised_where_it_is_waited_for(
    info: dict[str, Any], workers: int
) -> None:
    # Were it not, the trainer would wait until the timeout, whose error is another.
    loader = load(info, workers, options={"worker_init_fn": fail_for_small_ones, "timeout": 30})

    with pytest.raises(
        RuntimeError,
        match=r"a worker could not hand over its batch: RuntimeError: none left for small ones",
    ):
        next(iter(loader))


def leftovers() -> tuple[int, int]:
    """Open files of this process, and its maps of shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return len(os.listdir("/proc/self/fd")), maps.count("/torch_")  # noqa: PTH208 - as it is there


@pytest.mark.parametrize(
    ("transport", "strategy"), [("float32", "file_descriptor"), ("uint8", "file_system")]
)
def test_iterations_that_end_early_leave_nothing_behind(
    info: dict[str, Any], transport: str, strategy: str
) -> None:
    options = {"worker_init_fn": use_file_system} if strategy == "file_system" else {}
    pids = {os.getpid()}

    def end_early(times: int) -> None:
        for number in range(times):
            others = set(active_children())
            iterator = iter(load(info, 1, options=options, transport=transport))
            batch = next(iterator)
            pids.update(worker.pid or 0 for worker in set(active_children()) - others)
            digests(iterator, 4 + number)
            if number % 2:
                close(iterator)
                # A batch outlives its iteration.
                assert digest(batch)

    end_early(2)
    before = leftovers()
    end_early(2)

    assert leftovers() == before
    assert len(pids) == 5
    if strategy == "file_descriptor":
        # With names in the file system, a process of torch's removes them later.
        named = [path.name for path in Path("/dev/shm").iterdir()]
        assert not [name for name in named for pid in pids if name.startswith(f"torch_{pid}_")]


def test_memory_goes_back_to_the_system_once_iteration_and_batches_are_gone(info: dict[str, Any]) -> None:
    _, before = leftovers()
    iterator = iter(load(info, 1))
    held = list(islice(iterator, 6))
    close(iterator)
    assert leftovers()[1] > before

    held.clear()

    assert leftovers()[1] == before


def test_iterations_at_once_do_not_disturb_each_other(info: dict[str, Any], alone: Alone) -> None:
    dataset = build(info)
    loader, other = (
        PackedLoader(dataset, workers, multiprocessing_context="fork", prefetch_factor=1)
        for workers in (2, 1)
    )
    first, third = iter(loader), iter(other)
    got = digests(first, 7)
    held = list(islice(first, 3))
    second = iter(loader)

    # In turns; the second begins with its first batch, behind what the first of its loader has given till then.
    ours, theirs, others = [], [], []
    for _ in range(12):
        ours += digests(first, 1)
        theirs += digests(second, 1)
        others.append(next(third))

    assert got + [digest(batch) for batch in held] == alone()[:10]
    assert ours == alone()[10:22]
    assert theirs == alone()[11:23]
    assert [digest(batch) for batch in others] == alone()[:12]
    for iterator in (first, second, third):
        close(iterator)


class Stop(Exception):  # noqa: N818 - no error
    """What a training loop ends with."""


def test_a_loop_that_raises_keeps_what_its_traceback_refers_to(info: dict[str, Any]) -> None:
    loader = load(info, 2, options={"prefetch_factor": 1})

    def train(seen: list[str]) -> None:
        for batch in loader:
            seen.append(digest(batch))
            if len(seen) == 9:
                raise Stop(batch)

    seen: list[str] = []
    with pytest.raises(Stop) as stopped:
        train(seen)
    more = digests(loader, 20)

    (batch,) = stopped.value.args
    assert digest(batch) == seen[-1]
    assert not set(more) & set(seen)


def note(folder: str, worker: int) -> None:
    Path(folder, str(worker)).touch()


def test_options_of_a_dataloader_stay_what_they_are(
    info: dict[str, Any], alone: Alone, tmp_path: Path
) -> None:
    options = {
        "worker_init_fn": partial(note, str(tmp_path)),
        "persistent_workers": True,
        "timeout": 60,
    }
    loader = load(info, 2, options=options)

    assert digests(loader, 9) + digests(loader, 9) == alone()[:18]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("workers", [0, 1])
def test_prefetch_factor_may_be_none_as_a_dataloaders_is(
    info: dict[str, Any], alone: Alone, workers: int
) -> None:
    assert digests(load(info, workers, options={"prefetch_factor": None}), 5) == alone()[:5]


def test_a_batch_that_is_dropped_is_gone_though_its_loader_goes_on(info: dict[str, Any]) -> None:
    iterator = iter(load(info, 1))
    batch = next(iterator)
    alive = [weakref.ref(tensor) for tensor in tensors(batch)]
    del batch

    next(iterator)

    assert [one() for one in alive] == [None] * len(alive)
    close(iterator)
