"""A real device, or a skip that says why there is none."""

from __future__ import annotations

import pytest

from kvpack.device.cuda import CudaDevice
from kvpack.errors import EngineError


def reason_against_a_device() -> str | None:
    """Why the first CUDA device cannot be opened, or None."""
    try:
        CudaDevice().close()
    except EngineError as error:
        return f"{error.code}: {error}"
    return None


@pytest.fixture(scope="session")
def _reason() -> str | None:
    return reason_against_a_device()


@pytest.fixture(autouse=True)
def _needs_a_device(_reason: str | None) -> None:
    if _reason is not None:
        pytest.skip(_reason)
