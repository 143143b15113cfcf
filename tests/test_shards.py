"""Which stream reads which samples: each sample of an epoch once, however shards and streams divide."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import wids
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shard_factory import t2i_sample, write_tar

from bagel_wds import shards, storage
from bagel_wds.errors import ConfigError, ShardError
from bagel_wds.reader import walk_shard, walk_slice
from bagel_wds.shards import Shard, ShardSlice, count_samples, list_shards, walk_epochs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Place = tuple[int, int]
"""A sample: number of its shard, and its ordinal there."""


def shards_of(sizes: Sequence[int], *, known: bool = True) -> list[Shard]:
    """A table of shards that hold so many samples each."""
    return [Shard(f"{number}.tar", samples=size if known else None) for number, size in enumerate(sizes)]


def pieces(
    shards: Sequence[Shard], streams: int, stream: int, epochs: int, seed: int = 42
) -> list[ShardSlice]:
    """A stream's slices of the first epochs."""
    walk = walk_epochs(shards, seed=seed, group="t2i_pretrain", num_streams=streams, stream=stream)
    return list(takewhile(lambda piece: piece.epoch < epochs, walk))


def places(piece: ShardSlice, sizes: Sequence[int]) -> list[Place]:
    """The samples of a slice."""
    return [
        (piece.shard, ordinal) for ordinal in range(sizes[piece.shard])[piece.start : piece.stop : piece.step]
    ]


def epoch_runs(
    sizes: Sequence[int], streams: int, epoch: int, *, known: bool = True, seed: int = 42
) -> list[list[Place]]:
    """What each stream reads in an epoch, in order."""
    shards = shards_of(sizes, known=known)
    return [
        [
            place
            for piece in pieces(shards, streams, stream, epoch + 1, seed)
            if piece.epoch == epoch
            for place in places(piece, sizes)
        ]
        for stream in range(streams)
    ]


def every_sample(sizes: Sequence[int]) -> Counter[Place]:
    """Each sample once."""
    return Counter((shard, ordinal) for shard, size in enumerate(sizes) for ordinal in range(size))


sizes_of_shards = st.lists(st.integers(0, 40), min_size=1, max_size=9).filter(any)
numbers_of_streams = st.one_of(st.integers(1, 12), st.just(64))


@settings(max_examples=300, deadline=None)
@given(sizes=sizes_of_shards, streams=numbers_of_streams, epoch=st.integers(0, 5), seed=st.integers(0, 3))
@example(sizes=[3], streams=64, epoch=0, seed=0)
@example(sizes=[0, 1, 0], streams=64, epoch=5, seed=0)
def test_an_epoch_has_each_sample_once_in_runs_that_differ_by_at_most_one(
    sizes: list[int], streams: int, epoch: int, seed: int
) -> None:
    runs = epoch_runs(sizes, streams, epoch, seed=seed)

    assert Counter(place for run in runs for place in run) == every_sample(sizes)
    assert max(map(len, runs)) - min(map(len, runs)) <= 1


@settings(max_examples=200, deadline=None)
@given(sizes=sizes_of_shards, streams=numbers_of_streams, epoch=st.integers(0, 3))
@example(sizes=[5], streams=64, epoch=1)
def test_an_epoch_has_each_sample_once_where_no_sidecar_tells_how_many_there_are(
    sizes: list[int], streams: int, epoch: int
) -> None:
    runs = epoch_runs(sizes, streams, epoch, known=False)

    assert Counter(place for run in runs for place in run) == every_sample(sizes)
    # Whole shards if there are enough of them.
    cut = [
        piece
        for stream in range(streams)
        for piece in pieces(shards_of(sizes, known=False), streams, stream, 1)
        if piece.step > 1
    ]
    assert bool(cut) == (len(sizes) < streams)


@settings(max_examples=100, deadline=None)
@given(sizes=sizes_of_shards, streams=numbers_of_streams, epoch=st.integers(0, 5))
def test_the_order_of_an_epoch_does_not_depend_on_the_number_of_streams(
    sizes: list[int], streams: int, epoch: int
) -> None:
    runs = epoch_runs(sizes, streams, epoch)
    in_order = [place for part in range(streams) for place in runs[(part - epoch) % streams]]

    assert in_order == epoch_runs(sizes, 1, epoch)[0]


@settings(max_examples=100, deadline=None)
@given(sizes=sizes_of_shards, streams=numbers_of_streams, known=st.booleans())
def test_no_slice_is_empty_or_beyond_its_shard_where_sizes_are_known(
    sizes: list[int], streams: int, known: bool
) -> None:
    for stream in range(streams):
        for piece in pieces(shards_of(sizes, known=known), streams, stream, 2):
            if known:
                assert piece.stop is not None
                assert 0 <= piece.start < piece.stop <= sizes[piece.shard]
            else:
                assert piece.stop is None
                assert 0 <= piece.start < piece.step


def test_the_order_of_a_small_table_literally() -> None:
    shards = shards_of([5, 7, 11])
    walked = [
        [(piece.epoch, piece.shard, piece.start, piece.stop) for piece in pieces(shards, 4, stream, 3)]
        for stream in range(4)
    ]

    # 23 samples in runs of 5, 6, 6, 6; the orders of the shards are (1, 2, 0), (0, 1, 2), (1, 0, 2).
    # A change here is a change of every run that is being resumed: a new version of the state.
    assert walked == [
        [(0, 1, 0, 5), (1, 1, 0, 6), (2, 0, 4, 5), (2, 2, 0, 5)],
        [(0, 1, 5, 7), (0, 2, 0, 4), (1, 1, 6, 7), (1, 2, 0, 5), (2, 2, 5, 11)],
        [(0, 2, 4, 10), (1, 2, 5, 11), (2, 1, 0, 5)],
        [(0, 2, 10, 11), (0, 0, 0, 5), (1, 0, 0, 5), (2, 1, 5, 7), (2, 0, 0, 4)],
    ]


def test_the_order_of_a_table_without_sizes_literally() -> None:
    def walked(streams: int) -> list[list[tuple[int, int, int]]]:
        shards = shards_of([5, 7, 11], known=False)
        return [
            [(piece.shard, piece.start, piece.step) for piece in pieces(shards, streams, stream, 1)]
            for stream in range(streams)
        ]

    assert walked(2) == [[(1, 0, 1), (0, 0, 1)], [(2, 0, 1)]]
    assert walked(4) == [
        [(1, 0, 4), (2, 3, 4), (0, 2, 4)],
        [(1, 1, 4), (2, 0, 4), (0, 3, 4)],
        [(1, 2, 4), (2, 1, 4), (0, 0, 4)],
        [(1, 3, 4), (2, 2, 4), (0, 1, 4)],
    ]


def test_c05_two_epochs_differ_in_order_and_one_that_is_replayed_does_not() -> None:
    sizes = [4] * 6
    first, second, again = (epoch_runs(sizes, 2, epoch) for epoch in (0, 1, 0))

    assert first != second
    assert first == again
    assert Counter(first[0] + first[1]) == Counter(second[0] + second[1]) == every_sample(sizes)


def test_orders_differ_by_seed_and_by_group() -> None:
    shards = shards_of([1] * 20)

    def order(seed: int, group: str) -> list[int]:
        walk = walk_epochs(shards, seed=seed, group=group)
        return [piece.shard for piece in takewhile(lambda piece: piece.epoch == 0, walk)]

    orders = [order(0, "a"), order(1, "a"), order(0, "b")]
    assert [sorted(found) for found in orders] == [list(range(20))] * 3
    assert len(set(map(tuple, orders))) == 3
    assert order(0, "a") == orders[0]


def test_an_empty_run_moves_on_to_the_next_epoch_and_streams_take_turns_at_them() -> None:
    shards = shards_of([2])
    first = [pieces(shards, 64, stream, 64)[0] for stream in range(64)]

    # Two of 64 runs hold a sample, the 32nd and the last; a stream comes to one of them within 32 epochs.
    assert [piece.epoch for piece in first] == [(31 - stream) % 32 for stream in range(64)]
    assert {(piece.start, piece.stop) for piece in first} == {(0, 1), (1, 2)}


@pytest.mark.parametrize("shards", [[], shards_of([0, 0])])
def test_a_group_without_a_sample_is_an_error_that_names_it(shards: list[Shard]) -> None:
    with pytest.raises(ConfigError, match=rf"group 'vlm_sft' has no sample in its {len(shards)} shards"):
        next(walk_epochs(shards, seed=0, group="vlm_sft"))


def test_a_slice_says_where_it_comes_from() -> None:
    shard = Shard("a/b.tar", dataset="seed", samples=3, index_url="a/b.idx.parquet")
    [piece] = pieces([shard], 1, 0, 1)

    assert piece == ShardSlice(0, "a/b.tar", "seed", "a/b.idx.parquet", epoch=0, start=0, stop=3, step=1)


def test_samples_are_counted_only_if_every_shard_tells() -> None:
    assert count_samples(shards_of([2, 0, 5])) == 7
    assert count_samples([]) == 0
    assert count_samples([*shards_of([2]), Shard("x.tar")]) is None


# On disk


def make_shards(folder: Path, sizes: Sequence[int], *, indexed: Sequence[int] = ()) -> list[str]:
    """Shards of so many samples each; some of them with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    urls, start = [], 0
    for number, size in enumerate(sizes):
        url = write_tar(folder / f"t2i-{number:03d}.tar", map(t2i_sample, range(start, start + size)))
        start += size
        urls.append(url)
        if number in indexed:
            places = [sample["__ref__"] for sample in walk_shard(url)]
            table = pa.table({"offset": [offset for offset, _ in places]})
            pq.write_table(table, url.removesuffix(".tar") + ".idx.parquet")
    return urls


def make_manifest(folder: Path, sizes: Sequence[int], **more: Any) -> str:
    """A manifest of those shards, as the shard format has it."""
    entries = [
        {"url": f"t2i-{number:03d}.tar", "nsamples": size, **more} for number, size in enumerate(sizes)
    ]
    path = folder / "manifest.json"
    path.write_text(
        json.dumps({"__kind__": "wids-shard-index-v1", "format_version": 1, "shardlist": entries})
    )
    return str(path)


def test_a_folder_a_pattern_a_list_and_a_tar_name_the_same_shards(tmp_path: Path) -> None:
    urls = make_shards(tmp_path / "in", [1, 2, 3], indexed=[0, 1, 2])
    folder = str(tmp_path / "in")
    expected = [
        Shard(url, "seed", size, url.removesuffix(".tar") + ".idx.parquet")
        for url, size in zip(urls, [1, 2, 3], strict=True)
    ]

    assert list_shards(folder, "seed") == expected
    assert list_shards(folder + "/t2i-{000..002}.tar", "seed") == expected
    assert list_shards(urls, "seed") == expected
    assert list_shards([urls[0], folder + "/t2i-00{1,2}.tar"], "seed") == expected
    assert list_shards(urls[2], "seed") == expected[2:]
    assert [shard.url for shard in list_shards(f"file://{folder}")] == [f"file://{url}" for url in urls]
    assert next(walk_shard(f"file://{urls[0]}"))["__key__"] == "t2i-0"


def test_shards_without_sidecars_are_listed_without_a_count(tmp_path: Path) -> None:
    urls = make_shards(tmp_path, [1, 2])

    assert list_shards(str(tmp_path)) == [Shard(url) for url in urls]
    assert count_samples(list_shards(str(tmp_path))) is None


def test_a_manifest_tells_counts_and_indexes_relative_to_itself(tmp_path: Path) -> None:
    urls = make_shards(tmp_path, [1, 2])
    manifest = make_manifest(tmp_path, [1, 2], index="x.idx.parquet", filesize=10240)
    expected = [
        Shard(url, "d", size, str(tmp_path / "x.idx.parquet"), bytes=10240)
        for url, size in zip(urls, (1, 2), strict=True)
    ]

    assert list_shards(manifest, "d") == expected
    assert list_shards(str(tmp_path), "d") == expected
    # Shards named one by one find the manifest beside them.
    assert list_shards(urls[1], "d") == expected[1:]


@given(
    folder=st.sampled_from(
        ["", "/", ".", "a", "/a b/", "file:///a b", "s3://b", "s3://b/a%20b", "https://h/a?token=x"]
    ),
    name=st.from_regex(r"[a./%? -]{1,6}|[A-Za-z0-9_.-]{1,9}", fullmatch=True),
)
def test_shards_of_a_manifest_are_joined_as_any_name_is(folder: str, name: str) -> None:
    def joined(join: Callable[[str], str]) -> str:
        try:
            return join(name)
        except ConfigError as error:
            return str(error)

    assert joined(shards._under(folder)) == joined(partial(storage.join, folder))


def test_relative_names_find_their_manifest_however_they_are_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_shards(tmp_path, [1, 2])
    make_manifest(tmp_path, [1, 2])
    monkeypatch.chdir(tmp_path)

    for name in ("t2i-001.tar", "./t2i-001.tar", f"../{tmp_path.name}//t2i-001.tar"):
        assert list_shards(name) == [Shard(name, samples=2)]
    assert [shard.samples for shard in list_shards("manifest.json")] == [1, 2]
    assert [shard.samples for shard in list_shards(".")] == [1, 2]


@pytest.mark.filterwarnings("ignore:String specifications")
def test_what_wids_reads_is_a_manifest(tmp_path: Path) -> None:
    urls = make_shards(tmp_path, [1, 2])
    index = {
        "wids_version": 1,
        "shardlist": [
            {"url": Path(url).name, "nsamples": size} for url, size in zip(urls, (1, 2), strict=True)
        ],
    }
    path = tmp_path / "index.json"
    path.write_text(json.dumps(index))

    assert list_shards(str(path)) == [
        Shard(url, samples=size) for url, size in zip(urls, (1, 2), strict=True)
    ]
    assert len(wids.ShardListDataset(str(path))) == 3


def test_folders_in_folders_are_searched_and_hidden_files_are_not_shards(tmp_path: Path) -> None:
    make_shards(tmp_path / "b", [1])
    make_shards(tmp_path / "a", [1])
    (tmp_path / "a" / "._t2i-000.tar").write_bytes(b"macOS")
    (tmp_path / "a" / ".t2i-001.tar.partial-7").write_bytes(b"unfinished")
    (tmp_path / "notes.txt").write_text("hello")

    listed = [Path(shard.url).relative_to(tmp_path).as_posix() for shard in list_shards(str(tmp_path))]
    assert listed == ["a/t2i-000.tar", "b/t2i-000.tar"]


@pytest.mark.parametrize("streams", [1, 3, 8, 64])
@pytest.mark.parametrize("indexed", [[], [0, 1, 2], [1]], ids=["no index", "all indexed", "one indexed"])
def test_streams_that_read_real_shards_meet_each_sample_once(
    tmp_path: Path, streams: int, indexed: list[int]
) -> None:
    make_shards(tmp_path, [5, 2, 7], indexed=indexed)
    shards = list_shards(str(tmp_path))
    met = Counter(
        sample["__key__"]
        for stream in range(streams)
        for piece in pieces(shards, streams, stream, 1)
        for sample in walk_slice(piece.url, piece.start, piece.stop, piece.step, piece.index_url)
    )

    assert met == Counter(f"t2i-{number}" for number in range(14))


def test_c01_a_pattern_that_matches_nothing_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_shards(tmp_path, [1])
    pattern = f"{tmp_path}/t2i-{{000..003}}.tar"

    with pytest.raises(ConfigError) as error:
        list_shards(pattern)
    assert str(error.value) == f"{pattern}: 3 of 4 shards are not there, the first is {tmp_path}/t2i-001.tar"


def test_c01_a_folder_without_shards_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")

    with pytest.raises(ConfigError, match=f"{tmp_path}: no manifest.json and no .tar file in this folder"):
        list_shards(str(tmp_path))


def test_c01_a_shard_that_the_manifest_names_and_nobody_copied_is_an_error_at_once(tmp_path: Path) -> None:
    urls = make_shards(tmp_path, [1, 2])
    manifest = make_manifest(tmp_path, [1, 2])
    Path(urls[1]).unlink()

    for spec in (manifest, str(tmp_path)):
        with pytest.raises(
            ConfigError, match=f"{manifest}: 1 of 2 shards are not there, the first is {urls[1]}"
        ):
            list_shards(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "a shard entry is empty"),
        ("nowhere/t2i-000.tar", "1 of 1 shards are not there"),
        ("nowhere/t2i-*.tar", "1 of 1 shards are not there"),
        ("t2i-{000..", "the braces of this pattern do not match"),
        ("nowhere/manifest.json", "the manifest cannot be read"),
        ("ftp://host/t2i-{000..003}.tar", "ftp:// is not read; there are paths, file://, s3://"),
        ("s3:///t2i-000.tar", "names no bucket"),
        ("pipe:cat t2i-000.tar", "pipe: URLs run a shell command and are refused"),
    ],
)
def test_c01_what_cannot_be_listed_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, says: str
) -> None:
    make_shards(tmp_path, [1])
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=says) as error:
        list_shards(spec)
    assert spec in str(error.value)
    with pytest.raises(ConfigError, match=says):
        list_shards(["t2i-000.tar", spec])


def test_a_folder_in_place_of_a_shard_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a-0.tar").mkdir()
    (tmp_path / "a-1.tar").mkdir()

    with pytest.raises(ConfigError, match="2 of 2 shards are not there"):
        list_shards(f"{tmp_path}/a-{{0,1}}.tar")


def test_a_broken_index_is_an_error_that_names_it(tmp_path: Path) -> None:
    make_shards(tmp_path, [1])
    (tmp_path / "t2i-000.idx.parquet").write_bytes(b"PAR1 is no index")

    with pytest.raises(ShardError, match=r"t2i-000\.idx\.parquet: the index cannot be read"):
        list_shards(str(tmp_path))
