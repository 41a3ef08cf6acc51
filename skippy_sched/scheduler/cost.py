"""What an iteration costs: a linear model fitted while running, and the prompt tokens it allows.

seconds ≈ fixed + per_row · decode rows + per_token · prefill tokens + per_cached · tokens already
in the KV caches of the rows. Knows counts and seconds only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Observations fade by this factor: about the last 200 iterations count.
FADE = 0.995
#: How strongly the first guess holds before there is evidence, in observations.
PRIOR_WEIGHT = 0.5
#: Cached tokens are counted in thousands, so that all coefficients have a like size.
CACHED_UNIT = 1000.0
#: Solving costs about 100 microseconds; the first observations are worth it each time.
FIT_EVERY = 16
#: A coefficient that was fitted to nothing can still come back from this.
SMALLEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration's size, as the cost model sees it."""

    decode_rows: int
    prefill_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per iteration, per decode row, per prefill token, per cached token."""

    fixed_s: float = 2e-3
    decode_row_s: float = 2e-3
    prefill_token_s: float = 2e-3
    cached_token_s: float = 1e-7

    def predict(self, work: Work) -> float:
        return (
            self.fixed_s
            + self.decode_row_s * work.decode_rows
            + self.prefill_token_s * work.prefill_tokens
            + self.cached_token_s * work.cached_tokens
        )

    def prefill_tokens_within(self, seconds: float, work: Work) -> int:
        """How many more prefill tokens fit beside ``work``; 0 when it alone takes longer."""
        left = seconds - self.predict(work)
        return max(0, int(left / max(self.prefill_token_s, 1e-9)))


class CostModel:
    """Ridge regression with fading memory; the ridge pulls towards the latest fit.

    A coefficient that the recent work says nothing about (no prefill for an hour) keeps its
    value instead of drifting.
    """

    def __init__(self, initial: Coefficients | None = None) -> None:
        self.coefficients = initial or Coefficients()
        self._gram = [0.0] * 10  # upper triangle of the 4 x 4 matrix, by rows
        self._moment = [0.0] * 4
        self._seen = 0
        #: seconds to take one token's state out and bring it back
        self.swap_token_s = 2e-5

    def observe_swap(self, tokens: int, seconds: float) -> None:
        """Learn from states taken out or brought back; a swap is one of each."""
        if tokens:
            self.swap_token_s += 0.3 * (2 * seconds / tokens - self.swap_token_s)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one iteration; adding up is cheap, so it solves only now and then."""
        # Divided by the time, so that errors are relative: 10 ms and 1 s weigh the same.
        weight = 1.0 / max(seconds, 1e-6)
        a, b, c, d = (
            weight,
            weight * work.decode_rows,
            weight * work.prefill_tokens,
            weight * work.cached_tokens / CACHED_UNIT,
        )
        products = (a * a, a * b, a * c, a * d, b * b, b * c, b * d, c * c, c * d, d * d)
        self._gram = [FADE * old + new for old, new in zip(self._gram, products, strict=True)]
        self._moment = [
            FADE * old + new for old, new in zip(self._moment, (a, b, c, d), strict=True)
        ]
        self._seen += 1
        if self._seen <= FIT_EVERY or self._seen % FIT_EVERY == 0:
            self.coefficients = self._fit()

    def _fit(self) -> Coefficients:
        old = self.coefficients
        scale = np.array(
            (old.fixed_s, old.decode_row_s, old.prefill_token_s, old.cached_token_s * CACHED_UNIT)
        )
        scale = np.maximum(scale, SMALLEST_S)
        # In units of the old coefficients the ridge means the same for each of them.
        gram = np.zeros((4, 4))
        gram[np.triu_indices(4)] = self._gram
        gram = (gram + np.triu(gram, 1).T) * np.outer(scale, scale)
        moment = np.array(self._moment) * scale
        ratio = np.zeros(4)
        free = list(range(4))
        while free:  # each round pins the most negative coefficient at zero
            ridge = PRIOR_WEIGHT * np.eye(len(free))
            solved = np.linalg.solve(gram[np.ix_(free, free)] + ridge, moment[free] + PRIOR_WEIGHT)
            if (solved >= 0).all():
                ratio[free] = solved
                break
            free.pop(int(np.argmin(solved)))
        fixed, row, token, cached = (ratio * scale).tolist()
        return Coefficients(fixed, row, token, cached / CACHED_UNIT)
