"""Synthetic traffic: Poisson or bursty arrivals, log-normal lengths, tenants by share.

Endless and seeded; drawn in blocks, because a million requests are drawn in one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from skippy_sched.simulate.traces import Arrival

#: Drawn at once: enough to make numpy's cost per draw small.
BLOCK = 4096
#: Half the width between the 5th and the 95th percentile, in standard deviations.
Z95 = 1.6449


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts: a tenth of all lie outside ``low`` to ``high``, half each side.

    Clipped to a quarter of low and four times high; low == high: constant.
    """

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``"100-500"`` or ``"256"``; raises ValueError."""
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text}: expected LOW-HIGH with 1 <= LOW <= HIGH")
        return lengths

    def draw(self, generator: np.random.Generator) -> np.ndarray[Any, Any]:
        mean = (math.log(self.low) + math.log(self.high)) / 2
        sigma = (math.log(self.high) - math.log(self.low)) / 2 / Z95
        drawn = np.exp(generator.normal(mean, sigma, BLOCK)).round()
        if self.low == self.high:
            return np.full(BLOCK, self.low)
        return np.clip(drawn, max(1, self.low // 4), self.high * 4).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Workload:
    """``rate``: requests per second. ``burstiness``: shape of the gamma distributed gaps; 1 is a
    Poisson process, below 1 comes in bursts. ``tenants``: share of the requests by name."""

    rate: float
    prompt: Lengths
    output: Lengths
    burstiness: float = 1.0
    tenants: Mapping[str, float] = field(default_factory=dict)
    prefixes: int = 0
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        """Endless."""
        generator = np.random.default_rng(self.seed)
        names = list(self.tenants) or ["default"]
        shares = np.array(list(self.tenants.values()) or [1.0])
        start = 0.0
        while True:
            gaps = generator.gamma(self.burstiness, 1 / (self.rate * self.burstiness), BLOCK)
            times = start + np.cumsum(gaps)
            start = float(times[-1])
            tenants = generator.choice(len(names), BLOCK, p=shares / shares.sum())
            prefixes = generator.integers(max(1, self.prefixes), size=BLOCK).tolist()
            for at_s, prompt, output, tenant, prefix in zip(
                times.tolist(),
                self.prompt.draw(generator).tolist(),
                self.output.draw(generator).tolist(),
                tenants.tolist(),
                prefixes,
                strict=True,
            ):
                yield Arrival(
                    at_s,
                    prompt,
                    output,
                    names[tenant],
                    prefix=str(prefix) if self.prefixes else None,
                )
