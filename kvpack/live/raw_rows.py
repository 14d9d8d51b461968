"""Rows that a device verifies itself: raw tiles of a pack into planes of a device that hashes what arrives."""

from __future__ import annotations

from collections.abc import Mapping

from kvpack.device.protocol import Unverified, VerifyingDevice
from kvpack.live.layers import LayerState, LiveLayer, LivePlane
from kvpack.model.geometry import PlaneKey
from kvpack.model.ranges import RowSet
from kvpack.model.snapshot import CutView, RawCut

__all__ = ["write_raw_rows"]


def write_raw_rows(
    cut: CutView,
    wanted: Mapping[PlaneKey, RowSet],
    owners: Mapping[PlaneKey, tuple[LiveLayer, LivePlane]],
    states: Mapping[tuple[str, int], LayerState],
) -> dict[PlaneKey, RowSet]:
    """Write those of the wanted rows that a device can verify, and return the others: they come by way of the host.

    Nothing is read, and all is returned, where the cut or every device is of the other kind. Raises what
    :meth:`CutView.read_rows` raises; no row of a tile that was not accepted is written.
    """
    left = dict(wanted)
    if not isinstance(cut, RawCut):
        return left
    near = {
        key: rows
        for key, rows in wanted.items()
        if key in owners and owners[key][0].on_one_device and isinstance(owners[key][0].device, VerifyingDevice)
    }
    parcels: dict[int, tuple[VerifyingDevice, list[Unverified]]] = {}
    taken: dict[PlaneKey, list[RowSet]] = {}
    for tile in cut.raw_tiles(near):
        layer, plane = owners[tile.key]
        state, size = states[layer.scope, layer.number], plane.spec.axis_bytes
        moves = [
            move
            for run in tile.wanted
            for move in layer.moves_of_all(plane, RowSet.of(run), (run[0] - tile.first) * size, state)
        ]
        parcel = Unverified(moves, tile.nbytes, tile.read_into, tile.accept)
        device = layer.device
        if isinstance(device, VerifyingDevice) and device.can_verify(parcel):
            parcels.setdefault(id(device), (device, []))[1].append(parcel)
            taken.setdefault(tile.key, []).append(tile.wanted)
    for verifying, share in parcels.values():
        verifying.scatter_verified(share)
    for key, rows in taken.items():
        left[key] = left[key].minus(RowSet.union_of(rows))
    return left
