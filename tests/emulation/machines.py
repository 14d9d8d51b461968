"""An emulated machine with one opened device, and what the tests of it share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpack.device.cuda import CudaDevice
from tests.emulation.fake_cupy import Machine, installed

SLOT = 1 << 13


@contextmanager
def machine_with_device(schedule: str = "on demand", seed: int = 0, **fields: Any) -> Iterator[tuple[Machine, Any]]:
    """A device of small chunks. At the end all it allocated is given back: nothing may be left then."""
    machine = Machine(schedule, seed, **fields)
    with installed(machine):
        device = CudaDevice(slot_bytes=SLOT)
        yield machine, device
        gc.collect()
        device.close()
        assert machine.idle()
        assert machine.pinned == {}


def write_through(device: Any, buffer: Any, rows: Any) -> None:
    device.write(buffer, 0, rows.data)
    device.synchronise()
