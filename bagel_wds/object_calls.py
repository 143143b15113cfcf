"""Calls of a store's client: they heed Ctrl-C, are tried again, and fail in our words.

The client waits for an answer without looking at signals, which reach a program's main thread alone. So a call from there
is made by a thread of its own, which Ctrl-C leaves behind.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from bagel_wds.ahead import in_thread
from bagel_wds.errors import ConfigError
from bagel_wds.redact import redact
from bagel_wds.steady import Patience, TransientError
from bagel_wds.storage_options import StorageOptions
from bagel_wds.store_errors import WornOutError, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bagel_wds.urls import Place

T = TypeVar("T")

_HELD_PIECES = 64
"""The client gives some kilobytes at a time."""


def name_of(place: Place) -> str:
    """A URL of the place for messages, without what signs it."""
    return redact(f"{place.scheme}://{place.bucket}/{place.key}")


def patience_of(options: StorageOptions | None) -> Patience:
    """How often a request is tried by these settings."""
    return Patience(tries=(options or StorageOptions()).retries + 1)


def asked(
    place: Place,
    options: StorageOptions | None,
    work: Callable[[], T],
    wait: Callable[[float], None] = time.sleep,
    *,
    tries_again: bool = True,
) -> T:
    """What a request gives that can be made again; of one that cannot, `tries_again` is False.

    Args:
        place: for messages.
        options: say how often it is tried.
        work: one try, by the client.
        wait: waits so many seconds.
        tries_again: it may be made again.

    Raises:
        OSError: as `attempt`; of what may pass, after the last try.
    """
    patience, jitter = patience_of(options), random.Random()  # noqa: S311 - spreads waits, hides nothing
    failures = 0
    while True:
        try:
            return attempt(place, work)
        except TransientError as error:
            failure = error
        failures += 1
        if failures >= patience.tries or not tries_again or isinstance(failure, WornOutError):
            break
        wait(patience.pause(failures, jitter))
    raise OSError(
        f"{name_of(place)}: the store cannot be asked: {failure}; check the network, the endpoint and that the store is up"
    )


def attempt(place: Place, work: Callable[[], T]) -> T:
    """What one call of the client gives.

    Raises:
        TransientError: for what may pass.
        ConfigError: for an endpoint that is not encrypted, and for what makes the client panic.
        OSError: for what else is wrong.
    """
    return _translated(place, lambda: in_thread(work).result() if _is_main() else work())


def pieces_of(place: Place, stream: Iterable[Any]) -> Iterator[bytes]:
    """The bytes of an answer, piece by piece as they come.

    Raises:
        OSError: as `attempt`.
    """
    coming = _pumped(stream) if _is_main() else iter(stream)
    while (piece := _translated(place, lambda: next(coming, None))) is not None:
        yield bytes(piece)


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _pumped(stream: Iterable[T]) -> Iterator[T]:
    """The same, taken from it by one thread for all pieces; a few that are not asked for yet are held meanwhile."""
    coming: SimpleQueue[T | Future[None]] = SimpleQueue()
    room = threading.Semaphore(_HELD_PIECES)
    is_wanted = True

    def pump() -> None:
        for piece in stream:
            coming.put(piece)
            while is_wanted and not room.acquire(timeout=1):
                pass
            if not is_wanted:
                break

    in_thread(pump).add_done_callback(coming.put)
    try:
        while not isinstance(piece := coming.get(), Future):
            room.release()
            yield piece
        piece.result()
    finally:
        is_wanted = False


def _translated(place: Place, work: Callable[[], T]) -> T:
    from obstore.exceptions import BaseError  # noqa: PLC0415 - 15 MB that local use does without

    failure: OSError | ConfigError
    try:
        return work()
    except (TransientError, ConfigError):
        raise
    except (BaseError, ValueError, OSError) as error:
        failure = _explained(error, place)
    except BaseException as error:
        # Of the client's language, and no Exception.
        if type(error).__name__ != "PanicException":
            raise
        failure = ConfigError(
            f"{name_of(place)}: the store's client cannot make this request; look for characters that do not belong into the "
            "bucket's name, or into endpoint and credentials in the environment"
        )
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
    if "Failed to read token file" in text:
        return PermissionError(
            f"{name}: no credentials: the file that AWS_WEB_IDENTITY_TOKEN_FILE names in the environment cannot be read"
        )
    if "NoSuchBucket" in text:
        return FileNotFoundError(
            f"{name}: there is no bucket {place.bucket!r}; check its name and the endpoint"
        )
    return explain(error, name)
