"""A small HTTP proxy that fails on purpose, between a client and a real store.

    with FaultProxy("127.0.0.1:8333") as proxy:
        proxy.rules.append(Rule(Cut(at=70_000), path="a.tar", times=2))
        ...                         # the client's endpoint is proxy.url
        assert proxy.count("a.tar") == 3

Requests go on with their `Host` as it came, so that a signature over it still holds: S3 clients take the proxy as their
endpoint, path-style. Offsets are those of the object, whatever range was asked for.
"""

from __future__ import annotations

import http.client
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CHUNK = 64 << 10


@dataclass(frozen=True)
class Cut:
    """The connection is closed before byte `at` of the object; only a response that reaches it counts."""

    at: int


@dataclass(frozen=True)
class Stall:
    """Nothing more is sent from byte `at` of the object on, and the connection stays open."""

    at: int = 0


@dataclass(frozen=True)
class Answer:
    """Another answer than the store's, which is not asked."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class WrongLength:
    """`Content-Length` is so much more or less than what comes."""

    by: int


@dataclass(frozen=True)
class Slow:
    """So many bytes a second, and so many seconds before the first."""

    bytes_per_second: float = float("inf")
    latency: float = 0.0


@dataclass(frozen=True)
class Without:
    """Some headers of the answer are left out; their names are in small letters."""

    headers: tuple[str, ...]


Fault = Cut | Stall | Answer | WrongLength | Slow | Without


@dataclass
class Rule:
    """Which requests meet a fault.

    Attributes:
        fault: what happens to them.
        path: pattern that is searched for in the path and query.
        method: of the request.
        after: so many matching requests go through first.
        times: so many meet the fault after that; None is all of them.
        met: how many have met it.
    """

    fault: Fault
    path: str = ""
    method: str = "GET"
    after: int = 0
    times: int | None = 1
    met: int = 0

    def take(self, method: str, path: str, start: int, end: int | None) -> bool:
        """Whether a request for these bytes meets the fault now; it is then counted."""
        if method != self.method or not re.search(self.path, path):
            return False
        if isinstance(self.fault, Cut | Stall) and not (
            start <= self.fault.at and (end is None or self.fault.at < end)
        ):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None and self.met >= self.times:
            return False
        self.met += 1
        return True


@dataclass
class Exchange:
    """One request as the proxy saw it.

    Attributes:
        method, path: of the request, the query with the path.
        start: first byte of the object that was asked for.
        status: that was sent.
        sent: bytes of the body that were sent.
        headers: of the request, with lower-case names.
        broken: the store, or the client, went away before the end.
    """

    method: str
    path: str
    start: int
    headers: dict[str, str]
    status: int = 0
    sent: int = 0
    broken: bool = False


class _Served:
    """A server in a thread, on a free port; a context manager.

    Attributes:
        address: host and port.
    """

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self._server = _Server(("127.0.0.1", 0), handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class FaultProxy(_Served):
    """The proxy, on a free port of the loopback; a context manager.

    Args:
        upstream: host and port of the store.

    Attributes:
        url: where it listens.
        rules: the first that matches a request is the one that it meets.
        log: every request so far.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://")
        self.rules: list[Rule] = []
        self.log: list[Exchange] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        super().__init__(type("Handler", (_Handler,), {"proxy": self}))
        self.url = f"http://{self.address}"

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        super().__exit__(*error)

    def fault_of(self, exchange: Exchange, end: int | None) -> Fault | None:
        """Log a request, and tell what happens to it."""
        with self._lock:
            self.log.append(exchange)
            for rule in self.rules:
                if rule.take(exchange.method, exchange.path, exchange.start, end):
                    return rule.fault
        return None

    def count(self, path: str = "", method: str = "GET") -> int:
        """How many requests there were of a path that matches."""
        return len(self.of(path, method))

    def of(self, path: str = "", method: str = "GET") -> list[Exchange]:
        """The requests of a path that matches."""
        with self._lock:
            return [seen for seen in self.log if seen.method == method and re.search(path, seen.path)]

    def sent(self, path: str = "") -> int:
        """How many bytes were sent in answer to them."""
        return sum(seen.sent for seen in self.of(path))


class FileServer(_Served):
    """A plain HTTP server of a folder, with ranges and entity tags, on a free port; a context manager.

    Args:
        folder: that is served.

    Attributes:
        address: host and port.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(type("Handler", (_FileHandler,), {"folder": folder}))


class _FileHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Nothing on standard error."""

    def do_GET(self) -> None:
        path = self.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            self._send(404)
            return
        stat = path.stat()
        tag = f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"'
        if self.headers.get("if-match") not in (None, tag):
            self._send(412)
            return
        start, end = _range_of(self.headers.get("range", ""))
        if "range" in self.headers and start >= stat.st_size:
            self._send(416, {"Content-Range": f"bytes */{stat.st_size}"})
            return
        end = min(stat.st_size if end is None else end, stat.st_size)
        headers = {
            "ETag": tag,
            "Accept-Ranges": "bytes",
            "Last-Modified": self.date_time_string(int(stat.st_mtime)),
        }
        if "range" in self.headers:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{stat.st_size}"
        with path.open("rb") as file:
            file.seek(start)
            self._send(206 if "range" in self.headers else 200, headers, file, end - start)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def _send(
        self,
        status: int,
        headers: Mapping[str, str] = MappingProxyType({}),
        file: BinaryIO | None = None,
        length: int = 0,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        while file is not None and length and self.command != "HEAD":
            data = file.read(min(length, CHUNK))
            self.wfile.write(data)
            length -= len(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: FaultProxy

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Nothing on standard error."""

    def _serve(self) -> None:
        start, end = _range_of(self.headers.get("range", ""))
        exchange = Exchange(
            self.command, self.path, start, {name.lower(): value for name, value in self.headers.items()}
        )
        fault = self.proxy.fault_of(exchange, end)
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if isinstance(fault, Answer):
            self._answer(fault, exchange)
            return
        if isinstance(fault, Slow):
            self.proxy.closing.wait(fault.latency)
        try:
            self._forward(fault, exchange, body)
        except (OSError, http.client.HTTPException):
            # The store, or the client, is gone: the other side sees a connection that ends.
            self.close_connection = exchange.broken = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - the library's names

    def _answer(self, answer: Answer, exchange: Exchange) -> None:
        exchange.status = answer.status
        self.send_response_only(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
            exchange.sent = len(answer.body)

    def _forward(self, fault: Fault | None, exchange: Exchange, body: bytes) -> None:
        store = http.client.HTTPConnection(self.proxy.upstream, timeout=60)
        try:
            store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("connection", "expect"):
                    store.putheader(name, value)
            store.putheader("Connection", "close")
            store.endheaders(body)
            response = store.getresponse()
            exchange.status = response.status
            self.send_response_only(response.status)
            length = response.getheader("Content-Length")
            for name, value in response.getheaders():
                left_out = fault.headers if isinstance(fault, Without) else ()
                if name.lower() not in ("connection", "content-length", "transfer-encoding", *left_out):
                    self.send_header(name, value)
            if length is None:
                self.close_connection = True
                self.send_header("Connection", "close")
            else:
                wrong = fault.by if isinstance(fault, WrongLength) else 0
                self.close_connection |= bool(wrong)
                self.send_header("Content-Length", str(int(length) + wrong))
            self.end_headers()
            if self.command != "HEAD":
                start = exchange.start if response.status == 206 else 0
                self._send(response, fault, exchange, start)
        finally:
            store.close()

    def _send(
        self, response: http.client.HTTPResponse, fault: Fault | None, exchange: Exchange, offset: int
    ) -> None:
        stop = fault.at if isinstance(fault, Cut | Stall) and exchange.status < 300 else None
        for data in _pieces(response, fault):
            whole = stop is None or offset + len(data) <= stop
            part = data if whole else data[: stop - offset] if stop is not None else data
            self.wfile.write(part)
            exchange.sent += len(part)
            offset += len(part)
            if isinstance(fault, Slow):
                self.proxy.closing.wait(len(part) / fault.bytes_per_second)
            if not whole or self.proxy.closing.is_set():
                self._end(fault)
                return

    def _end(self, fault: Fault | None) -> None:
        self.wfile.flush()
        self.close_connection = True
        if isinstance(fault, Stall):
            self.connection.settimeout(0.05)
            while not self.proxy.closing.is_set():
                try:
                    if not self.connection.recv(1):
                        return
                except TimeoutError:
                    continue
        self.connection.shutdown(socket.SHUT_RDWR)


def _pieces(response: http.client.HTTPResponse, fault: Fault | None) -> Iterator[bytes]:
    size = CHUNK
    if isinstance(fault, Slow) and fault.bytes_per_second < float("inf"):
        size = max(1, int(fault.bytes_per_second / 20))
    while data := response.read(size):
        yield data


def _range_of(header: str) -> tuple[int, int | None]:
    """(start, end) of a `Range` header; the end is None where it is the object's."""
    found = re.fullmatch(r"bytes=(\d+)-(\d*)", header)
    if not found:
        return 0, None
    return int(found[1]), int(found[2]) + 1 if found[2] else None


def main() -> None:
    """Serve a folder by a slow network until standard input ends: FOLDER LATENCY_SECONDS BYTES_PER_SECOND."""
    folder, latency, rate = sys.argv[1:]
    with FileServer(Path(folder)) as server, FaultProxy(server.address) as proxy:
        proxy.rules.append(Rule(Slow(float(rate), float(latency)), times=None))
        sys.stdout.write(f"{proxy.url}\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
