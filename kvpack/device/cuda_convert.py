"""One conversion on a CUDA device: from any alignment, slice by slice, nothing written where a block is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpack.device.checks import refused
from kvpack.device.cuda_pipeline import Pipeline
from kvpack.device.cuda_runtime import CudaRuntime
from kvpack.device.quantise import is_readable, is_writable
from kvpack.errors import CompatibilityError
from kvpack.model.encoding import Encoding

__all__ = ["Conversion"]

SCALARS: Final = ("f32", "f16", "bf16", "f8_e4m3", "f8_e5m2")
KERNELS: Final = (*SCALARS, "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
NOT_REFUSED: Final = 0xFFFFFFFF
REASONS: Final = (
    ("not-finite", "holds an infinity or a NaN"),
    ("scale-overflow", "has a scale beyond the largest f16"),
    ("scale-overflow", "has a minimum beyond the largest f16"),
)
REASON_BYTES: Final = 256
"""Room for the three words, at the alignment of an allocation."""


@dataclass(frozen=True)
class Conversion:
    """``elements`` from one encoding to another.

    Raises InstallError ``bad-run``, CompatibilityError ``bad-row-shape``, ``no-conversion``.
    """

    source: Encoding
    target: Encoding
    elements: int

    def __post_init__(self) -> None:
        if self.elements < 0:
            raise refused("bad-run", "the elements of a conversion", "0 or more", self.elements)
        for encoding in (self.source, self.target):
            if self.elements % encoding.block_elements:
                raise CompatibilityError(
                    "bad-row-shape",
                    f"{self.elements} elements are not whole blocks of {encoding.name}",
                    field="row_shape",
                    expected=encoding.block_elements,
                    found=self.elements,
                )

    @property
    def source_bytes(self) -> int:
        """Bytes that are read."""
        return _size(self.source, self.elements)

    @property
    def target_bytes(self) -> int:
        """Bytes that are written."""
        return _size(self.target, self.elements)

    def run(self, runtime: CudaRuntime, pipeline: Pipeline, of: int, to: int) -> None:
        """Convert between two addresses. Blocks are tried first, all of them, then written."""
        for encoding, usable, what in (
            (self.source, is_readable(self.source), "read as f32"),
            (self.target, is_writable(self.target), "written from f32"),
        ):
            if not usable or encoding.name not in KERNELS:
                raise CompatibilityError(
                    "no-conversion",
                    f"encoding {encoding.name} cannot be {what} on a CUDA device",
                    field="encoding",
                    found=encoding.name,
                )
        with pipeline.enqueuing():
            if self.target.name not in SCALARS:
                self._pass(runtime, pipeline, of, None)
            self._pass(runtime, pipeline, of, to)

    def _pass(self, runtime: CudaRuntime, pipeline: Pipeline, of: int, to: int | None) -> None:
        """All slices, through scratch memory, where everything is aligned; a slice is written where ``to`` is given."""
        stream, scratch = pipeline.work_stream, pipeline.scratch()
        # A slice's stored bytes, its f32 numbers and its new bytes: at most 4 bytes an element each.
        room = (pipeline.scratch_bytes - REASON_BYTES) // 12 // 256 * 256
        reasons, stored, values, made = (scratch, *(scratch + REASON_BYTES + n * 4 * room for n in range(3)))
        for start in range(0, self.elements, room):
            count = min(room, self.elements - start)
            source_at = of + _size(self.source, start)
            into = stored if self.source.name != "f32" else values
            runtime.within(into, source_at, _size(self.source, count), stream)
            if self.source.name != "f32":
                units = count // self.source.block_elements
                arguments = np.uint64(stored), np.uint64(values), np.uint64(units)
                _launch(pipeline, f"kvpack_read_{self.source.name}", units, *arguments)
            result = values
            if self.target.name != "f32":
                result, units = made, count // self.target.block_elements
                arguments = np.uint64(values), np.uint64(made), np.uint64(units)
                if self.target.name in SCALARS:
                    _launch(pipeline, f"kvpack_write_{self.target.name}", units, *arguments)
                else:
                    runtime.fill(reasons, 0xFF, 4 * len(REASONS), stream)
                    _launch(pipeline, f"kvpack_write_{self.target.name}", units, *arguments, np.uint64(reasons))
                    if to is None:
                        self._require_taken(pipeline.peek(reasons, 4 * len(REASONS)), start)
            if to is not None:
                runtime.within(to + _size(self.target, start), result, _size(self.target, count), stream)

    def _require_taken(self, words: bytes, start: int) -> None:
        for (code, what), block in zip(REASONS, np.frombuffer(words, dtype="<u4").tolist(), strict=True):
            if block != NOT_REFUSED:
                number = start // self.target.block_elements + block
                raise CompatibilityError(
                    code,
                    f"block {number} {what}, so {self.target.name} cannot hold it",
                    field="encoding",
                    found=f"block {number}",
                )


def _size(encoding: Encoding, elements: int) -> int:
    return encoding.block_bytes * elements // encoding.block_elements


def _launch(pipeline: Pipeline, kernel: str, units: int, *arguments: np.generic) -> None:
    from kvpack_kernels.abi import THREADS

    pipeline.launch("convert", kernel, -(-units // THREADS), *arguments)
