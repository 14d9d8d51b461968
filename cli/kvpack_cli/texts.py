"""Between text and token ids: prompt files, chat templates, and where two token sequences part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpack.errors import EngineError, ResourceError, UsageError

__all__ = ["Prompt", "common_length", "excerpt", "read_prompt", "stop_tokens", "text_of"]


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was read: raw text, or one user message for the model's chat template."""

    text: str
    chat: bool
    system: str | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat: the system's words, if there are any, and the user's."""
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": self.text}]

    def tokens(self, tokenizer: Any) -> list[int]:
        """The token ids, special tokens included, as the model's tokenizer gives them.

        Raises EngineError ``no-tokenizer`` and ``no-chat-template``, UsageError ``empty-prompt``.
        """
        if tokenizer is None:
            raise EngineError(
                "no-tokenizer", "the model's folder has no tokenizer, and a prompt needs one", field="tokenizer"
            )
        if not self.chat:
            ids = tokenizer(self.text, verbose=False)["input_ids"]
        elif getattr(tokenizer, "chat_template", None) is None:
            raise EngineError(
                "no-chat-template", "the model has no chat template", field="template", hint="leave out --chat"
            )
        else:
            ids = tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        if not ids:
            raise _empty_prompt()
        return [int(token) for token in ids]


def read_prompt(path: Path, *, chat: bool) -> Prompt:
    """The text of a prompt file, or of stdin for ``-``.

    Raises UsageError ``no-such-prompt``, ``not-text``, ``empty-prompt``; ResourceError ``unreadable``.
    """
    try:
        encoded = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            "no-such-prompt",
            f"there is no prompt file {path}",
            field="prompt-file",
            found=str(path),
            hint="give a text file, or - for stdin",
        ) from None
    except IsADirectoryError:
        raise UsageError("not-a-file", f"the prompt {path} is a folder", field="prompt-file", found=str(path)) from None
    except OSError as error:
        raise ResourceError("unreadable", f"the prompt {path}: {error.strerror}", found=str(path)) from None
    try:
        text = encoded.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            "not-text",
            f"the prompt {path} is not UTF-8 text (byte {error.start})",
            field="prompt-file",
            found=str(path),
            hint="give a text file",
        ) from None
    if not text:
        raise _empty_prompt()
    return Prompt(text, chat)


def _empty_prompt() -> UsageError:
    return UsageError(
        "empty-prompt",
        "the prompt has no tokens",
        field="prompt-file",
        expected="at least 1",
        found=0,
        hint="put some text into the prompt file",
    )


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str | None:
    """The text of token ids without special tokens; None where there is no tokenizer."""
    if tokenizer is None:
        return None
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def stop_tokens(model: Any) -> frozenset[int]:
    """The ids after which the model itself would stop."""
    for config in (getattr(model, "generation_config", None), model.config):
        found = getattr(config, "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list | tuple) else [found])
    return frozenset()


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share from the start."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def excerpt(tokenizer: Any, tokens: Sequence[int], at: int) -> str:
    """A few characters around a token, for a message; the end is said."""
    near = tokens[max(0, at - 3) : at + 4]
    text = (text_of(tokenizer, near) or "") if near else ""
    return repr(text[-40:]) + (" (its end)" if at >= len(tokens) else "")
