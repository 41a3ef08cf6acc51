"""What an iteration costs: a linear model fitted while running, and the prompt tokens it allows.

seconds ≈ fixed + per_row · decode rows + per_token · prefill tokens + per_attended · earlier tokens
that the computed ones look at. Knows counts and seconds only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

#: Observations fade by this factor: about the last 200 iterations count.
FADE = 0.995
#: How strongly the first guess holds before there is evidence, in observations.
PRIOR_WEIGHT = 0.5
#: Attended tokens are counted in thousands, so that all coefficients have a like size.
ATTENDED_UNIT = 1000.0
#: Solving costs about 100 microseconds; the first observations are worth it each time.
FIT_EVERY = 16
#: A coefficient that was fitted to nothing can still come back from this.
SMALLEST_S = 1e-6
#: Of the iterations that hold a prompt, this share is to end within the time they were planned for.
WITHIN_TARGET = 0.95
#: How fast ``CostModel.caution`` follows, and its bounds: on a machine whose speed leaps, prompts
#: must still advance.
CAUTION_STEP = 0.02
CAUTION_MIN, CAUTION_MAX = 0.9, 1.25


@dataclass(frozen=True, slots=True)
class Work:
    """An iteration's size, as the cost model sees it.

    ``attended_tokens``: for each token computed, how many tokens precede it in its sequence. A
    chunk late in a long prompt costs about twice what one at its start does.
    """

    decode_rows: int
    prefill_tokens: int
    attended_tokens: int


def attended_by_chunk(start: int, tokens: int) -> int:
    """What ``tokens`` at positions ``start`` and up look at."""
    return tokens * start + tokens * (tokens - 1) // 2


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds per iteration, per decode row, per prefill token, per attended token."""

    fixed_s: float = 2e-3
    decode_row_s: float = 2e-3
    prefill_token_s: float = 2e-3
    attended_token_s: float = 1e-7

    def predict(self, work: Work) -> float:
        return (
            self.fixed_s
            + self.decode_row_s * work.decode_rows
            + self.prefill_s(work.prefill_tokens, work.attended_tokens)
        )

    def prefill_s(self, tokens: int, attended_tokens: int) -> float:
        """What so many prefill tokens add to an iteration."""
        return self.prefill_token_s * tokens + self.attended_token_s * attended_tokens

    def prefill_tokens_within(self, seconds: float, start: int) -> int:
        """How many prefill tokens at positions ``start`` and up fit into ``seconds``."""
        if seconds <= 0:
            return 0
        linear = max(self.prefill_token_s + self.attended_token_s * start, 1e-9)
        # The root of linear · n + attended / 2 · n² = seconds, in the form that loses no digits.
        return int(2 * seconds / (linear + sqrt(linear**2 + 2 * self.attended_token_s * seconds)))


class CostModel:
    """Ridge regression with fading memory; the ridge pulls towards the latest fit.

    A coefficient that the recent work says nothing about (no prefill for an hour) keeps its
    value instead of drifting. ``caution`` is the quantile ``WITHIN_TARGET`` of measured over
    predicted seconds of the iterations that hold a prompt beside decodes: a plan for that part of
    its time stays within it that often, however noisy the machine.
    """

    def __init__(self, initial: Coefficients | None = None) -> None:
        self.coefficients = initial or Coefficients()
        self._gram = [0.0] * 10  # upper triangle of the 4 x 4 matrix, by rows
        self._moment = [0.0] * 4
        self._seen = 0
        self.caution = 1.0
        #: seconds to take one token's state out and bring it back
        self.swap_token_s = 2e-5

    def observe_swap(self, tokens: int, seconds: float) -> None:
        """Learn from states taken out or brought back; a swap is one of each."""
        if tokens:
            self.swap_token_s += 0.3 * (2 * seconds / tokens - self.swap_token_s)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one iteration; adding up is cheap, so it solves only now and then."""
        if work.decode_rows and work.prefill_tokens:
            late = seconds > self.caution * self.coefficients.predict(work)
            # Robbins and Monro 1951: in balance, the steps up and down are as the shares.
            step = CAUTION_STEP * (WITHIN_TARGET if late else WITHIN_TARGET - 1)
            self.caution = min(max(self.caution * (1 + step), CAUTION_MIN), CAUTION_MAX)
        # Divided by the time, so that errors are relative: 10 ms and 1 s weigh the same.
        weight = 1.0 / max(seconds, 1e-6)
        a, b, c, d = (
            weight,
            weight * work.decode_rows,
            weight * work.prefill_tokens,
            weight * work.attended_tokens / ATTENDED_UNIT,
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
            (
                old.fixed_s,
                old.decode_row_s,
                old.prefill_token_s,
                old.attended_token_s * ATTENDED_UNIT,
            )
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
        fixed, row, token, attended = (ratio * scale).tolist()
        return Coefficients(fixed, row, token, attended / ATTENDED_UNIT)
