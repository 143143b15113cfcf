"""Objects of a store or a web server, by obstore: ranged reads, looking, listing, writing and removing whole ones.

What goes wrong is an OSError in our words. Every read of bytes is one ranged GET made by `ask`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from bagel_wds.errors import ConfigError
from bagel_wds.object_calls import asked, attempt, name_of, patience_of, pieces_of
from bagel_wds.object_clients import open_client
from bagel_wds.steady import Answer, SteadyObject, TransientError, name_page, version_of
from bagel_wds.store_errors import PastEndError
from bagel_wds.urls import WEB

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from obstore import ObjectMeta
    from obstore.store import ObjectStore

    from bagel_wds.storage_options import StorageOptions
    from bagel_wds.urls import Place

WHOLE = 1 << 62
"""An end behind that of any object."""


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
    import obstore  # noqa: PLC0415 - 15 MB that local use does without
    from obstore.exceptions import BaseError  # noqa: PLC0415

    store = open_client(place, options)
    wanted: Any = {"range": (start, end)} | ({"if_match": tag} if tag is not None else {})

    def get() -> obstore.GetResult | None:
        try:
            return obstore.get(store, place.key, options=wanted)
        except BaseError as error:
            # Of a web server it has a class of its own, of a bucket this text.
            if type(error).__name__ != "NotSupportedError" and "non-partial response" not in str(error):
                raise
            return None

    result = attempt(place, get)
    if result is None:
        raise _not_a_range(place, store)
    # Piece by piece as they come: a read that is cut goes on behind the last one.
    return Answer(
        result.meta["size"], _version(result.meta), pieces_of(place, result.stream(min_chunk_size=1))
    )


def _version(meta: ObjectMeta) -> str:
    return version_of(meta["e_tag"], meta["last_modified"])


def _not_a_range(place: Place, store: ObjectStore) -> OSError:
    """What to say where something else came than the range that was asked for."""
    import obstore  # noqa: PLC0415

    result = attempt(place, lambda: obstore.get(store, place.key))
    start = next(pieces_of(place, result.stream(min_chunk_size=1)), b"")
    page = name_page(start[:1024])
    if page:
        return TransientError(f"got {page} instead of the object")
    if not start:
        return PastEndError(f"{name_of(place)}: the object is empty")
    return OSError(
        f"{name_of(place)}: the server gives the whole file where a range of it is asked for, and shards are read in ranges; "
        "use a server that has them, or copy the files"
    )


def steady(
    place: Place, options: StorageOptions | None, wait: Callable[[float], None] = time.sleep
) -> SteadyObject:
    """The object, whose reads give all their bytes or raise; between two tries it waits so many seconds."""
    return SteadyObject(name_of(place), partial(ask, place, options), patience_of(options), wait=wait)


def read(place: Place, options: StorageOptions | None, start: int, end: int) -> bytes:
    """The bytes from `start` to before `end`, or fewer where the object ends.

    Raises:
        OSError: as `ask`, after the last try.
    """
    try:
        return steady(place, options).read(start, end) if end > start else b""
    except PastEndError:
        return b""


def head(
    place: Place, options: StorageOptions | None, wait: Callable[[float], None] = time.sleep
) -> tuple[int, str | None]:
    """(size in bytes, entity tag or what stands in for it) of an object; between two tries it waits so many seconds.

    Raises:
        FileNotFoundError: if there is none.
        OSError: if the store cannot be asked.
    """
    import obstore  # noqa: PLC0415

    store = open_client(place, options)
    if place.scheme not in WEB:
        meta = asked(place, options, lambda: obstore.head(store, place.key), wait)
        return meta["size"], _version(meta)
    # A web server need not answer HEAD, and one behind a signed URL does not: what is signed is a GET.
    seen = steady(place, options, wait)
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

    store = open_client(place, options)
    return bool(
        asked(place, options, lambda: next(iter(obstore.list(store, place.key or None, chunk_size=1)), []))
    )


def list_sizes(place: Place, options: StorageOptions | None) -> dict[str, int]:
    """Every object under a key: its name relative to it, in the order of code points, and its bytes.

    The empty objects that stand for folders in some stores are left out.

    Raises:
        ConfigError: for a web server.
        OSError: if the store cannot be asked.
    """
    refuse_web(place, "listed; name a manifest, or the shards one by one or by a brace pattern")
    store = open_client(place, options)
    prefix, above = place.key or None, len(place.key) + 1 if place.key else 0
    found: dict[str, int] = {}
    # A page of something else counts as the end of a list, and the client does not tell. So the end is believed where a
    # second listing, from the last name on, gives nothing more.
    last: str | None = None
    while True:
        more = asked(place, options, partial(_list_behind, store, prefix, last or ""))
        if not more and last is not None:
            break
        found |= more
        last = max(found, default="")
    sizes = {path[above:]: size for path, size in found.items() if len(path) > above}
    folders = {name[:end] for name in sizes for end in range(len(name)) if name[end] == "/"}
    return {name: sizes[name] for name in sorted(sizes) if sizes[name] or name not in folders}


def _list_behind(store: ObjectStore, prefix: str | None, last: str) -> dict[str, int]:
    """The bytes of each object under a key whose path comes after the last."""
    import obstore  # noqa: PLC0415

    pages = obstore.list(store, prefix, offset=last or None)
    # Not those before, which come again from a store that takes no place to begin at.
    return {meta["path"]: meta["size"] for page in pages for meta in page if meta["path"] > last}


def list_names(place: Place, options: StorageOptions | None) -> list[str]:
    """The names right under a key, those of prefixes with a slash behind them, in the order of code points.

    Raises:
        ConfigError: for a web server.
        OSError: if the store cannot be asked.
    """
    refuse_web(place, "listed; name a manifest, or the shards one by one or by a brace pattern")
    import obstore  # noqa: PLC0415

    store = open_client(place, options)
    found = asked(place, options, lambda: obstore.list_with_delimiter(store, place.key or None))
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
    refuse_web(place, "written to; give a path or an s3://, gs:// or az:// URL")
    import obstore  # noqa: PLC0415

    store = open_client(place, options)
    asked(place, options, lambda: obstore.put(store, place.key, data))


def put_new(place: Place, options: StorageOptions | None, data: bytes) -> bool:
    """Write an object unless there is one, in one step; whether it now holds this data.

    An answer may be lost and the request made again, and the second then finds what the first wrote: it is known by the
    data. So data that claims something must name who claims it.

    Raises:
        ConfigError: for a web server.
        OSError: if the store refuses.
    """
    refuse_web(place, "written to; give a path or an s3://, gs:// or az:// URL")
    import obstore  # noqa: PLC0415
    from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError  # noqa: PLC0415

    store = open_client(place, options)

    def write() -> bool | None:
        try:
            obstore.put(store, place.key, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        except BaseError as error:
            if "status code: 501" not in str(error):
                raise
            return None
        return True

    is_written = asked(place, options, write)
    if is_written is None:
        raise OSError(
            f"{name_of(place)}: the store has no conditional writes (If-None-Match; 501), by which one of several claims a name; "
            "use one that has, or a folder on a disk"
        )
    if is_written:
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
    refuse_web(place, "written to")
    import obstore  # noqa: PLC0415

    store = open_client(place, options)
    prefix = f"{place.key}/" if place.key else ""
    keys = [place.key] if names is None else [prefix + name for name in names]
    # S3 takes an object that is not there as deleted; others say so.
    with suppress(FileNotFoundError):
        asked(place, options, lambda: obstore.delete(store, keys))


def refuse_web(place: Place, what: str) -> None:
    """Raise a ConfigError that says what a web server is not."""
    if place.scheme in WEB:
        raise ConfigError(f"{name_of(place)}: {place.scheme}:// is read only and cannot be {what}")
