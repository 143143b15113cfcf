"""Training from a bucket: the batches of the disk, in few requests, and nothing told that opens it."""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
import pytest
import yaml
from fault_proxy import FaultProxy, FileServer
from golden_data import tokenizer
from obstore.store import S3Store as Client
from s3_store import BUCKET
from shard_factory import MIXTURE, SPECIAL_TOKENS, foreign_shards, small_config
from source_factory import write_corpus
from test_datasets import digest
from test_reader import write_index
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from bagel_wds import ConfigError, PackedLoader, collate_wrapper, storage
from bagel_wds.cli import app
from bagel_wds.converters import ShardSettings, convert_source
from bagel_wds.groups import find_shards
from bagel_wds.shards import list_shards
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from s3_store import S3Store

    from bagel_wds import PackedDataset

GROUPS = {"t2i_pretrain": MIXTURE["t2i_pretrain"], "unified_edit": MIXTURE["unified_edit"]}
TIMEOUT = 300
"""Seconds for a batch, after which a worker that hangs is an error; a busy machine takes its time to start one."""
SIZES = {"t2i_pretrain": [9, 7, 8, 6], "unified_edit": [6, 9]}


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups on the disk, each a folder of tars with indexes and a manifest."""
    root = tmp_path_factory.mktemp("corpus")
    for group, sizes in SIZES.items():
        (root / group).mkdir()
        entries = []
        for path, size in zip(foreign_shards(root / group, group, sizes), sizes, strict=True):
            index = Path(write_index(path))
            entries.append({"url": Path(path).name, "nsamples": size, "index": index.name})
        (root / group / "manifest.json").write_text(json.dumps({"shardlist": entries}))
    return root


@pytest.fixture(scope="module")
def bucket(disk: Path, s3_store: S3Store) -> str:
    """The same in a bucket."""
    for name in storage.list_files(disk):
        storage.write_bytes(f"s3://{BUCKET}/corpus/{name}", (disk / name).read_bytes(), s3_store.options)
    return f"s3://{BUCKET}/corpus"


@pytest.fixture
def proxy(s3_store: S3Store) -> Iterator[FaultProxy]:
    """It counts what passes."""
    with FaultProxy(s3_store.endpoint.removeprefix("http://")) as proxy:
        yield proxy


def info_of(root: object) -> dict[str, Any]:
    return {
        group: {GROUPS[group]["dataset_names"][0]: {"shards": f"{root}/{group}/manifest.json"}}
        for group in GROUPS
    }


def build(root: object, options: StorageOptions | None = None, **more: Any) -> PackedDataset:
    settings = {
        "dataset_info": info_of(root),
        "grouped_datasets": GROUPS,
        "num_streams": 2,
        "storage": options,
        **more,
    }
    return small_config(**settings).build(tokenizer(), SPECIAL_TOKENS, 0, 1, 0, global_seed=3)


def take(loader: PackedLoader, count: int) -> list[str]:
    return [digest(batch.to_dict()) for batch in islice(loader, count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_bucket_are_those_of_the_disk(
    disk: Path, bucket: str, s3_store: S3Store, workers: int
) -> None:
    from_disk = take(PackedLoader(build(disk)), 16)
    # The parent has listed the bucket; a worker that hangs is an error after the time-out.
    options: dict[str, Any] = {"timeout": TIMEOUT} if workers else {}
    loader = PackedLoader(build(bucket, s3_store.options), workers, **options)

    assert take(loader, 16) == from_disk
    assert len(set(from_disk)) == 16


@pytest.mark.parametrize("settings", [{"read_ahead_bytes": 0}, {"read_ahead_bytes": 300_000}, {}])
def test_batches_do_not_depend_on_read_ahead_or_cache(
    disk: Path, bucket: str, s3_store: S3Store, tmp_path: Path, settings: dict[str, int]
) -> None:
    options = replace(s3_store.options, cache_dir=str(tmp_path), cache_bytes=1 << 30)
    from_disk = take(PackedLoader(build(disk)), 16)
    for stored in (s3_store.options, options, options):
        assert take(PackedLoader(build(bucket, stored, **settings)), 16) == from_disk
    # Nothing is kept of what is not read ahead.
    assert bool(list(tmp_path.rglob("*.shard"))) == (settings.get("read_ahead_bytes") != 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_the_disk_goes_on_from_a_bucket_and_back(
    disk: Path, bucket: str, s3_store: S3Store, workers: int
) -> None:
    unbroken = take(PackedLoader(build(disk)), 14)
    loader = PackedLoader(build(disk))
    batches = take(loader, 5)
    in_bucket = build(bucket, s3_store.options)
    options: dict[str, Any] = {"timeout": TIMEOUT} if workers else {}
    for own, count in ((PackedLoader(in_bucket, workers, **options), 4), (PackedLoader(build(disk)), 5)):
        own.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        loader = own
        batches += take(loader, count)

    assert batches == unbroken


def test_a_resume_reads_what_the_buffers_hold_and_no_more(
    disk: Path, bucket: str, s3_store: S3Store, proxy: FaultProxy
) -> None:
    through = StorageOptions(endpoint=proxy.url, allow_http=True)
    loader = PackedLoader(build(bucket, s3_store.options, num_streams=1))
    take(loader, 6)
    state = loader.state_dict()
    unbroken = take(loader, 1)
    resumed = PackedLoader(build(bucket, through, num_streams=1))
    resumed.load_state_dict(state)
    asked_to_build = len(proxy.log)
    assert take(resumed, 1) == unbroken

    reads = [seen for seen in proxy.log[asked_to_build:] if seen.path.partition("?")[0].endswith(".tar")]
    held = sum(
        len(group["shuffled"][0])
        for stream in state["streams"].values()
        for group in stream["groups"].values()
    )
    total = sum(path.stat().st_size for path in disk.rglob("*.tar"))
    epochs = 1 + max(
        group["cursor"][0] for stream in state["streams"].values() for group in stream["groups"].values()
    )
    # A read for each stretch of samples in a buffer at the most, and one to go on in each group: whatever the position.
    assert held > 0
    assert 0 < len(reads) <= held + 2 * len(GROUPS) + 8
    assert sum(seen.sent for seen in reads) < total * epochs / 2
    # The listing: info is inline, so a manifest a group, and its first and last shard looked for.
    assert asked_to_build == 3 * len(GROUPS)


def test_shards_are_named_in_every_way(disk: Path, bucket: str, s3_store: S3Store, s3_folder: str) -> None:
    options = s3_store.options
    folder = f"{bucket}/t2i_pretrain"
    names = [f"t2i_pretrain-{number}.tar" for number in range(4)]
    by_manifest = list_shards(f"{folder}/manifest.json", options=options)
    assert [shard.url for shard in by_manifest] == [f"{folder}/{name}" for name in names]
    assert [shard.samples for shard in by_manifest] == SIZES["t2i_pretrain"]
    for spec in (
        folder,
        f"{folder}/",
        f"{folder}/t2i_pretrain-{{0..3}}.tar",
        [f"{folder}/{name}" for name in names],
    ):
        assert list_shards(spec, options=options) == by_manifest, spec
    # Without a manifest the prefix is listed, and the indexes count.
    for name in [*names, *(name.replace(".tar", ".idx.parquet") for name in names)]:
        storage.write_bytes(f"{s3_folder}/{name}", (disk / "t2i_pretrain" / name).read_bytes(), options)
    listed = list_shards(s3_folder, options=options)
    assert [shard.url for shard in listed] == [f"{s3_folder}/{name}" for name in names]
    assert [shard.samples for shard in listed] == SIZES["t2i_pretrain"]
    assert list_shards(f"{s3_folder}/t2i_pretrain-{{0..3}}.tar", options=options) == listed


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("s3://tests/corpus/t2i_pretrain/t2i_pretrain-{0..9}.tar", "6 of 10 shards are not there"),
        ("s3://tests/corpus/nothing", "1 of 1 shards are not there"),
        ("s3://tests/corpus/none/manifest.json", "the manifest cannot be read: .*no such object"),
        ("s3://nobucket/corpus", "there is no bucket 'nobucket'"),
        ("ftp://tests/corpus", "ftp:// is not read"),
    ],
)
def test_what_is_not_there_is_told_by_its_name(bucket: str, s3_store: S3Store, spec: str, why: str) -> None:
    assert bucket
    with pytest.raises(ConfigError, match=why):
        list_shards(spec, options=s3_store.options)


def test_settings_files_may_lie_in_a_bucket(bucket: str, s3_store: S3Store, s3_folder: str) -> None:
    info: dict[str, Any] = {
        group: {GROUPS[group]["dataset_names"][0]: {"shards": f"{group}/manifest.json"}} for group in GROUPS
    }
    storage.write_bytes(f"{bucket}/dataset_info.yaml", yaml.safe_dump(info).encode(), s3_store.options)
    storage.write_bytes(f"{s3_folder}/mixture.json", json.dumps(GROUPS).encode(), s3_store.options)
    config = small_config(
        grouped_datasets=None,
        grouped_datasets_path=f"{s3_folder}/mixture.json",
        dataset_info_path=f"{bucket}/dataset_info.yaml",
        storage={"endpoint": s3_store.endpoint, "allow_http": True},
    )

    found = find_shards(config)
    assert {group: [shard.samples for shard in shards] for group, shards in found.items()} == SIZES
    assert found["unified_edit"][0].url == f"{bucket}/unified_edit/unified_edit-0.tar"


def test_show_reads_a_bucket(bucket: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    for path in (f"{bucket}/t2i_pretrain", f"{bucket}/t2i_pretrain/t2i_pretrain-0.tar"):
        shown = CliRunner().invoke(app, ["show", path])
        assert shown.exit_code == 0, shown.output
        assert f"samples      {30 if path.endswith('pretrain') else 9}" in shown.output
    shown = CliRunner().invoke(app, ["show", f"{bucket}/t2i_pretrain", "--key", "t2i-11"])
    assert "picture 11" in shown.output
    missing = CliRunner().invoke(app, ["show", "s3://nobucket/x"])
    assert missing.exit_code == 2
    assert "there is no bucket 'nobucket'" in missing.stderr


@pytest.fixture
def signed(disk: Path, bucket: str, s3_store: S3Store) -> Callable[[], dict[str, Any]]:
    """Makes dataset info of presigned URLs, anew each time."""
    client = Client(BUCKET, endpoint=s3_store.endpoint, client_options={"allow_http": True})
    hours = iter(range(1, 100))

    def sign() -> dict[str, Any]:
        until = timedelta(hours=next(hours))
        return {
            group: {
                GROUPS[group]["dataset_names"][0]: {
                    "shards": [
                        obstore.sign(client, "GET", f"corpus/{group}/{path.name}", until)
                        for path in sorted((disk / group).glob("*.tar"))
                    ]
                }
            }
            for group in GROUPS
        }

    assert bucket
    return sign


def test_presigned_shards_are_read_and_their_signatures_kept_to_themselves(
    disk: Path, signed: Callable[[], dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for group in GROUPS:
        shutil.copytree(disk / group, tmp_path / group, ignore=shutil.ignore_patterns("*.json", "*.parquet"))
    plain = {
        group: {GROUPS[group]["dataset_names"][0]: {"shards": str(tmp_path / group)}} for group in GROUPS
    }
    unbroken = take(PackedLoader(build(disk, dataset_info=plain)), 10)
    loader = PackedLoader(build(disk, dataset_info=signed()))
    batches = take(loader, 5)
    state = json.dumps(loader.state_dict())
    # The next day they are signed anew.
    loader = PackedLoader(build(disk, dataset_info=signed()))
    loader.load_state_dict(json.loads(state))
    batches += take(loader, 5)

    assert batches == unbroken
    assert caplog.text
    config = small_config(grouped_datasets=GROUPS, dataset_info=signed())
    for text in (state, caplog.text, repr(find_shards(config)), repr(config)):
        assert not re.search(r"X-Amz-Signature=(?!\*\*\*)|testkey", text)


def test_an_expired_signature_is_an_error_that_does_not_tell_it(
    signed: Callable[[], dict[str, Any]], disk: Path
) -> None:
    wrong = json.loads(json.dumps(signed()).replace("X-Amz-Signature=", "X-Amz-Signature=0"))
    with pytest.raises(ConfigError, match="access is refused") as caught:
        build(disk, dataset_info=wrong)
    assert "t2i_pretrain-0.tar" in str(caught.value)
    assert "X-Amz" not in "".join(map(str, (caught.value, caught.value.__cause__, caught.value.__context__)))


def test_forked_workers_are_refused_and_do_not_hang(bucket: str, s3_store: S3Store) -> None:
    loader: DataLoader[Any] = DataLoader(
        build(bucket, s3_store.options),
        batch_size=1,
        num_workers=1,
        collate_fn=collate_wrapper(),
        multiprocessing_context="fork",
        timeout=TIMEOUT,
    )
    with pytest.raises(
        ConfigError, match="start workers with multiprocessing_context='forkserver' or 'spawn'"
    ):
        next(iter(loader))


def test_the_storage_setting_holds_no_credential() -> None:
    for key in ("secret_access_key", "access_key_id", "session_token", "password", "sas_token"):
        with pytest.raises(ConfigError, match="looks like a credential") as caught:
            small_config(storage={key: "do-not-tell"})
        assert "do-not-tell" not in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean 'endpoint'"):
        small_config(storage={"endpoin": "https://s3.example.org"})
    with pytest.raises(ConfigError, match="is no URL of a server"):
        small_config(storage={"endpoint": "s3.example.org"})
    config = small_config(storage={"endpoint": "https://s3.example.org", "retries": 3})
    assert config.storage_options == StorageOptions(endpoint="https://s3.example.org", retries=3)
    assert pickle.loads(pickle.dumps(config)).storage_options == config.storage_options
    assert small_config().storage_options is None


def test_shards_on_a_web_server_are_read_but_not_listed(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "bare folder").mkdir()
    for path in (disk / "t2i_pretrain").glob("*.tar"):
        shutil.copy(path, tmp_path / "bare folder")
    with FileServer(disk) as server, FileServer(tmp_path) as bare:
        root = f"http://{server.address}"
        by_manifest = list_shards(f"{root}/t2i_pretrain/manifest.json")
        for spec in (
            f"{root}/t2i_pretrain",
            f"{root}/t2i_pretrain/",
            f"{root}/t2i_pretrain/t2i_pretrain-{{0..3}}.tar",
        ):
            assert list_shards(spec) == by_manifest
        assert [shard.samples for shard in by_manifest] == SIZES["t2i_pretrain"]
        with pytest.raises(ConfigError, match=r"a web server is not listed, and has no manifest\.json here"):
            list_shards(f"http://{bare.address}/bare%20folder/")
        with pytest.raises(ConfigError, match="10 shards are not there"):
            list_shards(f"http://{bare.address}/bare%20folder/t2i_pretrain-{{10..19}}.tar")
        one = list_shards(f"http://{bare.address}/bare%20folder/t2i_pretrain-1.tar")
        assert [(shard.samples, shard.index_url) for shard in one] == [(None, None)]
        info = {group: {GROUPS[group]["dataset_names"][0]: {"shards": f"{root}/{group}"}} for group in GROUPS}

        assert take(PackedLoader(build(disk, dataset_info=info)), 8) == take(PackedLoader(build(disk)), 8)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_other_stores_are_reached_by_their_own_requests(
    disk: Path, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reads of a public bucket are plain GETs of /BUCKET/KEY, which a server of files answers.
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    with FileServer(disk) as server:
        options = StorageOptions(endpoint=f"http://{server.address}", allow_http=True, anonymous=True)
        url = f"{scheme}://t2i_pretrain/manifest.json"
        assert storage.read_bytes(url, options) == (disk / "t2i_pretrain" / "manifest.json").read_bytes()
        assert (
            storage.read_range(f"{scheme}://t2i_pretrain/t2i_pretrain-0.tar", 512, 5, options)
            == (disk / "t2i_pretrain" / "t2i_pretrain-0.tar").read_bytes()[512:517]
        )
        with pytest.raises(FileNotFoundError, match=f"{scheme}://t2i_pretrain/none"):
            storage.read_bytes(f"{scheme}://t2i_pretrain/none", options)


def test_a_store_that_lacks_a_setting_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"az://container: this store cannot be opened: .*Account must be specified"
    ):
        list_shards("az://container/folder")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/none.json")
    with pytest.raises(ConfigError, match=r"gs://bucket: this store cannot be opened: .*/none\.json"):
        list_shards("gs://bucket/folder")


def test_a_converted_dataset_is_shown_and_verified_in_a_bucket(
    s3_store: S3Store, s3_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = next(source for source in write_corpus(tmp_path / "sources").sources if source.kind == "t2i")
    convert_source(
        source, str(tmp_path / "out" / "t2i"), settings=ShardSettings(shard_bytes=20_480, shard_samples=4)
    )
    info = {"t2i_pretrain": {"pictures": {"shards": "t2i/manifest.json"}}}
    (tmp_path / "out" / "dataset_info.yaml").write_text(yaml.safe_dump(info))
    for name in storage.list_files(tmp_path / "out"):
        storage.write_bytes(f"{s3_folder}/{name}", (tmp_path / "out" / name).read_bytes(), s3_store.options)
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words])
        return done.exit_code, done.output

    on_disk = run("show", str(tmp_path / "out"))
    assert on_disk[0] == 0
    for place in (s3_folder, f"{s3_folder}/dataset_info.yaml"):
        assert run("show", place) == on_disk
        status, told = run("verify", place, "--processes", "1")
        assert (status, told.count(": sound;")) == (0, 1), told
    first = next(name for name in storage.list_files(f"{s3_folder}/t2i") if name.endswith(".tar"))
    storage.write_bytes(f"{s3_folder}/t2i/{first}", b"<html>sorry</html>")
    status, told = run("verify", f"{s3_folder}/t2i", "--processes", "1")
    assert status == 1
    assert first in told
