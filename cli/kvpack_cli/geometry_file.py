"""A JSON file that says what a cache looks like, as a geometry."""

from __future__ import annotations

import json
from pathlib import Path

from blake3 import blake3

from kvpack.errors import ResourceError, UsageError
from kvpack.model.geometry import Geometry
from kvpack.model.geometry_json import geometry_from_json

__all__ = ["read_geometry"]


def read_geometry(path: Path) -> Geometry:
    """The geometry of a file.

    Raises UsageError ``no-such-file``, ``not-a-file``, ``bad-geometry`` (with the path of the fault as its field);
    ResourceError ``unreadable``.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            "no-such-file",
            f"there is no geometry file {path}",
            field="geometry",
            found=str(path),
            hint="fixtures/geometries/ of the source has examples",
        ) from None
    except IsADirectoryError:
        raise UsageError("not-a-file", f"the geometry {path} is a folder", field="geometry", found=str(path)) from None
    except OSError as error:
        raise ResourceError("unreadable", f"the geometry {path}: {error.strerror}", found=str(path)) from None
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is nested too deep"
        raise UsageError(
            "bad-geometry",
            f"the geometry {path} is not JSON: {reason}",
            field="geometry",
            found=str(path),
            hint="fixtures/geometries/README.md describes the form",
        ) from None
    return geometry_from_json(decoded, lambda frequencies: blake3(frequencies).digest())
