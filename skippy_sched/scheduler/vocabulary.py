"""Between text and tokens: what a text's tokens are, and what each token adds to a text.

Knows the model's vocabulary; text.py puts the pieces of a stream together.
"""

from __future__ import annotations

import asyncio

from skippy_sched.errors import InvalidRequest
from skippy_sched.native import Model
from skippy_sched.scheduler.text import Pieces

#: Longer texts are tokenized in a thread: about a millisecond of work at this length.
TOKENIZE_INLINE_CHARS = 4096


class Vocabulary:
    """``model`` may be replaced by another one that was opened from the same file."""

    def __init__(self, model: Model, end_tokens: frozenset[int]) -> None:
        self.model = model
        self._end_tokens = end_tokens
        self.pieces = Pieces(self._spell)

    async def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        Raises InvalidRequest for a NUL character.
        """
        if "\0" in text:
            raise InvalidRequest("the prompt contains a NUL character", param="prompt")
        if len(text) <= TOKENIZE_INLINE_CHARS:
            return self.model.tokenize(text, add_special=add_special)
        return await asyncio.to_thread(self.model.tokenize, text, add_special=add_special)

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for tokens that are not for a reader."""
        piece = self.pieces[token]
        return piece.encode() if isinstance(piece, str) else piece

    def _spell(self, token: int) -> bytes:
        hidden = token in self._end_tokens or self.model.is_control(token)
        return b"" if hidden else self.model.detokenize([token])

    def token_of(self, text: str) -> int | None:
        """The one token that is written so, if there is one."""
        tokens = self.model.tokenize(text, add_special=False)
        return tokens[0] if len(tokens) == 1 else None

    def special_text(self, token: int) -> str:
        """How a special token is written in a text; empty for -1, which means no token."""
        return self.model.detokenize([token]).decode("utf-8", "replace") if token >= 0 else ""
