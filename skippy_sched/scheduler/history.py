"""What has happened to one request: the seconds it spent in each state, and its latest steps.

Written where the state changes and once per prompt chunk, never per token, so that it costs the
same for any length. Knows instants and counts; explain.py puts them into words.
"""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

#: Steps kept per request; chunks of a very long prompt push out its first ones.
STEPS_MAX = 64

Where = Literal["waiting", "prefill", "decode", "paused", "ended"]
What = Literal[
    "admitted",  # given a lane, with so many tokens restored from a saved prefix
    "swapped in",  # given a lane, with so many tokens brought back from host memory
    "chunk",  # so many tokens of its prompt were computed
    "decoding",  # its prompt is computed, all so many tokens
    "swapped out",  # made room; so many computed tokens are kept in host memory
    "preempted",  # made room; so many computed tokens have to be computed again
    "restarted",  # its session was lost with so many tokens, which are computed again
    "engine lost",  # the same, for all who ran
    "ended",  # with so many tokens generated
]


class Step(NamedTuple):
    """``at`` in seconds on the scheduler's clock."""

    at: float
    what: What
    tokens: int


class History:
    """``seconds`` by state, of the states that were left; ``where`` it has been since ``since``."""

    __slots__ = ("chunks", "seconds", "since", "steps", "steps_dropped", "where")

    def __init__(self, now: float) -> None:
        self.where: Where = "waiting"
        self.since = now
        self.seconds: dict[Where, float] = {}
        self.steps: deque[Step] = deque(maxlen=STEPS_MAX)
        self.steps_dropped = 0
        self.chunks = 0

    def enter(self, where: Where, now: float) -> None:
        self.seconds[self.where] = self.seconds.get(self.where, 0.0) + now - self.since
        self.where, self.since = where, now

    def step(self, what: What, tokens: int, now: float) -> None:
        if len(self.steps) == STEPS_MAX:
            self.steps_dropped += 1
        self.steps.append(Step(now, what, tokens))

    def chunk(self, tokens: int, now: float) -> None:
        self.chunks += 1
        self.step("chunk", tokens, now)

    def seconds_until(self, now: float) -> dict[Where, float]:
        """All states that it has been in, the present one included."""
        seconds = dict(self.seconds)
        if self.where != "ended":
            seconds[self.where] = seconds.get(self.where, 0.0) + now - self.since
        return seconds
