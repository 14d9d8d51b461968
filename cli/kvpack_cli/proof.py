"""Replaying a pack's probe: the logits that followed at the producer, against those that follow here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvpack.errors import InstallError
from kvpack.model.identity import Claim
from kvpack.model.snapshot import Probe

__all__ = ["Proof", "replay"]


@dataclass(frozen=True)
class Proof:
    """What a replay gave. ``first_different`` is the first step with other logits, None if all are equal.

    ``greedy_agreement`` counts the steps at which the most likely token here is the one that the producer took;
    ``compared`` is how many steps could be asked (the first one needs the stored logits).
    """

    probe: Probe
    equal: int
    first_different: int | None
    found: bytes | None
    greedy_agreement: int
    compared: int

    def facts(self) -> dict[str, object]:
        """The proof as JSON."""
        return {
            "position": self.probe.position,
            "steps": len(self.probe.tokens),
            "equal": self.equal,
            "first_different_step": self.first_different,
            "greedy_agreement": self.greedy_agreement,
            "greedy_compared": self.compared,
        }

    @property
    def sentence(self) -> str:
        """The proof in one line."""
        steps = len(self.probe.tokens)
        line = f"{self.equal}/{steps} steps with logits bitwise equal to the producer's"
        if self.first_different is not None:
            line += f"; the first that differs is step {self.first_different}"
            line += f"; the most likely token agrees in {self.greedy_agreement}/{self.compared}"
        return line

    def require(self, claim: Claim) -> None:
        """Under the claim BITWISE, a step that differs is InstallError ``probe-differs``."""
        if claim is Claim.BITWISE and self.first_different is not None:
            raise InstallError(
                "probe-differs",
                f"step {self.first_different} of the probe gives other logits here than at the producer,"
                " although nothing that was compared differs",
                field="probe",
                expected=self.probe.digests[self.first_different].hex(),
                found=self.found.hex() if self.found else None,
                hint="do not trust this session; check the machine, then capture it again",
            )


def replay(engine: Any, model: Any, installed: Any, probe: Probe, on_step: Callable[[int, int], None]) -> Proof:
    """Feed the probe's tokens to a session that was just installed at the probe's position."""
    equal = agreed = compared = 0
    first_different: int | None = None
    found: bytes | None = None
    row = installed.logits
    for step, (token, digest) in enumerate(zip(probe.tokens, probe.digests, strict=True)):
        if row is not None:
            compared += 1
            agreed += int(row.argmax()) == token
        row = engine.prefill(model, [token], installed.cache)
        here = engine.logits_digest(row)
        if here == digest:
            equal += 1
        elif first_different is None:
            first_different, found = step, here
        on_step(step + 1, len(probe.tokens))
    return Proof(probe, equal, first_different, found, agreed, compared)
