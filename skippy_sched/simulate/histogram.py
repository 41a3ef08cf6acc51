"""Percentiles of any number of values in constant memory: buckets of equal relative width.

Knows positive numbers. Percentiles are exact to half a bucket, mean and extremes to the digit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

#: A bucket is 1 % wide: percentiles are within half a percent.
GROWTH = 1.01
SMALLEST = 1e-7
BUCKETS = 3400  # up to more than 10^7
#: Values are counted in blocks of this size; one by one would cost a logarithm each.
PENDING_MAX = 8192


class Histogram:
    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, dtype=np.int64)
        self._pending: list[float] = []
        self._count = 0
        self._sum = 0.0
        self._min = math.inf
        self._max = 0.0

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) >= PENDING_MAX:
            self._flush()

    def extend(self, values: Iterable[float]) -> None:
        self._pending.extend(values)
        if len(self._pending) >= PENDING_MAX:
            self._flush()

    def _flush(self) -> None:
        if not self._pending:
            return
        values = np.array(self._pending)
        self._pending.clear()
        self._count += len(values)
        self._sum += float(values.sum())
        self._min = min(self._min, float(values.min()))
        self._max = max(self._max, float(values.max()))
        buckets = np.log(np.maximum(values, SMALLEST) / SMALLEST) / math.log(GROWTH)
        buckets = np.minimum(buckets.astype(np.int64), BUCKETS - 1)
        self._counts += np.bincount(buckets, minlength=BUCKETS)

    def __len__(self) -> int:
        self._flush()
        return self._count

    @property
    def mean(self) -> float:
        self._flush()
        return self._sum / self._count if self._count else math.nan

    @property
    def max(self) -> float:
        self._flush()
        return self._max if self._count else math.nan

    def percentile(self, percent: float) -> float:
        """The value of that rank, at the middle of its bucket; NaN when there are none."""
        self._flush()
        if not self._count:
            return math.nan
        rank = max(1, math.ceil(self._count * percent / 100))
        bucket = int(np.searchsorted(np.cumsum(self._counts), rank))
        middle: float = SMALLEST * GROWTH ** (bucket + 0.5)
        return min(max(middle, self._min), self._max)
