"""Trust files: OpenSSH's allowed-signers lines, with kvpack's scope options and a threshold.

A line is ``principal[,principal] [options] ssh-ed25519 AAAA… [comment]``. Options are separated by commas::

    namespaces="…" valid-after="YYYYMMDD[HHMM[SS]][Z]" valid-before="…"      (OpenSSH's)
    tenant="…" model="…" min-epoch=N revoked                                 (kvpack's)

``threshold N`` on a line of its own asks for N distinct keys. ``#`` begins a comment line. Times without ``Z`` are
UTC as well, where OpenSSH takes the machine's local time: one trust file must mean the same on every machine.
Anything else, a certificate authority and other key types included, is refused with its line number: a line that a
reader skipped would be a rule that it does not keep.

Source: ssh-keygen(1), "ALLOWED SIGNERS".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime

from kvpack.errors import TrustError
from kvpack.trust.keys import (
    PublicKey,
    is_private_key_text,
    is_ssh_key_type,
    naming_file,
    parse_public_key,
    parse_ssh_public_key,
    read_text_file,
)
from kvpack.trust.policy import TrustedKey, TrustPolicy

__all__ = ["load_trust", "parse_trust_text"]

MAX_TRUST_FILE_BYTES = 1024 * 1024

_THRESHOLD = re.compile(r"threshold\s+([0-9]{1,9})")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
# A word may hold quoted parts, and in them white space.
_WORD = re.compile(rf'(?:[^\s"]|{_QUOTED})+')
_OPTION = re.compile(rf'([A-Za-z-]+)(?:=({_QUOTED}|[^",\s]*))?(?:,|$)')
_TIME = re.compile(r"([0-9]{8})(?:([0-9]{4})([0-9]{2})?)?Z?")


def load_trust(path: str | os.PathLike[str]) -> TrustPolicy:
    """The policy in a file: a trust file, or one public key in any form, which then may sign everything.

    Raises UsageError (no such file), ResourceError (not readable), TrustError (``bad-trust-file`` and the codes of a
    public key).
    """
    text, _ = read_text_file(path, MAX_TRUST_FILE_BYTES)
    with naming_file(path):
        rules = [line for _, line in _rules(text)]
        first_words = rules[0].split() if rules else []
        alone = len(rules) == 1 and (len(first_words) == 1 or is_ssh_key_type(first_words[0]))
        if not (alone or is_private_key_text(text) or "-----BEGIN " in text):
            return parse_trust_text(text)
        key = parse_public_key(rules[0] if alone else text)
        return TrustPolicy((TrustedKey(key, key.comment or f"key {key.short_id}"),))


def parse_trust_text(text: str) -> TrustPolicy:
    """The policy that the text of a trust file states.

    Raises TrustError ``bad-trust-file``, ``unsupported-key-type``, ``weak-key`` or ``bad-key``; the message and
    ``field`` name the line.
    """
    keys: list[TrustedKey] = []
    threshold: int | None = None
    for number, line in _rules(text):
        stated = _THRESHOLD.fullmatch(line)
        try:
            if stated is None:
                keys.append(_parse_line(line))
            elif threshold is not None:
                raise _bad("a second threshold")
            elif int(stated[1]) < 1:
                raise _bad("a threshold below 1")
            else:
                threshold = int(stated[1])
        except TrustError as error:
            field = f"line {number}"
            raise TrustError(
                error.code,
                f"{field}: {error.message}",
                field=field,
                expected=error.expected,
                found=error.found,
                hint=error.hint,
            ) from error
    if not keys:
        raise _bad("no key is listed")
    revoked = {entry.key.raw for entry in keys if entry.revoked}
    usable = {entry.key.raw for entry in keys} - revoked
    if threshold is not None and threshold > len(usable):
        raise TrustError(
            "bad-trust-file",
            f"a threshold of {threshold} can never be met by {len(usable)} distinct keys",
            field="threshold",
            expected=f"<= {len(usable)}",
            found=threshold,
        )
    return TrustPolicy(tuple(keys), threshold or 1)


def _bad(message: str) -> TrustError:
    return TrustError(
        "bad-trust-file",
        message,
        hint="a line is: name [options] ssh-ed25519 AAAA... [comment], or: threshold N",
    )


def _rules(text: str) -> Iterator[tuple[int, str]]:
    """The lines that state something, stripped, with their numbers from 1."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def _parse_line(line: str) -> TrustedKey:
    if not line.replace("\t", " ").isprintable():
        raise _bad("a control character")
    name, rest = _next_word(line)
    if is_ssh_key_type(name):
        raise _bad("the line has a key but no name before it")
    options = ""
    word, rest = _next_word(rest)
    if not is_ssh_key_type(word):
        options = word
        word, rest = _next_word(rest)
    if not is_ssh_key_type(word):
        raise _bad("the line has no key")
    encoded, _, comment = rest.partition(" ")
    key = parse_ssh_public_key(word, encoded, comment.strip() or None)
    return _entry(key, name.replace('"', ""), _parse_options(options))


def _next_word(line: str) -> tuple[str, str]:
    """The first word of a stripped line, quotes and all, and the stripped rest; two empty strings at the end."""
    match = _WORD.match(line)
    if match is None:
        if line:
            raise _bad("an unmatched quote")
        return "", ""
    return match[0], line[match.end() :].strip()


def _parse_options(text: str) -> dict[str, str | None]:
    """Option names in lower case (OpenSSH ignores their case) with their unquoted values, None where there is none."""
    options: dict[str, str | None] = {}
    position = 0
    while position < len(text):
        match = _OPTION.match(text, position)
        if match is None or (text.endswith(",") and match.end() == len(text)):
            raise _bad(f"the options cannot be read from {text[position:]!r} on")
        name, value = match[1].lower(), match[2]
        if name in options:
            raise _bad(f"the option {name} stands twice")
        if value is not None and value.startswith('"'):
            value = re.sub(r"\\(.)", r"\1", value[1:-1])
        options[name] = value
        position = match.end()
    return options


def _entry(key: PublicKey, name: str, options: dict[str, str | None]) -> TrustedKey:
    def patterns(option: str) -> tuple[str, ...]:
        value = options.pop(option, "*")
        listed = tuple(part.strip() for part in (value or "").split(","))
        if not all(listed):
            raise _bad(f"the option {option} needs a list of patterns")
        return () if listed == ("*",) else listed

    def time(option: str) -> int | None:
        return None if option not in options else _parse_time(option, options.pop(option))

    namespaces, tenants, models = patterns("namespaces"), patterns("tenant"), patterns("model")
    valid_after, valid_before = time("valid-after"), time("valid-before")
    min_epoch: int | None = None
    if "min-epoch" in options:
        stated = options.pop("min-epoch") or ""
        if re.fullmatch(r"[0-9]{1,18}", stated) is None:
            raise _bad(f"min-epoch needs a whole number, not {stated!r}")
        min_epoch = int(stated)
    revoked = "revoked" in options
    if options.pop("revoked", None) is not None:
        raise _bad("the option revoked has no value")
    if options:
        raise _bad(f"the option {sorted(options)[0]} is not supported")
    return TrustedKey(
        key=key,
        name=name,
        namespaces=namespaces,
        tenants=tenants,
        models=models,
        min_epoch=min_epoch,
        valid_after=valid_after,
        valid_before=valid_before,
        revoked=revoked,
    )


def _parse_time(option: str, value: str | None) -> int:
    match = _TIME.fullmatch(value or "")
    if match is None:
        raise _bad(f"{option} needs a time as YYYYMMDD[HHMM[SS]][Z], not {value!r}")
    day, minute, second = match[1], match[2] or "0000", match[3] or "00"
    try:
        parsed = datetime.strptime(day + minute + second, "%Y%m%d%H%M%S")
    except ValueError as error:
        raise _bad(f"{option} is not a time that exists: {value!r}") from error
    return int(parsed.replace(tzinfo=UTC).timestamp())
