"""Time and randomness, passed in: the only module that reads the system's clocks and entropy.

Knows nothing of requests. With a VirtualClock and a seeded generator a whole run is repeatable.
"""

from __future__ import annotations

import random
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a clock that never goes back; only differences mean anything."""

    def now(self) -> float: ...


class MonotonicClock:
    """The system's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance_to(self, instant: float) -> None:
        assert instant >= self._now, "a clock never goes back"
        self._now = instant


def wall_time() -> float:
    """Seconds since 1970, for time stamps that people or clients read."""
    return time.time()  # noqa: TID251 - the one place


def random_generator(seed: int | None = None) -> random.Random:
    """A generator of its own; unseeded it draws on the system's entropy."""
    return random.Random(seed)
