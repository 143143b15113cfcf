"""Conversions from and to a bucket, on a real store: the bytes of the disk, whatever happens on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import pytest
from fault_proxy import Answer, Cut, FaultProxy, FileServer, Rule
from kill_points import Conversion
from s3_store import ACCESS_KEY, SECRET_KEY
from source_factory import Corpus, captions, encode_image, talk, write_corpus, write_jsonl, write_t2i
from video_factory import clip

from bagel_wds import storage
from bagel_wds.converters import Limit, Mode, ShardSettings, convert_mixture, convert_source
from bagel_wds.errors import ConfigError, QuarantineLimitError, ShardError
from bagel_wds.sources import Source, list_files, plan_source
from bagel_wds.verify import verify_shards
from converters.claim import Claim, hold_output
from converters.slices import SliceWork

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fault_proxy import Exchange, Fault
    from s3_store import S3Store

FIVE_A_SHARD = ShardSettings(shard_samples=5)


@pytest.fixture(autouse=True)
def _the_environment_names_the_store(s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Corpus]:
    root = tmp_path_factory.mktemp("corpus")
    return root, write_corpus(root)


def held(out: str | Path) -> dict[str, bytes]:
    """Every file under a folder of the disk or of a bucket."""
    return {name: storage.read_bytes(storage.join(out, name)) for name in storage.list_files(out)}


def upload(folder: Path, url: str) -> None:
    for name in storage.list_files(folder):
        storage.write_bytes(storage.join(url, name), (folder / name).read_bytes())


def moved(source: Source, folder: Path, url: str) -> Source:
    """The same source in a bucket."""
    assert isinstance(source.path, str)
    media_root = source.media_root and source.media_root.replace(str(folder), url)
    return replace(source, path=source.path.replace(str(folder), url), media_root=media_root)


def write_rows(folder: Path, num_rows: int = 30, size: int = 0) -> Source:
    rows = [
        (b"no image" if i % 11 == 5 else encode_image(seed=i) + bytes(size), captions(i))
        for i in range(num_rows)
    ]
    write_t2i(folder / "a.parquet", rows, group_rows=15)
    return Source(kind="t2i", name="x", path=str(folder))


class WatchedProxy(FaultProxy):
    """A proxy that does something when the n-th request comes, before it goes on."""

    def __init__(self, upstream: str, at: int = 0, do: Callable[[], None] = lambda: None) -> None:
        super().__init__(upstream)
        self.at = at
        self.do = do

    def fault_of(self, exchange: Exchange, end: int | None) -> Fault | None:
        fault = super().fault_of(exchange, end)
        if len(self.log) == self.at:
            self.do()
        return fault


# The same bytes


@pytest.mark.parametrize("shuffle", [None, 3])
@pytest.mark.parametrize("kind", ["t2i", "edit", "vlm"])
def test_from_bucket_to_bucket_is_as_from_disk_to_disk(
    corpus: tuple[Path, Corpus],
    tmp_path: Path,
    s3_folder: str,
    s3_store: S3Store,
    kind: str,
    shuffle: int | None,
) -> None:
    folder, sources = corpus
    begun = s3_store.unfinished_uploads()
    source: Source = getattr(sources, kind)
    settings = replace(FIVE_A_SHARD, shuffle=shuffle)
    upload(folder, f"{s3_folder}/in")
    done = convert_source(source, str(tmp_path), settings=settings)

    there = convert_source(moved(source, folder, f"{s3_folder}/in"), f"{s3_folder}/out", settings=settings)

    assert held(f"{s3_folder}/out") == held(tmp_path)
    assert there == replace(done, manifest=f"{s3_folder}/out/manifest.json")
    assert done.num_shards > 1
    assert done.counts.quarantined > 0
    found = verify_shards(f"{s3_folder}/out")
    assert (found.faults, found.notes, found.num_shards) == ((), (), done.num_shards)
    assert s3_store.unfinished_uploads() == begun
    again = convert_source(moved(source, folder, f"{s3_folder}/in"), f"{s3_folder}/out", settings=settings)
    assert again.was_complete


def test_no_output_names_a_credential_or_a_bucket(corpus: tuple[Path, Corpus], s3_folder: str) -> None:
    folder, sources = corpus
    upload(folder, f"{s3_folder}/in")
    convert_source(moved(sources.vlm, folder, f"{s3_folder}/in"), f"{s3_folder}/out", settings=FIVE_A_SHARD)

    for name, data in held(f"{s3_folder}/out").items():
        for secret in (ACCESS_KEY, SECRET_KEY, s3_folder, "127.0.0.1"):
            assert secret.encode() not in data, (name, secret)


def test_adding_retrying_and_overwriting_work_as_on_disk(tmp_path: Path, s3_folder: str) -> None:
    source = write_rows(tmp_path / "in")
    outs = (str(tmp_path / "out"), f"{s3_folder}/out")

    def convert(mode: Mode, **changes: Any) -> None:
        for out in outs:
            convert_source(replace(source, **changes), out, settings=FIVE_A_SHARD, mode=mode)
        assert held(outs[0]) == held(outs[1])

    for out in outs:
        with pytest.raises(QuarantineLimitError, match="image_unreadable"):
            convert_source(source, out, settings=FIVE_A_SHARD, limit=Limit(rows=1))
    assert held(outs[0]).keys() - {".conversion/lock"} == held(outs[1]).keys()
    convert(Mode.CONVERT)
    write_t2i(tmp_path / "in" / "b.parquet", [(encode_image(seed=99), captions(99)), (b"", captions(1))])
    with pytest.raises(ConfigError, match="pass --append to add them"):
        convert(Mode.CONVERT)
    convert(Mode.APPEND)
    assert len(storage.list_files(outs[1])) > 12
    convert(Mode.RETRY, verify="none")
    source = write_rows(tmp_path / "in", 7)
    convert(Mode.OVERWRITE)
    assert sum(name.endswith(".tar") for name in storage.list_files(outs[1])) == 2


def test_a_shard_of_many_parts_is_the_one_of_the_disk_and_an_error_leaves_none_of_them(
    tmp_path: Path, s3_folder: str, s3_store: S3Store
) -> None:
    source = write_rows(tmp_path / "in", 24, size=1_000_000)
    begun = s3_store.unfinished_uploads()
    convert_source(source, str(tmp_path / "out"))
    convert_source(source, f"{s3_folder}/out")
    assert held(f"{s3_folder}/out") == held(tmp_path / "out")
    assert storage.size(f"{s3_folder}/out/x-000000-000.tar") > 2 * 8 << 20

    (tmp_path / "in" / "a.parquet").write_bytes((tmp_path / "in" / "a.parquet").read_bytes()[:-9] + bytes(9))
    with pytest.raises(ConfigError, match="cannot be read as parquet"):
        convert_source(source, f"{s3_folder}/broken")
    assert storage.list_files(f"{s3_folder}/broken") == []
    assert s3_store.unfinished_uploads() == begun


def test_a_mixture_in_a_bucket_becomes_a_dataset_info_there(
    corpus: tuple[Path, Corpus], tmp_path: Path, s3_folder: str
) -> None:
    folder, _ = corpus
    upload(folder, f"{s3_folder}/in")
    sizes = {"image_stride": 16, "max_image_size": 64, "min_image_size": 32}
    groups = {
        "t2i_pretrain": {"dataset_names": ["t2i"], "image_transform_args": sizes},
        "vlm_sft": {"dataset_names": ["vlm"], "image_transform_args": sizes},
    }
    info = {
        "t2i_pretrain": {"t2i": {"data_dir": "t2i"}},
        "vlm_sft": {"vlm": {"data_dir": "vlm/media", "jsonl_path": "vlm/train.jsonl"}},
    }
    for name, value in (("mix.json", groups), ("info.json", info)):
        storage.write_bytes(f"{s3_folder}/in/{name}", json.dumps(value).encode())
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(json.dumps(value).encode())
    for name in ("t2i", "vlm"):
        (tmp_path / "in" / name).symlink_to(folder / name)

    for root in (str(tmp_path), s3_folder):
        for _ in range(2):
            done = convert_mixture(
                f"{root}/in/mix.json", f"{root}/in/info.json", f"{root}/out", settings=FIVE_A_SHARD
            )
    assert done.info_path == f"{s3_folder}/out/dataset_info.yaml"
    assert [dataset.was_complete for dataset in done.datasets] == [True, True]

    there, here = held(f"{s3_folder}/out"), held(tmp_path / "out")
    written = here.pop("dataset_info.yaml").replace(str(tmp_path).encode(), s3_folder.encode())
    assert there.pop("dataset_info.yaml") == written
    assert there == here
    assert verify_shards(f"{s3_folder}/out/t2i_pretrain/t2i").faults == ()


def test_the_command_converts_in_several_processes(
    corpus: tuple[Path, Corpus], tmp_path: Path, s3_folder: str
) -> None:
    folder, sources = corpus
    upload(folder, f"{s3_folder}/in")
    settings = ShardSettings(shard_samples=3)
    convert_source(replace(sources.edit, name="x"), str(tmp_path / "out"), settings=settings)
    places = [
        f"{s3_folder}/in/edit/**/*.parquet",
        f"{s3_folder}/in/edit/gone{{,s}}.parquet",
        f"{s3_folder}/out",
    ]
    command = [sys.executable, "-m", "bagel_wds.converters", "edit"]

    # The environment is that of the test.
    refused = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    options = ["--name", "x", "--shard-samples", "3", "--processes", "2"]
    done = subprocess.run(
        [*command, places[0], places[2], *options], capture_output=True, text=True, check=False
    )

    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("gone.parquet: no such file or folder")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{{x: {{shards: '{s3_folder}/out/manifest.json'}}}}" in done.stdout
    assert SECRET_KEY not in done.stdout + refused.stderr
    # Its root is that of the pattern, with which the keys of the folder agree.
    assert held(f"{s3_folder}/out") == held(tmp_path / "out")


# Where a source lies


def test_places_in_a_bucket_name_the_files_that_they_name_on_disk(tmp_path: Path, s3_folder: str) -> None:
    for name in (
        "a.parquet",
        "b 1.parquet",
        "deep/c%41.parquet",
        "deep/er/d.parquet",
        ".hidden/e.parquet",
        "f.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (tmp_path / "f.txt").write_text("deep/c%41.parquet\na.parquet\n")
    (tmp_path / "g.json").write_text('{"deep/er/d.parquet": {}}')
    (tmp_path / "far.txt").write_text(f"{s3_folder}/a.parquet\n{s3_folder}/deep/er/d.parquet\n")
    upload(tmp_path, s3_folder)
    places = ("", "/", "/a.parquet", "/*.parquet", "/?.parquet", "/**/*.parquet", "/deep/**", "/d*", "/deep/*/*.parquet",
              "/{a,b 1}.parquet", "/deep{,/er}/*.parquet", "/f.txt", "/g.json")  # fmt: skip

    for place in places:
        on_disk = Source(kind="t2i", name="x", path=f"{tmp_path}{place}")
        in_bucket = replace(on_disk, path=f"{s3_folder}{place}")
        assert list_files(in_bucket) == list_files(on_disk), place
        assert in_bucket.root == on_disk.root.replace(str(tmp_path), s3_folder), place
    several = Source(kind="t2i", name="x", path=(f"{s3_folder}/deep/er", f"{s3_folder}/a.parquet"))
    assert list_files(several) == ["a.parquet", "deep/er/d.parquet"]
    assert list_files(replace(several, path=str(tmp_path / "far.txt"))) == ["a.parquet", "deep/er/d.parquet"]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("{s3}/gone", "gone: no such file or folder"),
        ("{s3}/*.parquet", "no file matches this pattern"),
        ("{s3}/a{{0..2}}.parquet", "no such file or folder"),
        (("{s3}", "{disk}"), "have no folder in common"),
        ("https://host/a.parquet?X-Amz-Signature=00secret", "a URL with a query cannot be a source"),
    ],
)
def test_a_place_that_will_not_do_is_an_error_that_says_why(
    tmp_path: Path, s3_folder: str, place: str | tuple[str, ...], why: str
) -> None:
    storage.write_bytes(f"{s3_folder}/x.txt", b"x")
    names = {"s3": s3_folder, "disk": str(tmp_path)}
    path = place.format(**names) if isinstance(place, str) else tuple(one.format(**names) for one in place)

    with pytest.raises(ConfigError, match=why) as caught:
        list_files(Source(kind="t2i", name="x", path=path))

    assert "00secret" not in str(caught.value)


def test_a_file_of_a_web_server_is_read_as_that_of_the_disk(tmp_path: Path) -> None:
    write_rows(tmp_path / "in")
    (tmp_path / "in" / "a.parquet").rename(tmp_path / "in" / "a %41.parquet")
    on_disk = Source(kind="t2i", name="x", path=str(tmp_path / "in"))
    convert_source(on_disk, str(tmp_path / "out"), settings=FIVE_A_SHARD)

    with FileServer(tmp_path) as server:
        url = f"http://{server.address}/in"
        convert_source(
            replace(on_disk, path=f"{url}/a%20%2541.parquet"), str(tmp_path / "again"), settings=FIVE_A_SHARD
        )
        with pytest.raises(ConfigError, match="read only and cannot be listed"):
            list_files(replace(on_disk, path=f"{url}/*.parquet"))

    here, again = held(tmp_path / "out"), held(tmp_path / "again")
    assert again == here


def test_sizes_are_listed_and_files_removed_together(tmp_path: Path, s3_folder: str) -> None:
    for number in range(3):
        (tmp_path / f"{number}").write_bytes(bytes(number))
    upload(tmp_path, s3_folder)

    for folder in (str(tmp_path), s3_folder):
        assert storage.list_sizes(folder) == {"0": 0, "1": 1, "2": 2}
        storage.remove_files(folder, ["0", "2", "gone"])
        storage.remove_files(folder, [])
        assert storage.list_sizes(folder) == {"1": 1}


def test_media_in_a_bucket_get_the_verdicts_that_they_get_on_disk(tmp_path: Path, s3_folder: str) -> None:
    image = encode_image()
    for name in ("a.png", "sub/b 1.png", "ü%41.png", "clip/f_2.png", "clip/f_10.png", "clip/notes.txt"):
        path = tmp_path / "in" / "media" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    (tmp_path / "in" / "media" / "empty.png").write_bytes(b"")
    (tmp_path / "in" / "media" / "clip.mp4").write_bytes(clip())
    (tmp_path / "in" / "secret.png").write_bytes(image)
    images = ["a.png", "./sub//b 1.png", "ü%41.png", "sub", "gone.png", "empty.png", "/etc/x.png", "../secret.png", "",
              "s3://bucket/a.png", "a.png/x", "x\n.png", "x\0.png", "." , "n" * 2000 + ".png"]  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"image": name, "conversations": talk("<image>q", "a") if name else talk()} for name in images
    ]
    clips = ["clip", "clip/", "clip.mp4", "gone", "a.png", "sub/b 1.png", "../media/clip"]
    rows += [{"video": name, "conversations": talk("<video>q", "a")} for name in clips]
    write_jsonl(tmp_path / "in" / "rows.jsonl", rows)
    upload(tmp_path / "in", f"{s3_folder}/in")
    source = Source(
        kind="vlm",
        name="x",
        path=str(tmp_path / "in" / "rows.jsonl"),
        media_root=str(tmp_path / "in" / "media"),
    )

    for outside in (False, True):
        on_disk, in_bucket = tmp_path / f"out-{outside}", f"{s3_folder}/out-{outside}"
        of = replace(source, allow_outside=outside)
        convert_source(of, str(on_disk))
        convert_source(moved(of, tmp_path / "in", f"{s3_folder}/in"), in_bucket)
        there, here = held(in_bucket), held(on_disk)
        told = [
            {line["row"]: line["reason"] for line in map(json.loads, files["quarantine.jsonl"].splitlines())}
            for files in (there, here)
        ]
        if outside:
            # A bucket has no root of a disk that such a path could begin at.
            assert (told[0].pop(6), told[1].pop(6)) == ("path_outside", "image_missing")
        assert told[0] == told[1]
        assert len(told[0]) == (12 if outside else 15)
        assert there["x-000000-000.tar"] == here["x-000000-000.tar"]
        assert b".0.mp4" in here["x-000000-000.tar"]


def test_a_store_that_refuses_a_medium_stops_the_conversion_instead_of_leaving_rows_out(
    corpus: tuple[Path, Corpus], s3_folder: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sources = corpus
    upload(folder, f"{s3_folder}/in")
    with FaultProxy(s3_store.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.rules.append(
            Rule(Answer(403, b"<Error><Code>AccessDenied</Code></Error>"), path="media/5", times=None)
        )
        with pytest.raises(ShardError, match="access is refused") as caught:
            convert_source(moved(sources.vlm, folder, f"{s3_folder}/in"), f"{s3_folder}/out")

    assert "slice 0 (14 lines" in str(caught.value)
    assert "run it again" in str(caught.value)


# Stopped on the way


def convert_at(endpoint: str, conversion: Conversion) -> None:
    """In a process of its own, whose environment is that of the tests' start."""
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
    conversion()


def kill_at_request(number: int, store: S3Store, conversion: Conversion) -> bool:
    """Run a conversion in a process that is killed when it makes its n-th request, which the store still gets.

    Returns:
        whether it was killed, and had not ended before.
    """
    with WatchedProxy(store.endpoint, number) as proxy:
        process = get_context("forkserver").Process(target=convert_at, args=(proxy.url, conversion))
        proxy.do = process.kill
        process.start()
        process.join(120)
    return process.exitcode == -signal.SIGKILL


def count_requests(store: S3Store, convert: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    with WatchedProxy(store.endpoint) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        convert()
        return len(proxy.log)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [None, 3], ids=["plain", "shuffled"])
def test_c24_a_conversion_killed_at_any_request_ends_as_an_unbroken_one(
    tmp_path: Path, s3_folder: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, shuffle: int | None
) -> None:
    source = write_rows(tmp_path / "in")
    settings = ShardSettings(shard_samples=8, shuffle=shuffle)
    convert_source(source, str(tmp_path / "out"), settings=settings)
    expected = held(tmp_path / "out")
    counted = Conversion(source, f"{s3_folder}/counted", settings)
    total = count_requests(s3_store, counted, monkeypatch)
    assert total < 200

    for number in range(4):
        point = 5 + number * (total - 6) // 3
        conversion = Conversion(source, f"{s3_folder}/out-{point}", settings)
        assert kill_at_request(point, s3_store, conversion), f"it ended before request {point} of {total}"
        partly = held(conversion.out)
        shards = {name: data for name, data in partly.items() if "/" not in name and name.endswith(".tar")}
        assert shards.items() <= expected.items(), "a partial shard under a final name"
        conversion()
        assert held(conversion.out) == expected, f"killed at request {point} of {total}"


def test_parts_of_a_shard_whose_run_was_killed_are_no_shard(
    tmp_path: Path, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_store.make_bucket("killed")
    source = write_rows(tmp_path / "in", 24, size=1_000_000)
    convert_source(source, str(tmp_path / "out"))
    conversion = Conversion(source, "s3://killed/out", ShardSettings())
    with WatchedProxy(s3_store.endpoint) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        convert_source(source, "s3://killed/counted")
        at = next(number for number, seen in enumerate(proxy.log, 1) if "partNumber=2" in seen.path)

    assert kill_at_request(at, s3_store, conversion)
    assert not any(name.endswith(".tar") for name in held(conversion.out))
    # They are the bucket's to drop: see docs/conversion.md.
    assert s3_store.unfinished_uploads("killed") == 1
    conversion()
    assert held(conversion.out) == held(tmp_path / "out")


def test_a_conversion_outlives_a_store_that_is_killed(
    tmp_path: Path, s3_folder: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in", 24, size=1_000_000)
    upload(tmp_path / "in", f"{s3_folder}/in")
    settings = ShardSettings(shard_bytes=10_000_000)
    convert_source(source, str(tmp_path / "out"), settings=settings)

    def restart() -> None:
        s3_store.kill()
        assert s3_store.start()

    for at in (30, 50):
        out = f"{s3_folder}/out-{at}"
        with WatchedProxy(s3_store.endpoint, at, restart) as proxy, monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL", proxy.url)
            convert_source(moved(source, tmp_path / "in", f"{s3_folder}/in"), out, settings=settings)
            assert len(proxy.log) > at
        assert held(out) == held(tmp_path / "out")


# Two at once


def tell_life(out: str, process: Any = None, renewed: int = 0, number: int = 1) -> None:
    """What a run on another machine leaves in a bucket."""
    content = {"run": "another", "renewed": renewed, "process": process}
    storage.write_bytes(f"{out}/.conversion/locks/{number:06d}", json.dumps(content).encode())


def test_of_two_runs_at_once_one_is_refused_and_nothing_is_spoiled(tmp_path: Path, s3_folder: str) -> None:
    source = write_rows(tmp_path / "in")
    with hold_output(s3_folder) as claim:
        with pytest.raises(
            ConfigError, match=rf"another process \(id {os.getpid()}\) is converting into this folder"
        ):
            convert_source(source, s3_folder)
        assert claim is not None
        claim.confirm()
        assert storage.list_files(s3_folder) == [".conversion/locks/000001"]

    assert storage.list_files(s3_folder) == []


def test_a_run_that_could_not_give_up_its_claim_is_not_in_the_way_of_the_next_of_its_process(
    s3_store: S3Store, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3_store.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with hold_output(s3_folder):
            # As with credentials that have expired.
            proxy.rules = [
                Rule(Answer(403), method=method, times=None) for method in ("GET", "HEAD", "PUT", "POST")
            ]
        proxy.rules.clear()
        assert storage.list_files(s3_folder) == [".conversion/locks/000001"]
        with hold_output(s3_folder) as claim:
            assert claim is not None
            assert claim.number == 2

        assert storage.list_files(s3_folder) == []


def test_answers_that_break_off_do_not_end_a_conversion(
    tmp_path: Path, s3_store: S3Store, s3_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in")
    convert_source(source, str(tmp_path / "out"), settings=FIVE_A_SHARD)
    with FaultProxy(s3_store.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.rules = [
            Rule(Cut(20), r"list-type=2.*locks", after=8),
            Rule(Cut(0), r"\?delete", method="POST"),
        ]
        convert_source(source, s3_folder, settings=FIVE_A_SHARD)

        assert [rule.met for rule in proxy.rules] == [1, 1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_store.endpoint)
    assert held(s3_folder) == held(tmp_path / "out")


def test_only_one_of_many_gets_a_folder(s3_folder: str) -> None:
    gate = threading.Barrier(8)
    ended = threading.Event()
    got: list[bool] = []

    def run() -> None:
        gate.wait()
        try:
            with hold_output(s3_folder):
                got.append(True)
                ended.wait(60)
        except ConfigError:
            got.append(False)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while len(got) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    ended.set()
    for thread in threads:
        thread.join()

    assert sorted(got) == [False] * 7 + [True]


def test_a_run_of_another_machine_that_shows_life_is_not_disturbed(s3_folder: str) -> None:
    tell_life(s3_folder)
    ended = threading.Event()

    def renew() -> None:
        renewed = 0
        while not ended.wait(0.02):
            renewed += 1
            tell_life(s3_folder, renewed=renewed)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with (
            pytest.raises(ConfigError, match="another run is converting into this folder"),
            hold_output(s3_folder, renew_seconds=0.1, patience_seconds=60),
        ):
            pass
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("process", [None, ["another boot", "pid:[1]", "0", "1", "1"]])
def test_a_run_of_another_machine_that_shows_no_life_is_taken_over_from(
    s3_folder: str, process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tell_life(s3_folder, process)
    lost = Claim(s3_folder, 1, "another")
    lost.confirm()

    with hold_output(s3_folder, renew_seconds=0.05, patience_seconds=0.2) as claim:
        assert claim is not None
        assert claim.number == 2
        with pytest.raises(ConfigError, match="another run took over this folder"):
            lost.confirm()

    assert "counts as dead if it gives no sign of life for 0.2 seconds" in caplog.text
    assert storage.list_files(s3_folder) == []


def test_what_is_no_claim_is_an_error_that_says_what_to_do(s3_folder: str) -> None:
    storage.write_bytes(f"{s3_folder}/.conversion/locks/000007", b"{}")

    with (
        pytest.raises(ConfigError, match=r"000007: no claim .*; remove it if no run"),
        hold_output(s3_folder),
    ):
        pass


def test_a_claim_is_renewed(s3_folder: str) -> None:
    url = f"{s3_folder}/.conversion/locks/000001"
    with hold_output(s3_folder, renew_seconds=0.01):
        deadline = time.monotonic() + 60
        while json.loads(storage.read_bytes(url))["renewed"] < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert json.loads(storage.read_bytes(url))["renewed"] >= 3


def test_a_run_that_was_taken_over_from_writes_no_shard_any_more(
    tmp_path: Path, s3_folder: str, s3_store: S3Store
) -> None:
    source = write_rows(tmp_path / "in", 24, size=1_000_000)
    begun = s3_store.unfinished_uploads()
    tell_life(s3_folder)
    cut = plan_source(source, slice_bytes=1 << 30, slice_rows=100)
    work = SliceWork(source, s3_folder, ShardSettings(), claim=Claim(s3_folder, 1, "another"))

    with hold_output(s3_folder, renew_seconds=0.01, patience_seconds=0.05):
        with pytest.raises(ConfigError, match="another run took over"):
            work(cut.slices[0], lambda *_: None)
        assert storage.list_files(s3_folder) == [".conversion/locks/000001", ".conversion/locks/000002"]

    assert s3_store.unfinished_uploads() == begun


def test_a_web_server_and_a_folder_in_the_source_are_no_output(tmp_path: Path, s3_folder: str) -> None:
    storage.write_bytes(f"{s3_folder}/in/a.parquet", b"x")
    in_bucket = Source(kind="t2i", name="x", path=f"{s3_folder}/in")
    for out, why in (
        ("https://host/out", "a web server is not written to"),
        (f"{s3_folder}/in/out", "lies in the source"),
        (f"{s3_folder}/in/a.parquet", "is a file; give a folder"),
    ):
        with pytest.raises(ConfigError, match=why):
            convert_source(in_bucket, out)
