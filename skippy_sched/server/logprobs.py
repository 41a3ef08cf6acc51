"""Log-probabilities in OpenAI's two shapes, a part for each event of a stream.

Knows how tokens are named, and where they stand in a choice's text. A part is an object of lists;
parts put together are the object of the whole answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from skippy_sched.scheduler.request import TokenLogprobs
from skippy_sched.scheduler.vocabulary import Vocabulary

Part = dict[str, Any]

#: JSON has no minus infinity; clients of other servers know this number for it.
LOWEST = -9999.0


class Logprobs(Protocol):
    """The writer of one choice."""

    def part(self, told: TokenLogprobs) -> Part: ...


class ChatLogprobs:
    """``content``: each token with its name, its bytes and the likeliest ones beside it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def part(self, told: TokenLogprobs) -> Part:
        entry = self._entry(told.token, told.logprob)
        entry["top_logprobs"] = [self._entry(token, logprob) for token, logprob in told.top]
        return {"content": [entry], "refusal": None}

    def _entry(self, token: int, logprob: float) -> Part:
        piece = self._vocabulary.piece(token)
        return {
            "token": token_name(self._vocabulary, token),
            "logprob": max(logprob, LOWEST),
            "bytes": list(piece) if piece else None,
        }


class CompletionLogprobs:
    """Parallel lists; ``text_offset`` counts characters from the start of the choice's text.

    A token that begins in the middle of a character stands where the character does.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._offsets = _Offsets(0)

    def prompt_part(
        self, prompt: Sequence[int], told: Sequence[TokenLogprobs], echo: str, *, as_text: bool
    ) -> Part:
        """The prompt's tokens; the first has none before it that could have made it likely.

        ``as_text``: the echo is the text as it was sent, in which special tokens are written out,
        but for the one that was put before it.
        """
        piece, special = self._vocabulary.piece, self._vocabulary.special_text
        pieces = [piece(token) for token in prompt]
        if as_text:
            written = [p or special(t).encode() for p, t in zip(pieces, prompt, strict=True)]
            if not echo.encode().startswith(written[0]):
                written[0] = pieces[0]
            pieces = written
        names = [token_name(self._vocabulary, token) for token in prompt]
        offsets = [min(offset, len(echo)) for offset in map(self._offsets.before, pieces)]
        self._offsets = _Offsets(len(echo))
        return {
            "tokens": names,
            "token_logprobs": [None, *(max(one.logprob, LOWEST) for one in told)],
            "top_logprobs": [None, *map(self._top, told)],
            "text_offset": offsets,
        }

    def part(self, told: TokenLogprobs) -> Part:
        return {
            "tokens": [token_name(self._vocabulary, told.token)],
            "token_logprobs": [max(told.logprob, LOWEST)],
            "top_logprobs": [self._top(told)],
            "text_offset": [self._offsets.before(self._vocabulary.piece(told.token))],
        }

    def _top(self, told: TokenLogprobs) -> dict[str, float]:
        """The likeliest by name, and the token itself also if it is none of them."""
        named = {
            token_name(self._vocabulary, token): max(logprob, LOWEST) for token, logprob in told.top
        }
        named.setdefault(token_name(self._vocabulary, told.token), max(told.logprob, LOWEST))
        return named


class _Offsets:
    """Counts characters of a text that comes as bytes."""

    def __init__(self, start: int) -> None:
        self._characters = start
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")(
            errors="replace"
        ).decode

    def before(self, piece: bytes) -> int:
        """Where this piece, the next one, begins."""
        offset = self._characters
        self._characters += len(self._decode(piece))
        return offset


def token_name(vocabulary: Vocabulary, token: int) -> str:
    """Its text; of one that is not shown, how it is written; of a part of a character, its bytes
    spelled out, so that two tokens never have one name for want of characters."""
    piece = vocabulary.piece(token)
    if not piece:
        return vocabulary.special_text(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def joined(parts: Iterable[Part]) -> Part | None:
    """The parts' lists, each put together; None without parts."""
    whole: Part | None = None
    for part in parts:
        if whole is None:
            whole = {key: list(v) if isinstance(v, list) else v for key, v in part.items()}
            continue
        for key, value in part.items():
            if isinstance(value, list):
                whole[key] += value
    return whole
