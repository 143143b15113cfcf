"""A store that answers wrongly, or not at all: requests are made again, Ctrl-C is heeded, and errors say what to do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from fault_proxy import Answer, Cut, FaultProxy, FileServer, Rule, Slow, Stall, Without

from bagel_wds import storage
from bagel_wds.errors import ConfigError
from bagel_wds.prefetch import Lane, ReadAhead
from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from s3_store import S3Store

HTML = Answer(200, b"<html>please log in</html>")


@pytest.fixture
def proxy(s3_store: S3Store) -> Iterator[FaultProxy]:
    with FaultProxy(s3_store.endpoint) as between:
        yield between


def through(proxy: FaultProxy, retries: int = 3) -> StorageOptions:
    return StorageOptions(endpoint=proxy.url, allow_http=True, retries=retries, timeout_seconds=1)


def code(name: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{name}</Code><Message>m</Message></Error>'.encode()


# Requests that are made again


@pytest.mark.parametrize("call", [storage.list_files, storage.list_folder, storage.is_folder])
def test_a_list_that_breaks_off_is_asked_for_again(
    s3_folder: str, proxy: FaultProxy, call: Callable[[str, StorageOptions], Any]
) -> None:
    options = through(proxy)
    storage.write_bytes(f"{s3_folder}/a", b"0", options)
    proxy.rules = [Rule(fault, r"list-type=2") for fault in (Cut(0), Cut(40), Stall(40))]

    assert call(s3_folder, options) in (["a"], True)
    assert [rule.met for rule in proxy.rules] == [1, 1, 1]


def test_a_list_that_always_breaks_off_is_one_error_after_as_many_tries_as_the_settings_say(
    s3_folder: str, proxy: FaultProxy
) -> None:
    storage.write_bytes(f"{s3_folder}/a", b"0", through(proxy))
    for fault in (Cut(0), Answer(503)):
        proxy.log.clear()
        proxy.rules = [Rule(fault, r"list-type=2", times=None)]
        with pytest.raises(OSError, match=rf"{s3_folder}: the store cannot be asked: .*; check the network"):
            storage.list_files(s3_folder, through(proxy, retries=2))
        assert proxy.count("list-type=2") == 3


def test_an_answer_that_is_no_list_does_not_end_one(s3_folder: str, proxy: FaultProxy) -> None:
    options = through(proxy)
    names = [f"{number}.tar" for number in range(3)]
    for name in names:
        storage.write_bytes(f"{s3_folder}/{name}", b"0", options)
    for answer in (HTML, Answer(200, code("InternalError"))):
        for after in (0, 1):
            proxy.rules = [rule := Rule(answer, r"list-type=2", after=after)]
            assert storage.list_files(s3_folder, options) == names
            assert rule.met == 1


def test_a_removal_whose_answer_is_cut_is_made_again(s3_folder: str, proxy: FaultProxy) -> None:
    options = through(proxy)
    for name in "ab":
        storage.write_bytes(f"{s3_folder}/{name}", b"0", options)
    proxy.rules.append(rule := Rule(Cut(0), r"\?delete", method="POST"))
    storage.remove_files(s3_folder, ["a", "b"], options)

    assert rule.met == 1
    assert storage.list_files(s3_folder, options) == []


@pytest.mark.parametrize("step", [r"\?uploads", r"uploadId="])
def test_an_upload_whose_first_or_last_answer_is_cut_is_there(
    s3_folder: str, proxy: FaultProxy, step: str
) -> None:
    options, data = through(proxy), random.Random(0).randbytes(20 << 20)
    storage.write_bytes(f"{s3_folder}/a", bytes(len(data)), options)
    proxy.rules.append(rule := Rule(Cut(0), step, method="POST"))
    with storage.open_write(f"{s3_folder}/a", options) as file:
        file.write(data)

    assert rule.met == 1
    assert storage.read_bytes(f"{s3_folder}/a", options) == data


def test_an_upload_that_is_not_completed_is_an_error_though_an_object_of_its_size_is_there(
    s3_folder: str, proxy: FaultProxy
) -> None:
    options, old = through(proxy), bytes(9 << 20)
    storage.write_bytes(f"{s3_folder}/a", old, options)
    proxy.rules.append(Rule(Answer(404, code("NoSuchUpload")), "uploadId=", method="POST"))
    with pytest.raises(OSError, match="NoSuchUpload"), storage.open_write(f"{s3_folder}/a", options) as file:
        file.write(b"1" * len(old))

    assert storage.read_bytes(f"{s3_folder}/a", options) == old


def test_a_store_without_conditional_writes_is_told_so(s3_folder: str, proxy: FaultProxy) -> None:
    proxy.rules.append(Rule(Answer(501, code("NotImplemented")), method="PUT"))
    with pytest.raises(OSError, match=rf"{s3_folder}/a: the store has no conditional writes"):
        storage.create(f"{s3_folder}/a", b"0", through(proxy))


# Ctrl-C


def write_parts(url: str, options: StorageOptions) -> None:
    with storage.open_write(url, options) as file:
        file.write(bytes(9 << 20))


CALLS: dict[str, Callable[[str, StorageOptions], Any]] = {
    "list": storage.list_files,
    "look": storage.size,
    "look for many": lambda url, options: storage.which_are_files([f"{url}{i}" for i in range(4)], options),
    "write": lambda url, options: storage.write_bytes(url, b"0", options),
    "write parts": write_parts,
    "remove": storage.remove,
    "read": storage.read_bytes,
}


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """As a program in the foreground does; one that a shell has put into the background heeds none."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("what", CALLS)
def test_ctrl_c_ends_a_wait_for_a_silent_store(what: str) -> None:
    with FaultProxy("127.0.0.1:1") as silent:
        for method in ("GET", "HEAD", "PUT", "POST", "DELETE"):
            silent.rules.append(Rule(Slow(latency=1000), method=method, times=None))
        options = StorageOptions(endpoint=silent.url, allow_http=True)
        asked = threading.Thread(target=interrupt_once_asked, args=(silent,))
        asked.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            CALLS[what]("s3://tests/a", options)
        took = time.monotonic() - began
        asked.join()

    # The request alone would take 60 seconds, and then be made again.
    assert took < 20


def interrupt_once_asked(proxy: FaultProxy) -> None:
    while not proxy.log:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_ends_a_command_that_waits_for_a_silent_store(s3_store: S3Store) -> None:
    with FaultProxy("127.0.0.1:1") as silent:
        silent.rules.append(Rule(Slow(latency=1000), times=None))
        running = subprocess.Popen(
            [sys.executable, "-c", "from bagel_wds.cli import app; app()", "show", "s3://tests/a.tar"],
            env=os.environ | s3_store.environment | {"AWS_ENDPOINT_URL": silent.url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while not silent.log:
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        out, told = running.communicate(timeout=30)

    assert (running.returncode, out) == (130, b"")
    assert b"Traceback" not in told


# What is told


SIGNED = "http://me:00secret@{}/a.tar?X-Amz-Signature=00secret"


def test_an_error_and_its_causes_have_nothing_that_opens_the_object() -> None:
    with FaultProxy("127.0.0.1:1") as proxy:
        options = StorageOptions(retries=1)
        # With nobody behind it, it closes the connection without an answer.
        for fault in (None, Answer(302, headers={"Location": "/a.tar?token=00secret"}), Answer(503)):
            proxy.rules = [Rule(fault, times=None)] if fault else []
            for call in (storage.read_bytes, storage.size, storage.is_file):
                with pytest.raises(OSError, match=r"2 tries brought no more, the last: \w") as caught:
                    call(SIGNED.format(proxy.address), options)
                told = "".join(traceback.format_exception(caught.value))
                assert "TransientError" in told
                assert "00secret" not in told


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (Answer(301, code("PermanentRedirect")), OSError, "another region .* set `region` under `storage`"),
        (Answer(400, code("AuthorizationHeaderMalformed")), OSError, "another region .* AWS_REGION"),
        (Answer(400, code("ExpiredToken")), PermissionError, "the credentials have expired"),
        (Answer(403, code("ExpiredToken")), PermissionError, "the credentials have expired"),
        (Answer(403, code("InvalidObjectState")), OSError, "the object is archived"),
    ],
)
def test_what_will_not_pass_is_told_at_once_with_what_to_do(
    s3_folder: str, proxy: FaultProxy, answer: Answer, error: type[OSError], says: str
) -> None:
    proxy.rules.append(Rule(answer, times=None))
    with pytest.raises(error, match=f"{s3_folder}/a: .*{says}"):
        storage.read_bytes(f"{s3_folder}/a", through(proxy))

    assert proxy.count() == 1


def test_a_request_that_came_too_slowly_is_made_again(s3_folder: str, proxy: FaultProxy) -> None:
    storage.write_bytes(f"{s3_folder}/a", b"0123", through(proxy))
    proxy.rules.append(rule := Rule(Answer(400, code("RequestTimeout"))))

    assert storage.read_bytes(f"{s3_folder}/a", through(proxy)) == b"0123"
    assert rule.met == 1


def test_a_page_in_place_of_an_object_of_a_bucket_is_named(s3_folder: str, proxy: FaultProxy) -> None:
    for answer, page in ((HTML, "an HTML page"), (Answer(200, code("Oops")), "an XML document")):
        proxy.rules = [Rule(answer, times=None)]
        with pytest.raises(OSError, match=f"2 tries brought no more, the last: got {page} instead of"):
            storage.read_bytes(f"{s3_folder}/a", through(proxy, retries=1))


@pytest.mark.parametrize("key", ["a//b.tar", "./b.tar", "../b.tar", "b\x7f.tar"])
def test_a_key_that_cannot_be_listed_is_named(proxy: FaultProxy, key: str) -> None:
    listed = f"""<ListBucketResult><Name>tests</Name><Prefix>p/</Prefix><KeyCount>1</KeyCount><IsTruncated>false</IsTruncated>
        <Contents><Key>p/{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>"x"</ETag><Size>1</Size></Contents>
        </ListBucketResult>"""
    proxy.rules.append(Rule(Answer(200, listed.encode()), r"list-type=2", times=None))
    for call in (storage.list_files, storage.list_folder):
        with pytest.raises(OSError, match=r"s3://tests/p: a key under it .* rename or remove") as caught:
            call("s3://tests/p", through(proxy))
        assert repr(f"p/{key}") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000", "AWS_ENDPOINT_URL in the environment is no URL of a server"),
        ("AWS_ENDPOINT_URL", "", "AWS_ENDPOINT_URL in the environment is no URL of a server"),
        ("AWS_ENDPOINT_URL", "http://[::1", "AWS_ENDPOINT_URL in the environment is no URL of a server"),
        ("AWS_SESSION_TOKEN", "00secret\n", "AWS_SESSION_TOKEN in the environment has a line end"),
        ("AWS_ACCESS_KEY_ID", "00secret\r", "AWS_ACCESS_KEY_ID in the environment has a line end"),
        ("AWS_SECRET_ACCESS_KEY", "00secret\n", "AWS_SECRET_ACCESS_KEY in the environment has a line end"),
    ],
)
def test_an_environment_that_no_request_can_be_made_of_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=says) as caught:
        storage.read_bytes("s3://tests/a")
    assert "00secret" not in str(caught.value)


# One version


@pytest.mark.parametrize("headers", [("etag",), ()])
def test_an_object_that_is_replaced_while_it_is_read_is_told_with_and_without_a_tag(
    tmp_path: Path, headers: tuple[str, ...]
) -> None:
    path, options = tmp_path / "a.tar", StorageOptions(retries=1)
    with FileServer(tmp_path) as server, FaultProxy(server.address) as proxy:
        proxy.rules.append(Rule(Without(headers), times=None))
        url = f"{proxy.url}/a.tar"
        for opened in (storage.open_read(url, options), Lane(ReadAhead(1 << 18), options)):
            path.write_bytes(b"0" * (2 << 20))
            os.utime(path, (1e9, 1e9))
            with opened as source:
                file = source.open(url, 0) if isinstance(source, Lane) else source
                assert file.read(1000) == b"0" * 1000
                path.write_bytes(b"1" * (2 << 20))
                os.utime(path, (1e9 + 1, 1e9 + 1))
                with pytest.raises(OSError, match="the object was replaced while it was being read"):
                    file.read()


def test_an_empty_file_of_a_server_without_ranges_is_empty(tmp_path: Path) -> None:
    with FaultProxy("127.0.0.1:1") as proxy:
        proxy.rules.append(Rule(Answer(200), times=None))
        assert storage.read_bytes(f"{proxy.url}/a") == b""
        assert storage.size(f"{proxy.url}/a") == 0
