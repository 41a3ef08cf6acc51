"""Turns tokens into text: whole characters only, and never a part of a stop string.

Works on one stream. Knows bytes and characters; does not know where tokens come from.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping


class Pieces(dict[int, str | bytes]):
    """What each token adds to a text: characters, or bytes that are not whole characters."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        """``spell`` is asked once for each token."""
        super().__init__()
        self._spell = spell

    def __missing__(self, token: int) -> str | bytes:
        piece = self._spell(token)
        try:
            known: str | bytes = piece.decode()
        except UnicodeDecodeError:
            known = piece
        self[token] = known
        return known


class TextAssembler:
    """Incremental text of one stream.

    Bytes of an incomplete character are held back until it is whole (an incomplete tail is
    dropped at the end); invalid bytes become U+FFFD. Text that could still become a stop string
    is held back too, and nothing at or after a match is ever given out.
    """

    __slots__ = ("_decoder", "_held", "_is_partial", "_pieces", "_stops", "stopped_by")

    def __init__(self, pieces: Mapping[int, str | bytes], stops: Iterable[str] = ()) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_partial = False  # whether the decoder holds bytes back
        self._stops = tuple(stops)
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """The text that this token sets free; empty after a stop string has matched."""
        piece = self._pieces[token]
        text = self._decode(piece) if self._is_partial or isinstance(piece, bytes) else piece
        if not self._stops:
            return text
        if self.stopped_by is not None:
            return ""
        text = self._held + text
        keep_from = len(text) - self._could_become_stop(text)
        match = self._first_match(text)
        if match is not None and match[0] <= keep_from:
            return self._stop(text, match)
        # A match that starts after what is still open has to wait: the earlier start wins.
        self._held = text[keep_from:]
        return text[:keep_from]

    def flush(self) -> str:
        """The text held back, at the end of the stream; an incomplete character is dropped."""
        text, self._held = self._held, ""
        match = self._first_match(text)
        return text if match is None else self._stop(text, match)

    def _decode(self, piece: str | bytes) -> str:
        text = self._decoder.decode(piece.encode() if isinstance(piece, str) else piece)
        self._is_partial = bool(self._decoder.getstate()[0])
        return text

    def _stop(self, text: str, match: tuple[int, str]) -> str:
        start, self.stopped_by = match
        self._held = ""
        return text[:start]

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The earliest start wins; of stops that start together, the one given first."""
        found = [(text.find(stop), order, stop) for order, stop in enumerate(self._stops)]
        found = [match for match in found if match[0] >= 0]
        if not found:
            return None
        start, _, stop = min(found)
        return start, stop

    def _could_become_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a proper beginning of a stop string."""
        longest = max(len(stop) for stop in self._stops) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[len(text) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
