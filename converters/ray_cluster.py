"""The Ray cluster that slices are worked on: found or started here, and left as it was found."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bagel_wds.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_REACH_SECONDS = 10.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x04"
"""The fourth byte of a frame is its type."""
_EMPTY_SETTINGS = bytes(3) + _SETTINGS + bytes(5)
_FORMS = "HOST:PORT of its head node (6379, unless it was started with another), or auto"


def import_ray() -> Any:
    """Ray, which is an extra.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"--engine ray needs Ray, which cannot be imported ({error}): pip install 'bagel-wds[ray]'"
        ) from error


@contextmanager
def joined_cluster(address: str | None) -> Iterator[Any]:
    """Be connected to a cluster; gives Ray.

    A cluster that was there goes on when the block ends, and so does a connection that this process had; a cluster that
    was started here ends. What Ray changes of the process when it connects (environment, the handler of SIGTERM, those of
    its logger) is put back. What workers print stays in Ray's log files on their nodes: results, errors and progress come
    back as values, and lines of other processes would run into the bar and into what `--json` prints.

    Args:
        address: of the cluster, of which this machine is a node; else `RAY_ADDRESS`, else one is started here.

    Raises:
        ConfigError: if Ray is not installed, or the cluster cannot be reached.
    """
    with _unchanged_process():
        ray = import_ray()
    if ray.is_initialized():
        _check_same(ray, address)
        yield ray
        return
    with _unchanged_process():
        found = _resolve(address or os.environ.get("RAY_ADDRESS") or "local")
        try:
            ray.init(address=found, configure_logging=False, log_to_driver=False, include_dashboard=False)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError(
                f"no connection to Ray at {found}: {error}; give as --address {_FORMS}"
            ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Put back what Ray changes of this process."""
    environment = dict(os.environ)
    logger = logging.getLogger("ray")
    handlers, level = list(logger.handlers), logger.level
    on_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        logger.handlers[:], logger.level = handlers, level
        if on_main and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _check_same(ray: Any, address: str | None) -> None:
    """Refuse another cluster than the one that this process is connected to."""
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", connected):
        raise ConfigError(
            f"this process is connected to the Ray cluster at {connected} already, and {address} was asked for; leave the "
            "address out, or call ray.shutdown() before"
        )


def _resolve(address: str) -> str:
    """An address that answers.

    Raises:
        ConfigError: if it does not. Ray itself would go on trying for minutes, without a word.
    """
    if address == "local":
        return address
    if address == "auto":
        services = importlib.import_module("ray._private.services")
        known = services.canonicalize_bootstrap_address("auto")
        if known is None:
            raise ConfigError(f"no Ray cluster is known on this machine; give as --address {_FORMS}")
        address = str(known)
    if "://" in address:
        raise ConfigError(
            f"--address {address}: give the command on a node of the cluster, with {_FORMS}; or from elsewhere as a job of "
            "it: ray job submit --address http://HOST:8265 -- bagel-wds convert ... --engine ray"
        )
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ConfigError(f"--address {address} is no address of a Ray cluster: give {_FORMS}")
    try:
        is_head = _speaks_http2(host, port)
    except OSError as error:
        raise ConfigError(
            f"--address {address}: nothing answers there ({error}): does the cluster run, and is this {_FORMS}?"
        ) from error
    if not is_head:
        raise ConfigError(f"--address {address}: what answers there is not Ray's head node; give {_FORMS}")
    return address


def _speaks_http2(host: str, port: int) -> bool:
    """Whether a server speaks what Ray's head does: it greets back with settings. Under TLS it cannot be asked so."""
    with socket.create_connection((host, port), timeout=_REACH_SECONDS) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True
        connection.sendall(_HTTP2_PREFACE + _EMPTY_SETTINGS)
        return connection.recv(9, socket.MSG_WAITALL)[3:4] == _SETTINGS
