"""Queue, running requests and TTFT over time, in a bounded number of points.

Points are spans of equal width; when they get too many, neighbours are merged.
"""

from __future__ import annotations

from dataclasses import dataclass

#: More points than a plot has pixels.
POINTS_MAX = 2000
#: Width of a point at the beginning.
FIRST_WIDTH_S = 0.01


@dataclass(slots=True)
class Point:
    """The most that waited and ran within the span; TTFT of the first tokens that fell in it."""

    queue: int = 0
    running: int = 0
    ttft_sum_s: float = 0.0
    ttft_max_s: float = 0.0
    ttft_count: int = 0

    def merge(self, other: Point) -> None:
        self.queue = max(self.queue, other.queue)
        self.running = max(self.running, other.running)
        self.ttft_sum_s += other.ttft_sum_s
        self.ttft_max_s = max(self.ttft_max_s, other.ttft_max_s)
        self.ttft_count += other.ttft_count


class Timeline:
    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self.points: dict[int, Point] = {}

    def queue(self, at_s: float, waiting: int, running: int) -> None:
        point = self._point(at_s)
        if waiting > point.queue:
            point.queue = waiting
        if running > point.running:
            point.running = running

    def first_token(self, at_s: float, ttft_s: float) -> None:
        point = self._point(at_s)
        point.ttft_sum_s += ttft_s
        point.ttft_max_s = max(point.ttft_max_s, ttft_s)
        point.ttft_count += 1

    def _point(self, at_s: float) -> Point:
        index = int(at_s / self.width_s)
        while index >= POINTS_MAX:
            self.halve()
            index = int(at_s / self.width_s)
        found = self.points.get(index)
        if found is None:
            found = self.points[index] = Point()
        return found

    def halve(self) -> None:
        """Merge each two neighbours."""
        self.width_s *= 2
        old, self.points = self.points, {}
        for number, point in old.items():
            self.points.setdefault(number // 2, Point()).merge(point)

    def rows(self, points_max: int = POINTS_MAX) -> list[dict[str, float | None]]:
        """In order of time, for JSON and plots."""
        while self.points and max(self.points) >= points_max:
            self.halve()
        return [
            {
                "at_s": index * self.width_s,
                "queue": point.queue,
                "running": point.running,
                "mean_ttft_ms": 1000 * point.ttft_sum_s / point.ttft_count
                if point.ttft_count
                else None,
                "max_ttft_ms": 1000 * point.ttft_max_s if point.ttft_count else None,
            }
            for index, point in sorted(self.points.items())
        ]
