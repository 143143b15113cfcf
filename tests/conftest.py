"""What several test files share: a real object store, started when the first test asks for it."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest
from s3_store import ACCESS_KEY, BUCKET, SECRET_KEY, S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    # Before any worker process is started, since they see the environment of that moment; and so that no test ever reaches
    # a real bucket with the credentials of whoever runs it.
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        del os.environ[name]
    os.environ |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


@pytest.fixture(scope="session")
def s3_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
    """A store with an empty bucket; every test works in folders of its own there."""
    store = S3Store(tmp_path_factory.mktemp("s3"))
    yield store
    store.kill()


_numbers = itertools.count()


@pytest.fixture
def s3_folder(s3_store: S3Store) -> str:
    """URL of a folder in the bucket that no other test uses."""
    return f"s3://{BUCKET}/{next(_numbers)}"
