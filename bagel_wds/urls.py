"""Paths and URLs as text: which kind one is, what it names, and how names are joined to it.

| written | is | names in it |
| --- | --- | --- |
| `folder/name` | a path on the disk | as they are |
| `file:///folder/name` | the same | percent-encoded |
| `s3://bucket/key`, `gs://`, `az://container/key` | an object | as they are: `%41` is three characters, `?` and `#` too |
| `http://host/path?query`, `https://` | a page, read only | percent-encoded |
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from bagel_wds.errors import ConfigError
from bagel_wds.redact import redact

BUCKETS = ("s3", "gs", "az")
"""Schemes of object stores."""
WEB = ("http", "https")
"""Schemes that are only read."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BUCKET = re.compile(r"[A-Za-z0-9._$-]+")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+)(?::\d{1,5})?")
_SIGNED = re.compile(r"(^|&)(x-(amz|goog)-signature|signature)=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL of an object store, or of a web server, names.

    Attributes:
        scheme: s3, gs, az, http or https.
        bucket: or container; of a web server host and port, with the user if there is one.
        key: of the object, or the prefix of a folder, without slashes around it; not percent-encoded.
        query: of a web server, with what signs it.
    """

    scheme: str
    bucket: str
    key: str
    query: str = ""

    def __repr__(self) -> str:
        return f"Place({redact(f'{self.scheme}://{self.bucket}/{self.key}')!r})"


def scheme_of(url: str | os.PathLike[str]) -> str:
    """The scheme of a URL in small letters; "" for a path on the disk.

    Raises:
        ConfigError: for a scheme that is not read: `pipe:` runs a shell.
    """
    text = os.fspath(url)
    if text.startswith("pipe:"):
        raise ConfigError(
            f"{text!r}: pipe: URLs run a shell command and are refused; give the path or URL of the data"
        )
    if "://" not in text:
        return ""
    scheme = text.partition("://")[0].lower()
    if scheme not in ("file", *BUCKETS, *WEB):
        raise ConfigError(
            f"{text!r}: {scheme}:// is not read; there are paths, file://, s3://, gs://, az://, http:// and https://"
        )
    return scheme


def split(url: str | os.PathLike[str]) -> Place:
    """What a URL of an object store or a web server names.

    Raises:
        ConfigError: if it names no bucket or host, holds a credential, or a key that no store can be asked for.
    """
    scheme, text = scheme_of(url), os.fspath(url)
    place = _split_web(scheme, text) if scheme in WEB else _split_bucket(scheme, text)
    if _SURROGATE.search(place.key):
        raise ConfigError(
            f"{text!r}: the key is no text (a byte that is no UTF-8), for which stores cannot be asked; rename the object"
        )
    if _CONTROL.search(place.key):
        raise ConfigError(
            f"{text!r}: the key has a control character, for which stores cannot be asked; rename the object"
        )
    if any(part in ("", ".", "..") for part in place.key.split("/")) and place.key:
        raise ConfigError(
            f"{text!r}: a part of the key is empty, `.` or `..`; object stores have no such names, write it out"
        )
    return place


def _split_web(scheme: str, text: str) -> Place:
    try:
        parts = urlsplit(text)
    except ValueError:
        parts = None
    if parts is not None and not parts.netloc:
        raise ConfigError(f"{text!r}: names no host")
    # Not shown: it may be a user and a part of a password that holds a slash.
    if (
        parts is None
        or re.search(r"\s", parts.netloc)
        or not _HOST.fullmatch(parts.netloc.rpartition("@")[2])
    ):
        raise ConfigError(
            f"an {scheme}:// URL has no host and port that can be asked; in a user or password percent-encode `/` (%2F), `?`, `#` and "
            "`@`, and write brackets round an IPv6 address alone"
        )
    return Place(scheme, parts.netloc, unquote(parts.path).strip("/"), parts.query)


def _split_bucket(scheme: str, text: str) -> Place:
    bucket, _, key = text.partition("://")[2].partition("/")
    # Nothing of it is shown: a secret key may hold a slash, and so be taken for a bucket and its key.
    if "@" in bucket or ":" in bucket:
        raise ConfigError(
            f"an {scheme}:// URL has an `@` or a `:` where its bucket belongs: a credential in a URL would end up in logs and states; "
            "take it from the environment, and a server's port from `endpoint`, see docs/object-storage.md"
        )
    if not bucket:
        raise ConfigError(f"{text!r}: names no bucket")
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            f"{text!r}: no bucket is called {bucket!r}; a name has letters and digits, `-`, `_` and `.`, such as "
            f"{scheme}://bucket/key"
        )
    return Place(scheme, bucket, key.strip("/"))


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether it is on the disk: a path or a `file://` URL."""
    return scheme_of(url) in ("", "file")


def is_signed(url: str | os.PathLike[str]) -> bool:
    """Whether it is a web URL signed for one object: nothing beside it can be asked for."""
    return scheme_of(url) in WEB and bool(_SIGNED.search(urlsplit(os.fspath(url)).query))


def base_name(url: str | os.PathLike[str]) -> str:
    """The last name of a path or URL as it is on the disk or in the bucket: not percent-encoded, without a query."""
    name = _without_query(os.fspath(url))[0].rpartition("/")[2]
    return unquote(name) if scheme_of(url) in ("file", *WEB) else name


def join(folder: str | os.PathLike[str], name: str) -> str:
    """A name under a folder; a name that is a path from the root, or a URL, stays as it is.

    `.` and `..` in a name under a URL are worked out. A web URL keeps its query, unless that signs one object.

    Raises:
        ConfigError: for a name that leads out of the bucket.
    """
    if "://" in name or os.path.isabs(name):  # noqa: PTH117 - a Path would collapse the slashes of a URL
        return name
    root, query = _without_query(os.fspath(folder))
    scheme = root.partition("://")[0].lower() if "://" in root else ""
    if scheme in ("file", *WEB):
        name = quote(name)
    joined = f"{root.rstrip('/')}/{name}"
    if scheme in (*BUCKETS, *WEB):
        joined = _flatten(joined)
    return joined + ("" if query and is_signed(folder) else query)


def parent(url: str | os.PathLike[str]) -> str:
    """The folder that a file lies in; that of a bucket's own URL is itself."""
    text, query = _without_query(os.fspath(url))
    head, mark, rest = text.partition("://")
    if not mark:
        folder, slash, _ = text.rpartition("/")
        return folder or slash or "."
    folder, slash, _ = rest.rpartition("/")
    if not folder and head.lower() == "file":
        return f"{head}:///"
    return f"{head}://{folder if slash else rest}" + ("" if query and is_signed(url) else query)


def _flatten(url: str) -> str:
    """The URL with `.` and `..` worked out, where there are any."""
    head, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    if not any(part in (".", "..") for part in key.split("/")):
        return url
    flat = posixpath.normpath(key)
    if flat.split("/")[0] == "..":
        raise ConfigError(f"{url}: leads out of its bucket; name the other bucket by its URL")
    return f"{head}://{bucket}/{flat}"


def _without_query(text: str) -> tuple[str, str]:
    """(the rest, `?query`) of a web URL; of anything else the text as it is, since `?` belongs to its name."""
    if text.partition("://")[0].lower() not in WEB:
        return text, ""
    plain, mark, query = text.partition("#")[0].partition("?")
    return plain, mark + query
