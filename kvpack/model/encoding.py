"""Encodings: how the elements of one row lie in bytes, and how many bytes a row has.

An encoding says how to cut bytes into elements; it never interprets them. A scalar encoding has one element a
block. A block encoding packs 32 elements with their scale into one block, laid out as in ggml (``block_q8_0``
and its siblings in ``ggml-common.h``). A composite encoding is one row made of named fields, one behind the
other: fp8 values, their scales, a rotated bf16 part.

Two encodings with equal byte counts (``q4_0`` and ``iq4_nl``, ``f16`` and ``bf16``) are different encodings:
equality is by name and fields, never by size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final, TypeAlias, cast

from kvpack.errors import CompatibilityError, FormatError

__all__ = [
    "ENCODINGS",
    "AnyEncoding",
    "CompositeEncoding",
    "CompositeField",
    "Encoding",
    "UnknownEncoding",
    "encoding_from_wire",
    "is_scalar",
    "unknown_part",
]

_NAME: Final = re.compile(r"[a-z0-9_]{1,32}")
MAX_COMPOSITE_FIELDS: Final = 64
MAX_COMPOSITE_COUNT: Final = 1 << 24


@dataclass(frozen=True)
class Encoding:
    """A fixed encoding: ``block_elements`` elements lie in ``block_bytes`` bytes.

    ``fields`` are the parts of one block as (name, bytes), in stored order; their bytes add up to
    ``block_bytes``.
    """

    name: str
    block_elements: int
    block_bytes: int
    fields: tuple[tuple[str, int], ...]

    @property
    def is_block(self) -> bool:
        """Whether several elements share one block and its scale."""
        return self.block_elements > 1

    def row_bytes(self, row_shape: tuple[int, ...]) -> int:
        """Bytes of one row of ``row_shape`` elements.

        A block must not straddle a head, so a block encoding needs a last dimension (head_dim, or the whole
        row where the shape has one dimension) that is a multiple of ``block_elements``.

        An empty shape is one element.

        Raises CompatibilityError ``bad-row-shape`` for a dimension below 1, and ``block-straddles-head``
        where a block would cross the end of a head.
        """
        if any(size < 1 for size in row_shape):
            raise CompatibilityError(
                "bad-row-shape",
                f"row shape {row_shape} has a size below 1",
                field="row_shape",
                found=row_shape,
            )
        if self.is_block and (not row_shape or row_shape[-1] % self.block_elements):
            raise CompatibilityError(
                "block-straddles-head",
                f"encoding {self.name} packs {self.block_elements} elements a block, and the last dimension"
                f" of row shape {row_shape} is not a multiple of it",
                field="row_shape",
                expected=self.block_elements,
                found=row_shape,
            )
        return prod(row_shape) // self.block_elements * self.block_bytes

    def to_wire(self) -> str:
        """The name; ``encoding_from_wire(encoding.to_wire()) == encoding`` for every encoding."""
        return self.name


@dataclass(frozen=True)
class UnknownEncoding:
    """A well-formed name that this reader does not know, kept so that the pack can still be inspected."""

    name: str

    def row_bytes(self, row_shape: tuple[int, ...]) -> int:
        """Always raises CompatibilityError ``unknown-encoding``: the size of such a row is not known."""
        raise CompatibilityError(
            "unknown-encoding",
            f"encoding {self.name} is not known to this reader",
            field="encoding",
            found=self.name,
        )

    def to_wire(self) -> str:
        """The name as it was read."""
        return self.name


@dataclass(frozen=True)
class CompositeField:
    """``count`` elements of ``encoding`` inside a composite row."""

    name: str
    encoding: Encoding | UnknownEncoding
    count: int

    @property
    def field_bytes(self) -> int:
        """Bytes of this field in one row. Raises CompatibilityError ``unknown-encoding`` where nobody knows
        them."""
        return self.encoding.row_bytes((self.count,))


@dataclass(frozen=True)
class CompositeEncoding:
    """One row is the fields one behind the other, without padding; its row shape is ``()``."""

    fields: tuple[CompositeField, ...]

    def __post_init__(self) -> None:
        names = [field.name for field in self.fields]
        if not 1 <= len(names) <= MAX_COMPOSITE_FIELDS or len(set(names)) != len(names):
            raise _bad("a composite encoding needs 1 to 64 fields with different names", names)
        for field in self.fields:
            if not _NAME.fullmatch(field.name):
                raise _bad("a composite field's name is not 1 to 32 of a-z, 0-9 and _", field.name)
            block_elements = field.encoding.block_elements if isinstance(field.encoding, Encoding) else 1
            if not 1 <= field.count <= MAX_COMPOSITE_COUNT or field.count % block_elements:
                raise _bad(f"field {field.name} does not hold a whole, positive number of blocks", field.count)

    @property
    def name(self) -> str:
        """A readable name for messages; the wire form is :meth:`to_wire`."""
        return "composite(" + ",".join(f"{f.name}:{f.encoding.name}x{f.count}" for f in self.fields) + ")"

    def row_bytes(self, row_shape: tuple[int, ...]) -> int:
        """Bytes of one row.

        Raises CompatibilityError ``composite-row-shape`` unless ``row_shape`` is ``()``, and
        ``unknown-encoding`` where a field's encoding is not known.
        """
        if row_shape != ():
            raise CompatibilityError(
                "composite-row-shape",
                f"the fields of a composite encoding give the row's shape, and it came with {row_shape}",
                field="row_shape",
                expected=(),
                found=row_shape,
            )
        return sum(field.field_bytes for field in self.fields)

    def to_wire(self) -> dict[str, object]:
        """``{"fields": [[name, encoding, count], ...]}``; ``encoding_from_wire`` gives an equal encoding
        back."""
        return {"fields": [[field.name, field.encoding.name, field.count] for field in self.fields]}


AnyEncoding: TypeAlias = Encoding | CompositeEncoding | UnknownEncoding


def unknown_part(encoding: AnyEncoding) -> str | None:
    """The name of an encoding, or of a composite's field, that this version does not know; None if it knows all."""
    if isinstance(encoding, CompositeEncoding):
        return next((f.encoding.name for f in encoding.fields if isinstance(f.encoding, UnknownEncoding)), None)
    return encoding.name if isinstance(encoding, UnknownEncoding) else None


def is_scalar(encoding: AnyEncoding) -> bool:
    """Whether one element is one block; a name that is not known may be (nobody can say that it is not)."""
    return isinstance(encoding, UnknownEncoding) or (isinstance(encoding, Encoding) and not encoding.is_block)


def _scalar(name: str, size: int) -> Encoding:
    return Encoding(name, 1, size, (("value", size),))


def _block(name: str, *fields: tuple[str, int]) -> Encoding:
    return Encoding(name, 32, sum(size for _, size in fields), fields)


ENCODINGS: Final[Mapping[str, Encoding]] = MappingProxyType(
    {
        encoding.name: encoding
        for encoding in (
            _scalar("f32", 4),
            _scalar("f16", 2),
            _scalar("bf16", 2),
            _scalar("i8", 1),
            _scalar("u8", 1),
            _scalar("i32", 4),
            _scalar("i64", 8),
            _scalar("f64", 8),
            _scalar("f8_e4m3", 1),
            _scalar("f8_e5m2", 1),
            _block("q8_0", ("d", 2), ("qs", 32)),
            _block("q5_1", ("d", 2), ("m", 2), ("qh", 4), ("qs", 16)),
            _block("q5_0", ("d", 2), ("qh", 4), ("qs", 16)),
            _block("q4_1", ("d", 2), ("m", 2), ("qs", 16)),
            _block("q4_0", ("d", 2), ("qs", 16)),
            _block("iq4_nl", ("d", 2), ("qs", 16)),
        )
    }
)
"""Every encoding that this version knows the size of, by name."""


def _bad(message: str, found: object) -> FormatError:
    return FormatError("bad-encoding", message, field="encoding", found=found)


def encoding_from_wire(value: object) -> AnyEncoding:
    """Read an encoding as the manifest holds it: a name, or a map with the one key ``fields``.

    Round-trip law: ``encoding_from_wire(e.to_wire()) == e`` for every encoding, known, composite or unknown,
    and ``encoding_from_wire(w).to_wire() == w`` for every ``w`` that is not refused.

    Raises FormatError ``bad-encoding`` for anything malformed. A well-formed name that is not known, alone or
    in a composite field, is kept as an :class:`UnknownEncoding`.
    """
    if isinstance(value, str):
        return _simple_from_wire(value)
    if not isinstance(value, dict) or list(value) != ["fields"] or not isinstance(value["fields"], (list, tuple)):
        raise _bad("an encoding is neither a name nor a map with the one key 'fields'", value)
    return CompositeEncoding(tuple(_field_from_wire(record) for record in value["fields"]))


def _field_from_wire(record: object) -> CompositeField:
    if not isinstance(record, (list, tuple)) or len(record) != 3:
        raise _bad("a composite field is not [name, encoding, count]", record)
    name, encoding_name, count = cast("tuple[object, object, object]", tuple(record))
    if not isinstance(name, str) or not isinstance(encoding_name, str) or type(count) is not int:
        raise _bad("a composite field is not [string, string, integer]", record)
    return CompositeField(name, _simple_from_wire(encoding_name), count)


def _simple_from_wire(name: str) -> Encoding | UnknownEncoding:
    if not _NAME.fullmatch(name):
        raise _bad("an encoding's name is not 1 to 32 of a-z, 0-9 and _", name)
    return ENCODINGS.get(name) or UnknownEncoding(name)
