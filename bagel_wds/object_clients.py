"""The client of a bucket, one a process: what the settings and the environment make of it, checked before it is opened.

obstore is imported when the first is asked for, and a client is opened in the process that uses it: it does not live
through a fork.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from bagel_wds.errors import ConfigError
from bagel_wds.redact import redact
from bagel_wds.storage_options import StorageOptions
from bagel_wds.urls import WEB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from obstore.store import ObjectStore

    from bagel_wds.urls import Place

_used_in: set[int] = set()
"""Processes, by id, in which a request was made: this one or, after a fork, its parent."""


def open_client(place: Place, options: StorageOptions | None, *, tries_again: bool = False) -> ObjectStore:
    """The client of the place's bucket in this process.

    Args:
        place: of an object in it.
        options: how the store is reached.
        tries_again: it makes requests that failed anew: for those that it makes on its own. The others are made again by
            whoever makes them, and knows why.

    Raises:
        ConfigError: if settings and environment make none.
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
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - obstore's own classes, of which each means the same here
        why = redact(str(error).partition("\n")[0])
    raise ConfigError(
        f"{place.scheme}://{place.bucket}: this store cannot be opened: {why}; see docs/object-storage.md for what the "
        "environment must say"
    )


_HEADER_VARIABLES = {
    "s3": (
        "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION",
    ),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY"),
}  # fmt: skip
"""What goes into a request as it is."""


def _check_environment(
    scheme: str, bucket: str, environment: Mapping[str, str], options: StorageOptions
) -> None:
    """Refuse what the client would panic of, or send as it is."""
    for name in _HEADER_VARIABLES.get(scheme, ()):
        if re.search(r"[\x00-\x1f\x7f]", environment.get(name, "")):
            raise ConfigError(
                f"{scheme}://{bucket}: {name} in the environment has a line end or another control character in it; "
                "set it anew without"
            )
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT") if scheme == "s3" and options.endpoint is None else ():
        endpoint = environment.get(name)
        if endpoint is not None and not _is_web(endpoint):
            raise ConfigError(
                f"{scheme}://{bucket}: {name} in the environment is no URL of a server, such as "
                "https://s3.example.org; set it so, or unset it"
            )


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in WEB and bool(parts.hostname) and port != 0 and not re.search(r"[\x00-\x20\x7f]", url)
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
    if scheme not in WEB:
        _check_environment(scheme, bucket, dict(environment), options)
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
        # A range of an answer that is compressed on its way is no range of the file.
        client["default_headers"] = {"accept-encoding": "identity"}
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
