"""How fast waiting requests leave the queue, measured while there is one.

Answers when a place will be free and when a waiting request will start. Knows counts and times.
"""

from __future__ import annotations

#: Each request that leaves fades the older ones: about the last 32 count, at any speed.
FADE = 1 - 1 / 32


class DrainRate:
    """Requests and prompt tokens that left the queue, and the seconds that it took."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._stalled_s = 0.0  # of them, those since the last one left
        self._since: float | None = None  # the last plan, if it left somebody waiting
        self._promised_at = 0.0

    def observe(self, now: float, requests: int, tokens: int, *, is_waiting: bool) -> None:
        """A plan took so many requests, with so many prompt tokens; ``is_waiting``: not all."""
        if self._since is not None:
            self._stalled_s += now - self._since
            self._seconds += now - self._since
            if requests > 0:
                kept = FADE**requests
                self._requests = self._requests * kept + requests
                self._tokens = self._tokens * kept + tokens
                self._seconds = (self._seconds - self._stalled_s) * kept + self._stalled_s
                self._stalled_s = 0.0
        self._since = now if is_waiting else None

    def start_in_s(self, position: int) -> float | None:
        """Seconds until the request at this place of the queue starts; the next one is at 1.

        None while no request has left a queue yet.
        """
        return position * self._seconds / self._requests if self._requests else None

    def room_in_s(self, waiting: int, now: float) -> float:
        """Seconds until one more may join a queue that is full with so many.

        Each call promises one place, so that those who are refused do not all come back at once
        for the same one; never more than the time in which the whole queue has left.
        """
        each_s = self.start_in_s(1)
        if each_s is None:
            return self._seconds  # nobody has left yet: as long again as it has lasted
        self._promised_at = max(self._promised_at, now) + each_s
        self._promised_at = min(self._promised_at, now + each_s * waiting)
        return self._promised_at - now

    def tokens_in_s(self, tokens: int) -> float:
        """Seconds until so many prompt tokens have left the queue."""
        return tokens * self._seconds / self._tokens if self._tokens else self._seconds
