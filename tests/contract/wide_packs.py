"""Packs whose tiles are big enough to tell what is fetched from what is not."""

from __future__ import annotations

from pathlib import Path

import kvpack
from kvpack.model.geometry import Geometry
from tests import synthetic
from tests.contract.sessions import cut_of, tokens

WIDE = Geometry((synthetic.full(8, 64), synthetic.full(8, 64)))


def pack_file(path: Path, count: int = 2000) -> Path:
    kvpack.save(cut_of(WIDE, tokens(count)), path, codec="raw")
    return path
