"""Drafts: guesses at a request's next tokens, which one native verify call checks at once.

Why the text stays exact. A draft follows from the tokens before it: an n-gram lookup in them, or
the model's own deterministic heads. The verify call draws from the target's distribution after
each position, as a decode would, and what it drew is what the request gets; the draft only
decides how far the draws are valid. So each token has the target's probability given the text
before it. This is the rule of Leviathan et al. 2023 ("Fast Inference from Transformers via
Speculative Decoding", section 2.3) for a draft distribution with all its weight on one token d:
accept d with min(1, p(d) / 1), else draw from max(0, p - q), that is from p without d. Greedy
requests therefore get the same text as without drafts wherever the engine computes a row of
several tokens bit by bit as one of a single token; and so do sampled ones with the engines here,
which draw by seed and position. A library whose generator starts again after a trim keeps each
token's distribution, but repeats draws.

Proposes only; the planner decides how many, reconcile what came of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from skippy_sched.config import SpeculationSection
from skippy_sched.scheduler.request import Request

#: Longest match first: what followed four equal tokens is a better guess than after two.
NGRAM_MAX = 4
#: A single equal token is found nearly everywhere and says nearly nothing.
NGRAM_MIN = 2
#: Bytes of a token id in a history.
WIDTH = array("i").itemsize


class NgramHistory:
    """What followed the latest earlier occurrence of the last tokens (prompt lookup).

    Tokens are kept as bytes, so that the search is one of the C library's: some ten microseconds
    in 30,000 tokens. Only what is new is taken over at each call.
    """

    __slots__ = ("_known", "_length")

    def __init__(self) -> None:
        self._known = bytearray()
        self._length = 0

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens; ``tokens`` are those of the call before, and more."""
        self._known += array("i", tokens[self._length :]).tobytes()
        self._length = len(tokens)
        for size in range(min(NGRAM_MAX, len(tokens) - 1), NGRAM_MIN - 1, -1):
            start = self._after_latest(size)
            if start:
                period = len(tokens) - start  # a match that overlaps the end goes round
                return [tokens[start + i % period] for i in range(count)]
        return []

    def _after_latest(self, size: int) -> int:
        """Where the latest earlier occurrence of the last ``size`` tokens ends; 0: nowhere."""
        known = self._known
        pattern = bytes(known[-size * WIDTH :])
        end = len(known) - 1  # so that it does not find the end itself
        while (found := known.rfind(pattern, 0, end)) >= 0:
            if found % WIDTH == 0:
                return found // WIDTH + size
            end = found + len(pattern) - 1
        return 0


class Speculation:
    """The drafts of all decoding requests."""

    def __init__(self, settings: SpeculationSection) -> None:
        self.draft_tokens = settings.draft_tokens
        self.requests_max = settings.requests_max
        #: whether a verify call is also asked for the model's own draft of what follows
        self.proposes = settings.method == "mtp"
        self._histories: dict[int, NgramHistory] = {}
        #: by request, the draft and the number of tokens that it follows
        self._proposals: dict[int, tuple[int, Sequence[int]]] = {}

    def draft(self, request: Request, count: int) -> Sequence[int]:
        """A guess at its next tokens, at most ``count``; the same for the same tokens."""
        if self.proposes:
            length, proposed = self._proposals.get(request.key, (0, ()))
            return proposed[:count] if length == len(request.tokens) else ()
        history = self._histories.get(request.key)
        if history is None:
            history = self._histories[request.key] = NgramHistory()
        return history.draft(request.tokens, count)

    def proposed(self, request: Request, draft: Sequence[int]) -> None:
        """The model's own guess at what follows the request's tokens."""
        self._proposals[request.key] = len(request.tokens), draft

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._histories.pop(request.key, None)
        self._proposals.pop(request.key, None)
