"""The contract of devices, held by the host device itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from kvpack.device.host import HostDevice
from tests.contract.device_contract import DeviceContract


class TestHostDevice(DeviceContract):
    def opened(self) -> AbstractContextManager[HostDevice]:
        return nullcontext(HostDevice(1))
