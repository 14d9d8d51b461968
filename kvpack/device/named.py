"""Devices by the names that people give them: ``host``, ``cuda``, ``cuda:1``."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvpack.device.protocol import Device
from kvpack.errors import UsageError

if TYPE_CHECKING:
    from kvpack.device.host import HostDevice

__all__ = ["device_named"]


def device_named(name: str) -> Device:
    """The process's device of that name; ``cuda`` is ``cuda:0``.

    Raises UsageError ``unknown-device``, and what opening a CUDA device raises.
    """
    kind, _, number = name.partition(":")
    if name == "host":
        return _host()
    if kind == "cuda" and (name == "cuda" or (number.isascii() and number.isdecimal())):
        from kvpack.device.cuda import cuda_device

        return cuda_device(int(number or 0))
    raise UsageError(
        "unknown-device", f"there is no device {name!r}", field="device", expected="host, cuda or cuda:N", found=name
    )


@cache
def _host() -> HostDevice:
    from kvpack.device.host import HostDevice

    return HostDevice()
