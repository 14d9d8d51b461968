"""The remote store: the contract, and what is special about a bucket, on a real server (SeaweedFS)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpack.store import PrefixStore
from tests.contract.seaweed import Seaweed
from tests.contract.store_contract import OpenStore, StoreContract


class TestRemoteStore(StoreContract):
    @pytest.fixture
    def open_store(self, server: Seaweed, url: str) -> OpenStore:
        return lambda **options: PrefixStore.open(url, **{"grace": 0, "config": server.config()} | options)


class TestTieredStore(StoreContract):
    @pytest.fixture(params=["through", "back"])
    def open_store(
        self, request: pytest.FixtureRequest, server: Seaweed, url: str, tmp_path: Path
    ) -> Iterator[OpenStore]:
        opened: list[Any] = []

        def open_it(**options: Any) -> Any:
            for store in opened:  # what one handle wrote back another one must find in the bucket
                store.flush()
            given = {"grace": 0, "durability": "none", "config": server.config(), "write": request.param} | options
            opened.append(PrefixStore.open(f"tiered:{tmp_path / 'tier'},{url}", **given))
            return opened[-1]

        yield open_it
        for store in opened:
            store.close()
