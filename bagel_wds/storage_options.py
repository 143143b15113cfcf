"""The setting `storage`: how a bucket is reached, without a credential."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from bagel_wds.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """How a bucket is reached: the `storage` setting. Whatever is None comes from the environment, or is the store's default.

    Credentials are none of them; they come from the environment, see docs/object-storage.md.

    Attributes:
        endpoint: URL of a store that is not the cloud's own, such as `http://127.0.0.1:9000`.
        region: of an S3 bucket.
        anonymous: requests are not signed: for a public bucket.
        path_style: the bucket is in the path of a request and not in its host name; S3 only.
        allow_http: an endpoint without TLS may be used.
        timeout_seconds: a request that brings no byte for so long is given up, and tried again.
        retries: how often a request is tried again before it is an error.
        cache_bytes: shards that are read from a bucket or a web server are kept on the local disk, up to so many bytes; 0
            keeps none.
        cache_dir: where; None is the user's own folder for caches (`~/.cache`).
    """

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False
    path_style: bool | None = None
    allow_http: bool = False
    timeout_seconds: float = 60.0
    retries: int = 9
    cache_bytes: int = 0
    cache_dir: str | None = None

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    def __post_init__(self) -> None:
        if self.endpoint is not None and not re.match(r"https?://[^/@\s?#]+/?$", self.endpoint):
            raise ConfigError(
                f"storage: endpoint={self.endpoint!r} is no URL of a server, such as https://s3.example.org; it has no "
                "user, path or query"
            )
        if self.endpoint is not None and self.endpoint.startswith("http://") and not self.allow_http:
            raise ConfigError(
                f"storage: endpoint={self.endpoint!r} is not encrypted; set allow_http: true if that is meant"
            )
        if not 0 < self.timeout_seconds < float("inf"):
            raise ConfigError(f"storage: timeout_seconds={self.timeout_seconds} must be above 0")
        if self.retries < 0:
            raise ConfigError(f"storage: retries={self.retries} must not be negative")
        if self.cache_bytes < 0:
            raise ConfigError(f"storage: cache_bytes={self.cache_bytes} must not be negative")
        if self.cache_dir is not None and not self.cache_bytes:
            raise ConfigError(
                f"storage: cache_dir={self.cache_dir!r} is to hold shards, and cache_bytes does not say how much of them; "
                "set it, such as 500000000000"
            )
        if self.cache_dir is not None and (not self.cache_dir or "\0" in self.cache_dir):
            raise ConfigError(f"storage: cache_dir={self.cache_dir!r} is no folder's path")
