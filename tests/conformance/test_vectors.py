"""Every vector of ``fixtures/v1`` through the reader: accepted with these facts, or refused for this reason.

The vectors come from a second writer that was made from the specification and shares no code with kvpack.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from kvpack.errors import CompatibilityError, DecryptError, KvpackError, TrustError
from kvpack.model.gate import Destination, gate
from kvpack.model.geometry import Unit
from kvpack.model.ranges import RowSet
from kvpack.pack.manifest import Manifest
from kvpack.pack.reader import PackReader
from kvpack.pack.state_id import state_id
from kvpack.pack.view import PackChain, PackCut
from kvpack.trust.keys import load_public_key
from kvpack.trust.policy import TrustedKey, TrustPolicy, apply_scope, require_trusted, verify_signatures
from kvpack.trust.signing import parse_region

FIXTURES = Path(__file__).parents[2] / "fixtures"
NOW = 1_800_000_000

ACCEPT = sorted(path.stem for path in (FIXTURES / "v1/accept").glob("*.json"))
REJECT = sorted(path.stem for path in (FIXTURES / "v1/reject").glob("*.json"))


class Trust:
    """The policy of the vectors: the sidecar's keys are trusted, unsigned packs are read. Records what it was shown."""

    def __init__(self, key_files: list[str]) -> None:
        keys = [(load_public_key(FIXTURES / "v1/keys" / name), name) for name in key_files]
        self.policy = TrustPolicy(tuple(TrustedKey(key, name) for key, name in keys))
        self.seen: list[str] = []
        self.key_ids: list[bytes] = []

    def signatures(self, region: bytes, signed: bytes) -> None:
        slots = parse_region(region)
        self.verification = verify_signatures(slots, signed, self.policy, now=NOW)
        require_trusted(self.verification, allow_unsigned=True)
        self.key_ids = [slot.key_id for slot in slots]
        self.seen.append("signatures")

    def manifest(self, manifest: Manifest) -> None:
        facts = {"tenant": None, "model": None, "epoch": manifest.epoch, "expires": manifest.expires}
        checked = apply_scope(self.verification, self.policy, now=NOW, **facts)  # type: ignore[arg-type]
        require_trusted(checked, allow_unsigned=True)
        self.seen.append("manifest")


def sidecar_of(folder: str, name: str) -> dict[str, Any]:
    sidecar: dict[str, Any] = json.loads((FIXTURES / "v1" / folder / f"{name}.json").read_text())
    return sidecar


def pack_path(folder: str, name: str) -> Path:
    return FIXTURES / "v1" / folder / f"{name}.kvpack"


def require_state_ids(reader: PackReader) -> None:
    """Hold every cut of a whole pack to its state id; a delta's needs its parents."""
    if reader.manifest.parent is None:
        PackChain((reader,)).require_state_ids()


def stored_rows(reader: PackReader, number: int) -> bytes:
    """All stored rows of a plane, in order: its tiles, each verified."""
    return b"".join(bytes(reader.read_tile(record)) for record in reader.tiles_of.get(number, ()))


def test_vectors_are_what_the_generator_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(FIXTURES / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_enough_vectors() -> None:
    assert len(ACCEPT) >= 50
    assert len(REJECT) >= 180
    for folder, names in (("accept", ACCEPT), ("reject", REJECT)):
        assert {path.stem for path in (FIXTURES / "v1" / folder).glob("*.kvpack")} == set(names)


@pytest.mark.parametrize("name", ACCEPT)
def test_accept(name: str) -> None:
    sidecar = sidecar_of("accept", name)
    trust = Trust(sidecar["trusted_keys"])
    with PackReader(pack_path("accept", name), check=trust) as reader:
        manifest = reader.manifest
        assert reader.pack_id.hex() == sidecar["pack_id"]
        assert [key_id.hex() for key_id in trust.key_ids] == [one["key_id"] for one in sidecar["signatures"]]
        known = {one["key_id"] for one in sidecar["signatures"] if one["key"] in sidecar["trusted_keys"]}
        assert {signer.key_id.hex() for signer in trust.verification.signers} == known
        assert [layer.kind for layer in manifest.geometry.layers] == sidecar["kinds"]
        assert len(manifest.planes) == len(sidecar["planes"])
        for plane, facts in zip(manifest.planes, sidecar["planes"], strict=True):
            spec = plane.spec
            assert (spec.key.scope, spec.key.layer_or_none, spec.key.role) == (
                facts["scope"],
                facts["layer"],
                facts["role"],
            )
            assert spec.encoding.to_wire() == facts["encoding"]
            assert list(spec.row_shape) == facts["row_shape"]
            assert (spec.unit.value, spec.row_bytes, spec.rows) == (
                facts["unit"],
                facts["row_bytes"],
                facts.get("rows"),
            )
            assert spec.block == facts["block"]
            assert [list(part) for part in plane.rows] == facts["ranges"]
        for cut, facts in zip(manifest.cuts, sidecar["cuts"], strict=True):
            assert (cut.position, cut.tokens, cut.rope_delta, cut.context_epoch) == (
                facts["position"],
                facts["tokens"],
                facts["rope_delta"],
                facts["context_epoch"],
            )
            assert cut.draft_position == facts.get("draft_position")
            assert list(cut.extras) == facts["extras"]
            assert (None if cut.origins is None else list(cut.origins)) == facts.get("origins")
            for plane, ranges in zip(manifest.planes, facts["semantic"], strict=True):
                if plane.spec.unit is not Unit.STATE:
                    assert [list(part) for part in manifest.semantic(plane.spec.key, cut)] == ranges
            if "state_id" in facts:
                assert cut.state_id.hex() == facts["state_id"]
        if "parent_state_id" in sidecar:
            assert manifest.parent is not None
            assert manifest.parent.state_id.hex() == sidecar["parent_state_id"]
        if "payload" in sidecar:
            with pytest.raises(DecryptError) as refused:
                reader.read_tile(reader.records[0])
            assert refused.value.code == sidecar["payload"]["code"]
            return
        for number, facts in enumerate(sidecar["planes"]):
            rows = stored_rows(reader, number)
            assert len(rows) == facts["raw_length"]
            assert blake3(rows).hexdigest() == facts["blake3"]
            if "raw" in facts:
                assert rows == base64.b64decode(facts["raw"])
        require_state_ids(reader)
        _check_gate(reader, sidecar["gate"])


def _check_gate(reader: PackReader, expected: dict[str, Any] | None) -> None:
    """A destination that is the pack's own geometry refuses exactly what it does not know."""
    cut = PackCut((reader,), reader.manifest.cuts[-1])
    report = gate(cut, Destination(cut.geometry, cut.identity))
    if expected is None:
        history = any(layer.law == "history" for layer in reader.manifest.layout.layers)
        delta = reader.manifest.parent is not None
        codes = {refusal.code for refusal in report.refusals}
        assert codes == ({"history-not-honoured"} if history else {"rows-not-stored"} if delta else set())
        return
    with pytest.raises(CompatibilityError) as refused:
        report.require()
    assert (refused.value.code, refused.value.layer) == (expected["code"], expected["layer"])
    assert expected["name"] in refused.value.message


def test_the_state_id_is_made_of_the_rows() -> None:
    """The control of the state ids above: one wrong piece and the id is another."""
    with PackReader(pack_path("accept", "several-cuts")) as reader:
        cut = reader.manifest.cuts[0]
        view = PackCut((reader,), cut)
        assert state_id(reader.manifest, cut, view._piece_hash) == cut.state_id
        assert state_id(reader.manifest, cut, lambda key, first, end: bytes(32)) != cut.state_id


@pytest.mark.parametrize("name", REJECT)
def test_reject(name: str) -> None:
    sidecar = sidecar_of("reject", name)
    trust = Trust(sidecar["trusted_keys"])
    released: list[str] = []
    stage = sidecar["stage"]["number"]
    with pytest.raises(KvpackError) as refused:
        _read_everything(pack_path("reject", name), trust, released)
    error = refused.value
    assert (error.family, error.code) == (sidecar["family"], sidecar["code"]), str(error)
    assert isinstance(error, TrustError) == (sidecar["family"] == "Trust")
    assert ("signatures" in trust.seen) == (stage > 6)
    assert ("manifest" in trust.seen) == (stage > 8)
    assert not set(released) & set(sidecar["not_released"])
    if stage < 12:
        assert not released
    if "plane" in sidecar:
        assert error.plane == sidecar["plane"]
    if "field" in sidecar and "state_id" not in sidecar["field"]:
        assert names_field(error.field, sidecar["field"]), str(error)


def names_field(found: str | None, expected: str) -> bool:
    """Whether the error names the field or an entry inside it; an expected name without its path may end a path."""
    if found is None:
        return False
    return found == expected or found.startswith((f"{expected}.", f"{expected}[")) or found.endswith(f".{expected}")


def _read_everything(path: Path, trust: Trust, released: list[str]) -> None:
    """Every tile in payload order, then every state id; ``released`` gets a name for whatever comes out."""
    with PackReader(path, check=trust) as reader:
        for number, record in enumerate(reader.records):
            reader.read_tile(record)
            released.append(f"tile {number}")
        require_state_ids(reader)
        for cut in reader.manifest.cuts:
            view = PackCut((reader,), cut)
            view.read_rows({key: RowSet() for key in view.specs}, lambda *row: None)
        released.append("cut")
