"""Where a chat's tokens will be shared: behind its system prologue and behind each of its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpack.errors import EngineError, UsageError

__all__ = ["ChatTokens", "chat_tokens"]

_OTHER_QUESTIONS = ("A", "7")


@dataclass(frozen=True)
class ChatTokens:
    """A rendered chat. ``prologue`` tokens come before the first question whatever it is (0: none); ``turns`` are the
    ends of its messages, ascending, as far as a longer chat begins with the same tokens."""

    tokens: tuple[int, ...]
    prologue: int
    turns: tuple[int, ...]


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> ChatTokens:
    """Render ``messages`` (``role`` and ``content``) with the chat template, and find where they can be cut.

    The prologue is measured, not looked up: it is what renderings with other first questions have in common, so it
    holds for templates that fold the system's words into the first turn.

    Raises EngineError ``no-chat-template``, UsageError ``empty-prompt``.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise EngineError("no-chat-template", "the model has no chat template", field="template")
    tokens = _rendered(tokenizer, messages, prompt=True)
    if not tokens:
        raise UsageError("empty-prompt", "the chat has no tokens", field="tokens", expected="at least 1", found=0)
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    prologue, turns = 0, set()
    if first is not None:
        before = list(messages[:first])
        others = [
            _rendered(tokenizer, [*before, {"role": "user", "content": words}], prompt=True)
            for words in _OTHER_QUESTIONS
        ]
        prologue = min(_shared(tokens, other) for other in others)
        turns = {
            _shared(tokens, _rendered(tokenizer, messages[: at + 1], prompt=False))
            for at in range(first, len(messages))
        }
    return ChatTokens(tuple(tokens), prologue, tuple(sorted(turn for turn in turns if turn > prologue)))


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, prompt: bool) -> list[int]:
    ids = tokenizer.apply_chat_template([*messages], add_generation_prompt=prompt, return_dict=False)
    return [int(token) for token in ids]


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
