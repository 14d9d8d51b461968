"""The root's verbs: rooms composed into whole operations on pack files."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from kvpack.errors import FormatError, IntegrityError, ResourceError, UsageError
from kvpack.model.geometry import PlaneKey
from kvpack.model.snapshot import Cut, CutView, PlaneRows
from kvpack.pack.compose import CutRows, compose, require_continuation
from kvpack.pack.index import TileRecord
from kvpack.pack.manifest import Manifest
from kvpack.pack.preamble import Limits
from kvpack.pack.reader import FrontCheck, PackReader, TileFault
from kvpack.pack.view import MAX_CHAIN, PackChain, PackCut
from kvpack.pack.writer import Progress, Signer, WrittenPack, write_pack
from kvpack.trust import (
    PublicKey,
    SigningKey,
    TrustedKey,
    TrustPolicy,
    Verification,
    apply_scope,
    build_region,
    load_trust,
    parse_region,
    require_trusted,
    verify_signatures,
)
from kvpack.trust import (
    sign as sign_front,
)
from kvpack.version import __version__

__all__ = [
    "Inspection",
    "Pack",
    "Trust",
    "Verified",
    "check_factory",
    "inspect",
    "load",
    "open_pack",
    "save",
    "signer_of",
    "verify",
]

FilePath: TypeAlias = "str | os.PathLike[str]"
Trust: TypeAlias = "TrustPolicy | PublicKey | FilePath | None"
"""Who is trusted: a policy, one public key, the path of a trust file or of a public key, or nobody."""

DEFAULT_CODEC = "split"


class _Gatekeeper:
    """The reader's :class:`~kvpack.pack.reader.FrontCheck`: signatures before the manifest, scope and expiry after it.

    ``enforce`` refuses what is not trusted (``allow_unsigned`` lifts what may be lifted); without it the answer is only
    recorded, except that a signature in a trusted key's name must always be good.
    """

    def __init__(self, policy: TrustPolicy, *, enforce: bool, allow_unsigned: bool, now: int) -> None:
        self._policy = policy
        self._enforce = enforce
        self._allow_unsigned = allow_unsigned
        self._now = now
        self.verification = verify_signatures((), b"", policy, now=now)

    def signatures(self, region: bytes, signed: bytes) -> None:
        self.verification = verify_signatures(parse_region(region), signed, self._policy, now=self._now)
        if self._enforce:
            require_trusted(self.verification, self._allow_unsigned)

    def manifest(self, manifest: Manifest) -> None:
        self.verification = apply_scope(
            self.verification,
            self._policy,
            tenant=manifest.provenance.get("tenant"),
            model=manifest.provenance.get("model"),
            epoch=manifest.epoch,
            expires=manifest.expires,
            now=self._now,
        )
        if self._enforce:
            require_trusted(self.verification, self._allow_unsigned)


def _policy(trust: Trust) -> TrustPolicy:
    if trust is None:
        return TrustPolicy(keys=())
    if isinstance(trust, TrustPolicy):
        return trust
    if isinstance(trust, PublicKey):
        return TrustPolicy(keys=(TrustedKey(key=trust, name=trust.comment or trust.short_id),))
    return load_trust(trust)


def _now(now: int | None) -> int:
    return int(time.time()) if now is None else now


def check_factory(trust: Trust, *, allow_unsigned: bool = False, now: int | None = None) -> Callable[[], FrontCheck]:
    """What a store is opened with (``check=``) so that it serves only packs that ``trust`` vouches for."""
    policy = _policy(trust)
    return lambda: _Gatekeeper(policy, enforce=True, allow_unsigned=allow_unsigned, now=_now(now))


def signer_of(keys: Sequence[SigningKey]) -> Signer:
    """What a store signs with (``sign=``): every key signs the front."""
    return lambda signed: build_region([sign_front(signed, key) for key in keys])


def save(
    cut: CutView | Sequence[CutView],
    path: FilePath,
    *,
    parent: PackCut | None = None,
    codec: str = DEFAULT_CODEC,
    sign: SigningKey | Sequence[SigningKey] = (),
    force: bool = False,
    created: int | None = None,
    salt: bytes | None = None,
    stream: str | None = None,
    epoch: int = 0,
    expires: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> WrittenPack:
    """Write ``cut``, or several cuts of one session, to ``path`` as a pack; atomic, private (0600), and never over an
    existing file without ``force``.

    ``codec`` is ``raw``, ``zstd`` or ``split``; ``created`` and ``expires`` are seconds since 1970. With the same
    cut, codec, salt, time and key the file is the same byte for byte.

    A cut may be in memory, a held live cache, or a cut of another pack. With ``parent``, a cut of an open pack, only
    what follows it is stored: a delta, which needs its parent to be read.

    Raises UsageError ``output-exists``, CompatibilityError ``cuts-differ`` and ``not-a-continuation``, ResourceError
    (``disk-full``, ``read-only``), FormatError ``limit-exceeded``.
    """
    keys = (sign,) if isinstance(sign, SigningKey) else tuple(sign)
    cuts = tuple(cut) if isinstance(cut, Sequence) else (cut,)
    manifest = compose(
        cuts,
        created=_now(created),
        producer=("kvpack", __version__),
        salt=secrets.token_bytes(32) if salt is None else salt,
        parent=parent.as_parent if parent is not None else None,
        epoch=epoch,
        expires=expires,
        stream=stream,
    )
    if parent is not None:
        require_continuation(cuts[-1], parent)

    return write_pack(
        Path(path),
        manifest,
        CutRows(cuts),
        codec=codec,
        signer=signer_of(keys),
        force=force,
        threads=threads,
        progress=progress,
    )


@dataclass(frozen=True)
class Inspection:
    """What the front of a pack says, and what was proved about it. Nothing of the payload has been read."""

    path: Path
    manifest: Manifest
    records: tuple[TileRecord, ...]
    pack_id: bytes
    file_bytes: int
    encrypted: bool
    verification: Verification

    @property
    def stored_bytes(self) -> Mapping[PlaneKey, int]:
        """Bytes that each plane takes in the file, padding not counted."""
        sizes = {plane.spec.key: 0 for plane in self.manifest.planes}
        for record in self.records:
            sizes[self.manifest.planes[record.tile.plane].spec.key] += record.stored_length
        return sizes

    @property
    def raw_bytes(self) -> int:
        """Bytes of all stored rows before compression."""
        return sum(plane.raw_bytes for plane in self.manifest.planes)


class Pack:
    """An open pack whose front and signatures have been checked; rows are read on demand, each verified."""

    def __init__(self, chain: PackChain, verification: Verification) -> None:
        """Made by :func:`open_pack`."""
        self.chain = chain
        self.verification = verification

    @property
    def reader(self) -> PackReader:
        """The pack's own file; its parents' are in ``chain``."""
        return self.chain.readers[0]

    def __enter__(self) -> Pack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and its parents'."""
        self.chain.close()

    @property
    def manifest(self) -> Manifest:
        """Everything about the pack except its rows."""
        return self.reader.manifest

    def cut(self, position: int | None = None) -> PackCut:
        """The cut at ``position`` (the last by default), for an engine's ``install``.

        CompatibilityError ``no-such-cut``.
        """
        return self.chain.cut(position)

    def inspection(self) -> Inspection:
        """The front's facts."""
        return _inspection(self.reader, self.verification)


def _inspection(reader: PackReader, verification: Verification) -> Inspection:
    return Inspection(
        path=reader.path,
        manifest=reader.manifest,
        records=reader.records,
        pack_id=reader.pack_id,
        file_bytes=reader.preamble.file_length,
        encrypted=reader.preamble.encrypted,
        verification=verification,
    )


def _read(
    path: FilePath, trust: Trust, *, enforce: bool, allow_unsigned: bool, now: int | None, limits: Limits | None
) -> tuple[PackReader, Verification]:
    keeper = _Gatekeeper(_policy(trust), enforce=enforce, allow_unsigned=allow_unsigned, now=_now(now))
    reader = PackReader(Path(path), check=keeper, limits=limits)
    return reader, keeper.verification


def open_pack(
    path: FilePath,
    *,
    trust: Trust = None,
    allow_unsigned: bool = False,
    parents: FilePath | None = None,
    now: int | None = None,
    limits: Limits | None = None,
) -> Pack:
    """Open a pack for reading: the front is verified, and refused unless ``trust`` vouches for it.

    ``allow_unsigned`` accepts a pack that nobody, or nobody known, signed. ``parents`` is the folder in which a
    delta's parents are looked for, by state id; each of them passes the same checks. Raises the errors of the
    reader's steps 1 to 10 (spec, section 13), CompatibilityError ``parent-missing``.
    """

    def read(file: FilePath) -> tuple[PackReader, Verification]:
        return _read(file, trust, enforce=True, allow_unsigned=allow_unsigned, now=now, limits=limits)

    reader, verification = read(path)
    readers = [reader]
    try:
        while readers[-1].manifest.parent is not None and parents is not None and len(readers) <= MAX_CHAIN:
            found = _find_parent(Path(parents), readers[-1])
            if found is None:
                break
            readers.append(read(found)[0])
        chain = PackChain(readers)
        chain.require_state_ids()
    except BaseException:
        for opened in readers:
            opened.close()
        raise
    return Pack(chain, verification)


def _find_parent(folder: Path, child: PackReader) -> Path | None:
    """The file in ``folder`` that has the cut which ``child`` continues; files that are no packs are passed over."""
    named = child.manifest.parent
    assert named is not None
    if not folder.is_dir():
        raise UsageError("no-such-folder", f"there is no folder {folder}", found=str(folder))
    for file in sorted(folder.glob("*.kvpack")):
        try:
            with PackReader(file, index=False) as reader:
                cut = reader.manifest.cut_at(named.position)
        except (FormatError, IntegrityError, UsageError, ResourceError):
            continue
        if cut is not None and cut.state_id == named.state_id:
            return file
    return None


def load(
    path: FilePath,
    *,
    trust: Trust = None,
    allow_unsigned: bool = False,
    at: int | None = None,
    parents: FilePath | None = None,
    now: int | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Cut:
    """Read one cut of a pack into memory, every byte verified. ``at`` names a cut's position (the last by default)."""
    with open_pack(path, trust=trust, allow_unsigned=allow_unsigned, parents=parents, now=now, limits=limits) as pack:
        view = pack.cut(at)
        view.on_bytes = on_bytes
        buffers = {
            key: memoryview(bytearray(view.stored[key].count * spec.axis_bytes)) for key, spec in view.specs.items()
        }

        def fill(key: PlaneKey, first: int, count: int, rows: memoryview) -> None:
            size = view.specs[key].axis_bytes
            begin = view.stored[key].offset_of(first) * size
            buffers[key][begin : begin + count * size] = rows

        view.read_rows(view.stored, fill, threads=threads)
        return Cut(
            geometry=view.geometry,
            identity=view.identity,
            layout=view.layout,
            record=view.record,
            planes={key: PlaneRows(spec, view.stored[key], buffers[key]) for key, spec in view.specs.items()},
            probe=view.probe,
            provenance=pack.manifest.provenance,
        )


def inspect(path: FilePath, *, trust: Trust = None, now: int | None = None, limits: Limits | None = None) -> Inspection:
    """Read the front of a pack and say what it holds and what its signatures prove; the payload is not read.

    Raises Format, Integrity and Resource errors of the front; an untrusted pack is shown, not refused.
    """
    reader, verification = _read(path, trust, enforce=False, allow_unsigned=True, now=now, limits=limits)
    with reader:
        return _inspection(reader, verification)


@dataclass(frozen=True)
class Verified:
    """Every byte of a pack was checked. ``faults`` are bad tiles in payload order; empty means that all are good."""

    inspection: Inspection
    faults: tuple[TileFault, ...]
    tiles: int
    raw_bytes: int

    def require(self) -> None:
        """Raise the first fault, if there is one."""
        if self.faults:
            error = self.faults[0].error
            more = f" ({len(self.faults) - 1} more bad tiles)" if len(self.faults) > 1 else ""
            raise IntegrityError(
                error.code,
                f"{error.message}{more}",
                layer=error.layer,
                plane=error.plane,
                field=error.field,
                expected=error.expected,
                found=error.found,
                hint=error.hint,
            )


def verify(
    path: FilePath,
    *,
    trust: Trust = None,
    allow_unsigned: bool = False,
    now: int | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check everything about a pack: front, signatures, every tile, every state id. Needs neither model nor parents.

    Raises what the front is refused for; bad tiles are collected in the result, so that all of them can be named.
    """
    reader, verification = _read(path, trust, enforce=True, allow_unsigned=allow_unsigned, now=now, limits=limits)
    checked = 0

    def done(record: TileRecord) -> None:
        nonlocal checked
        checked += record.raw_length
        if progress is not None:
            progress(checked, reader.raw_bytes)

    with reader:
        faults = reader.faults(threads=threads, done=done)
        if not faults and reader.manifest.parent is None:
            PackChain((reader,)).require_state_ids()
        return Verified(_inspection(reader, verification), faults, len(reader.records), reader.raw_bytes)
