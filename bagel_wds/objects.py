"""Objects of a store or a web server, by obstore: ranged reads, listing, writing.

obstore is imported when the first object is asked for, and a store is opened in the process that uses it: its client
does not live through a fork. What goes wrong is an OSError in our words; the client's own text has the URL in it, with
whatever signs it, and is not passed on.

Every read of bytes is one ranged GET made by `ask`.
"""

from __future__ import annotations

import io
import os
import re
import time
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

from bagel_wds.errors import ConfigError
from bagel_wds.redact import redact
from bagel_wds.steady import Answer, Patience, SteadyObject, TransientError, explain, name_page
from bagel_wds.storage_options import StorageOptions
from bagel_wds.urls import WEB, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from obstore.store import ObjectStore

T = TypeVar("T")

WHOLE = 1 << 62
"""An end behind that of any object."""
WRITE_BYTES = 1 << 20
"""What is written is handed on in stretches of this size."""
PART_BYTES = 8 << 20
"""An object that is written goes out in parts of this size, four at a time."""


_used_in: set[int] = set()
"""Processes, by id, in which a request was made: this one or, after a fork, its parent."""


def _store(place: Place, options: StorageOptions | None, *, tries_again: bool = True) -> ObjectStore:
    """The client of the place's bucket in this process.

    Args:
        place: of an object in it.
        options: how the store is reached.
        tries_again: it makes requests that failed anew. Not for reads: `SteadyObject` does that, and knows why.
    """
    pid = os.getpid()
    if _used_in - {pid}:
        raise ConfigError(
            f"{place.scheme}://: this process was forked from one that had read from a store already, and the store's client "
            "hangs in it; start workers with multiprocessing_context='forkserver' or 'spawn'"
        )
    _used_in.add(pid)
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "AZURE_", "GOOGLE_")))
    )
    options = options or StorageOptions()
    retries = options.retries if tries_again else 0
    try:
        return _open_store(place.scheme, place.bucket, place.query, options, retries, environment)
    except Exception as error:  # noqa: BLE001 - obstore's own classes, of which each means the same here
        why = str(error).partition("\n")[0]
    raise ConfigError(
        f"{place.scheme}://{place.bucket}: this store cannot be opened: {why}; see docs/object-storage.md for what the "
        "environment must say"
    )


@lru_cache(maxsize=64)
def _open_store(
    scheme: str,
    bucket: str,
    query: str,
    options: StorageOptions,
    retries: int,
    environment: tuple[tuple[str, str], ...],
) -> ObjectStore:
    """A client of one bucket. What the environment says is read by the client; here it is part of what it is known by."""
    del environment
    from datetime import timedelta  # noqa: PLC0415 - only where a store is used

    from obstore import store  # noqa: PLC0415 - 15 MB that local use does without

    client: dict[str, Any] = {
        "connect_timeout": _seconds(min(options.timeout_seconds, 10)),
        "read_timeout": _seconds(options.timeout_seconds),
        # Of a whole request: no part takes so long, as long as bytes keep coming.
        "timeout": _seconds(max(3600, options.timeout_seconds)),
    }
    if options.allow_http:
        client["allow_http"] = True
    retry: Any = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=max(180.0, 3 * options.timeout_seconds)),
    }
    if scheme in WEB:
        root = f"{scheme}://{bucket}/" + (f"?{query}" if query else "")
        return store.HTTPStore(
            root, client_options=cast("Any", client | {"allow_http": scheme == "http"}), retry_config=retry
        )
    if options.anonymous:
        client["skip_signature"] = True
    if scheme == "gs":
        return store.GCSStore(bucket, config=_with(client, base_url=options.endpoint), retry_config=retry)
    if scheme == "az":
        return store.AzureStore(bucket, config=_with(client, endpoint=options.endpoint), retry_config=retry)
    endpoint, hosted = options.endpoint, None if options.path_style is None else not options.path_style
    if endpoint is not None and hosted:
        head, _, host = endpoint.partition("://")
        endpoint = f"{head}://{bucket}.{host}"
    config = _with(client, endpoint=endpoint, region=options.region, virtual_hosted_style_request=hosted)
    return store.S3Store(bucket, config=config, retry_config=retry)


def _seconds(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _with(config: dict[str, Any], **more: Any) -> Any:
    return config | {name: value for name, value in more.items() if value is not None}


def name_of(place: Place) -> str:
    """A URL of the place for messages, without what signs it."""
    return redact(f"{place.scheme}://{place.bucket}/{place.key}")


class PastEndError(OSError):
    """Bytes were asked for that begin behind the object's end."""


def _attempt(place: Place, work: Callable[[], T]) -> T:
    """What some work of obstore gives; its errors in our words."""
    from obstore.exceptions import BaseError  # noqa: PLC0415

    failure: OSError | ConfigError
    try:
        return work()
    except (BaseError, ValueError, OSError) as error:
        failure = _explained(error, place)
    # Out here, so that the client's error does not hang on to ours.
    raise failure


def _explained(error: Exception, place: Place) -> OSError | ConfigError:
    name, text = name_of(place), str(error)
    if "builder error" in text and "http://" in text:
        return ConfigError(
            f"{name}: the store's endpoint is not encrypted (http://); set `allow_http: true` under `storage`, or "
            "AWS_ALLOW_HTTP=true in the environment, if that is meant"
        )
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return PermissionError(
            f"{name}: no credentials were found, and this machine has no role of its own; set them in the environment "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3://), or `anonymous: true` under `storage` for a public "
            "bucket; see docs/object-storage.md"
        )
    if "NoSuchBucket" in text:
        return FileNotFoundError(
            f"{name}: there is no bucket {place.bucket!r}; check its name and the endpoint"
        )
    if re.search(r"status code: (401|403)", text):
        error = type("PermissionDeniedError", (Exception,), {})(text)
    told = explain(error, name)
    return PastEndError(str(told)) if re.search(r"status code: 416", text) else told


def _asked(place: Place, work: Callable[[], T]) -> T:
    """The same for requests other than reads, which the client has tried again itself."""
    with _settled(place):
        return _attempt(place, work)


@contextmanager
def _settled(place: Place) -> Iterator[None]:
    """What might pass has been waited for long enough."""
    failure: TransientError | None = None
    try:
        yield
    except TransientError as error:
        failure = error
    if failure is not None:
        raise OSError(
            f"{name_of(place)}: the store cannot be asked: {failure}; check the network, the endpoint and that the store is up"
        )


def ask(place: Place, options: StorageOptions | None, start: int, end: int, tag: str | None) -> Answer:
    """One ranged GET: the bytes from `start` to before `end`, or to the object's end.

    Args:
        place: of the object.
        options: how its store is reached.
        start: first byte.
        end: behind the last byte; more than `start`.
        tag: entity tag that the object must have; None takes any.

    Raises:
        TransientError: for what may pass.
        OSError: for what will not: FileNotFoundError, PermissionError and others.
    """
    import obstore  # noqa: PLC0415
    from obstore.exceptions import NotSupportedError  # noqa: PLC0415

    store = _store(place, options, tries_again=False)
    wanted: Any = {"range": (start, end)} | ({"if_match": tag} if tag is not None else {})

    def get() -> obstore.GetResult | None:
        try:
            return obstore.get(store, place.key, options=wanted)
        except NotSupportedError:
            return None

    result = _attempt(place, get)
    if result is None:
        raise _not_a_range(place, store)
    # Piece by piece as they come: a read that is cut goes on behind the last one.
    stream = result.stream(min_chunk_size=1)
    return Answer(result.meta["size"], result.meta["e_tag"], _pieces(place, iter(stream)))


def _not_a_range(place: Place, store: ObjectStore) -> OSError:
    """What to say where something else came than the range that was asked for."""
    import obstore  # noqa: PLC0415

    start = _attempt(place, lambda: next(iter(obstore.get(store, place.key).stream(min_chunk_size=1)), b""))
    page = name_page(bytes(start[:1024]))
    if page:
        return TransientError(f"got {page} instead of the object")
    return OSError(
        f"{name_of(place)}: the server gives the whole file where a range of it is asked for, and shards are read in ranges; "
        "use a server that has them, or copy the files"
    )


def _pieces(place: Place, stream: Iterator[Any]) -> Iterator[bytes]:
    while (piece := _attempt(place, lambda: next(stream, None))) is not None:
        yield bytes(piece)


def steady(
    place: Place, options: StorageOptions | None, wait: Callable[[float], None] = time.sleep
) -> SteadyObject:
    """The object, whose reads give all their bytes or raise; between two tries it waits so many seconds."""
    tries = (options or StorageOptions()).retries + 1
    return SteadyObject(name_of(place), partial(ask, place, options), Patience(tries=tries), wait=wait)


def read(place: Place, options: StorageOptions | None, start: int, end: int) -> bytes:
    """The bytes from `start` to before `end`, or fewer where the object ends.

    Raises:
        OSError: as `ask`, after the last try.
    """
    try:
        return steady(place, options).read(start, end) if end > start else b""
    except PastEndError:
        return b""


def head(place: Place, options: StorageOptions | None) -> tuple[int, str | None]:
    """(size in bytes, entity tag) of an object.

    Raises:
        FileNotFoundError: if there is none.
        OSError: if the store cannot be asked.
    """
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    if place.scheme not in WEB:
        meta = _asked(place, lambda: obstore.head(store, place.key))
        return meta["size"], meta["e_tag"]
    # A web server need not answer HEAD, and one behind a signed URL does not: what is signed is a GET.
    seen = steady(place, options)
    try:
        seen.read(0, 1)
    except PastEndError:
        return 0, None
    return seen.size or 0, seen.tag


def is_object(place: Place, options: StorageOptions | None) -> bool:
    """Whether there is an object of this key."""
    if not place.key:
        return False
    try:
        head(place, options)
    except FileNotFoundError:
        return False
    return True


def is_prefix(place: Place, options: StorageOptions | None) -> bool:
    """Whether any object lies under this key; never on a web server, which is not listed."""
    if place.scheme in WEB:
        return False
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    return bool(_asked(place, lambda: next(iter(obstore.list(store, place.key or None, chunk_size=1)), [])))


def list_sizes(place: Place, options: StorageOptions | None) -> dict[str, int]:
    """Every object under a key: its name relative to it, in the order of code points, and its bytes.

    The empty objects that stand for folders in some stores are left out.

    Raises:
        ConfigError: for a web server.
        OSError: if the store cannot be asked.
    """
    _refuse_web(place, "listed; name a manifest, or the shards one by one or by a brace pattern")
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    found = _asked(place, lambda: [meta for page in obstore.list(store, place.key or None) for meta in page])
    above = len(place.key) + 1 if place.key else 0
    sizes = {meta["path"][above:]: meta["size"] for meta in found if len(meta["path"]) > above}
    folders = {name[:end] for name in sizes for end in range(len(name)) if name[end] == "/"}
    return {name: sizes[name] for name in sorted(sizes) if sizes[name] or name not in folders}


def list_names(place: Place, options: StorageOptions | None) -> list[str]:
    """The names right under a key, those of prefixes with a slash behind them, in the order of code points.

    Raises:
        ConfigError: for a web server.
        OSError: if the store cannot be asked.
    """
    _refuse_web(place, "listed; name a manifest, or the shards one by one or by a brace pattern")
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    found = _asked(place, lambda: obstore.list_with_delimiter(store, place.key or None))
    above = len(place.key) + 1 if place.key else 0
    folders = {path[above:] for path in found["common_prefixes"]}
    files = {meta["path"][above:]: meta["size"] for meta in found["objects"]}
    names = [name for name, size in files.items() if name and (size or name not in folders)]
    return sorted([*names, *(f"{name}/" for name in folders)])


def put(place: Place, options: StorageOptions | None, data: bytes) -> None:
    """Write a whole object; a reader sees the old one or the new one.

    Raises:
        ConfigError: for a web server.
        OSError: if the store refuses.
    """
    _refuse_web(place, "written to; give a path or an s3://, gs:// or az:// URL")
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    _asked(place, lambda: obstore.put(store, place.key, data))


def put_new(place: Place, options: StorageOptions | None, data: bytes) -> bool:
    """Write an object unless there is one, in one step; whether it now holds this data.

    An answer may be lost and the request made again, and the second then finds what the first wrote: it is known by the
    data. So data that claims something must name who claims it.

    Raises:
        ConfigError: for a web server.
        OSError: if the store refuses.
    """
    _refuse_web(place, "written to; give a path or an s3://, gs:// or az:// URL")
    import obstore  # noqa: PLC0415
    from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

    store = _store(place, options)

    def write() -> bool:
        try:
            obstore.put(store, place.key, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    if _asked(place, write):
        return True
    try:
        return read(place, options, 0, len(data) + 1) == data
    except FileNotFoundError:
        return False


def delete(place: Place, options: StorageOptions | None, names: Sequence[str] | None = None) -> None:
    """Remove an object, if it is there; or some that lie under its key.

    Raises:
        ConfigError: for a web server.
        OSError: if the store refuses.
    """
    _refuse_web(place, "written to")
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    prefix = f"{place.key}/" if place.key else ""
    keys = [place.key] if names is None else [prefix + name for name in names]
    # S3 takes an object that is not there as deleted; others say so.
    with suppress(FileNotFoundError):
        _asked(place, lambda: obstore.delete(store, keys))


@contextmanager
def open_put(place: Place, options: StorageOptions | None) -> Iterator[BinaryIO]:
    """An object to write to, part by part; it appears when the block ends without an exception, and else never does.

    Raises:
        ConfigError: for a web server.
        OSError: if the store refuses.
    """
    _refuse_web(place, "written to; give a path or an s3://, gs:// or az:// URL")
    import obstore  # noqa: PLC0415

    store = _store(place, options)
    writer = _attempt(
        place, lambda: obstore.open_writer(store, place.key, buffer_size=PART_BYTES, max_concurrency=4)
    )
    file = io.BufferedWriter(cast("io.RawIOBase", _PutFile(place, writer)), WRITE_BYTES)
    try:
        yield file
        file.flush()
    except BaseException as error:
        # Given an exception, the client drops the parts that are already there.
        with suppress(Exception):
            writer.__exit__(type(error), error, error.__traceback__)
        raise
    _asked(place, writer.close)


class _PutFile(io.RawIOBase):
    """What obstore gives to write to, as a raw file that knows where it stands."""

    def __init__(self, place: Place, writer: Any) -> None:
        super().__init__()
        self._place = place
        self._writer = writer
        self._offset = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        count = memoryview(data).nbytes
        _asked(self._place, lambda: self._writer.write(bytes(data)))
        self._offset += count
        return count

    def tell(self) -> int:
        return self._offset


def _refuse_web(place: Place, what: str) -> None:
    if place.scheme in WEB:
        raise ConfigError(f"{name_of(place)}: {place.scheme}:// is read only and cannot be {what}")
