"""What has gone on lately: iterations, latencies, and a sample of the counters each second.

Observes the engine between iterations; a reader gets what is kept and never waits for the engine.
All on the event loop. What readers are shown is made in live_facts.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.observe import IterationRecord, Observer, RequestRecord, Statistics

#: Enough to see a pattern of some seconds on a small model.
ITERATIONS_MAX = 200
#: As often as a person looks, and seldom enough to cost nothing.
SAMPLE_S = 1.0
#: Five minutes of samples, for the charts.
SAMPLES_MAX = 300
#: Latencies are of the last minute, and at most of so many gaps and requests.
LATENCY_S = 60.0
GAPS_MAX = 2_000
TTFTS_MAX = 500
#: Ended requests whose ids are kept for the iterations that they ran in.
NAMES_MAX = 500
#: Tenants counted; idle ones are forgotten above it.
TENANTS_MAX = 1_000


class Iterated(NamedTuple):
    """An iteration: its decode rows as (lane, key), its chunks as (lane, key, tokens)."""

    number: int
    submitted_at: float
    reconciled_at: float
    decodes: Sequence[tuple[int, int]]
    chunks: Sequence[tuple[int, int, int]]
    tokens: int


class Percentiles(NamedTuple):
    """In seconds; None: nothing was seen."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Sample:
    """The counters at one moment, and the latencies since the sample before."""

    at: float
    counted: Statistics
    #: tokens generated for each tenant since the start
    generated: Counter[str]
    itl: Percentiles
    ttft: Percentiles


class Live:
    """An observer that keeps what the views show, and hands everything on to the next observer.

    Before ``watch`` nothing is sampled.
    """

    def __init__(self, following: Observer) -> None:
        self.iterations: deque[Iterated] = deque(maxlen=ITERATIONS_MAX)
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        #: request key -> (id, tenant), of those in ``iterations``, and more
        self.names: dict[int, tuple[str, str]] = {}
        #: of the last minute, as of the last sample
        self.itl = self.ttft = Percentiles(None, None, None)
        #: when the watched engine was given; tells one run of the daemon from another
        self.began_at = 0.0
        self._following = following
        self._engine: Engine | None = None
        self._keys: Sequence[int] = ()
        self._decodes: Sequence[tuple[int, int]] = ()
        self._ended_keys: deque[int] = deque()
        #: (when, the gaps of one iteration)
        self._gaps: deque[tuple[float, list[float]]] = deque()
        self._gaps_kept = 0
        #: (when, TTFT) of requests that have ended
        self._ttfts: deque[tuple[float, float]] = deque(maxlen=TTFTS_MAX)
        self._generated: Counter[str] = Counter()

    def watch(self, engine: Engine) -> None:
        self._engine = engine
        self.began_at = engine.requests.now()
        self.sample()

    # --- fed ------------------------------------------------------------------------------------

    def on_iteration(self, record: IterationRecord) -> None:
        self._following.on_iteration(record)
        tokens = record.decode_requests + record.draft_tokens + record.prefill_tokens
        if not tokens:
            return  # it only closed sessions
        keys = record.iteration.decode_keys
        if keys != self._keys:  # most iterations have the rows of the one before
            self._keys = keys
            self._decodes = [(request.lane, request.key) for request in record.decodes]
        decodes = self._decodes
        if record.verify_requests:
            decodes = [*decodes, *((r.lane, r.key) for r in record.verify_requests)]
        chunks = []
        for request, chunk in zip(record.chunk_requests, record.iteration.chunks, strict=True):
            chunks.append((request.lane, request.key, len(chunk.tokens)))
            self.names[request.key] = (request.name, request.tenant)
        self.iterations.append(
            Iterated(
                record.number, record.submitted_at, record.reconciled_at, decodes, chunks, tokens
            )
        )
        if gaps := record.token_gaps:
            self._gaps.append((record.reconciled_at, gaps))
            self._gaps_kept += len(gaps)
            while self._gaps_kept > GAPS_MAX:
                self._gaps_kept -= len(self._gaps.popleft()[1])

    def on_request_end(self, record: RequestRecord) -> None:
        self._following.on_request_end(record)
        self._generated[record.tenant] += record.usage.completion_tokens
        if record.first_token_at is not None:
            self._ttfts.append((record.first_token_at, record.first_token_at - record.arrived_at))
        self._ended_keys.append(record.key)
        if len(self._ended_keys) > NAMES_MAX:
            self.names.pop(self._ended_keys.popleft(), None)

    # --- sampled --------------------------------------------------------------------------------

    async def keep_sampling(self) -> None:
        """Take a sample each second; runs until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        """Read the engine's counters; costs as much as there are running requests."""
        if self._engine is None:
            return
        now, counted = self._engine.requests.now(), self._engine.statistics()
        generated = self._generated.copy()
        ttfts = list(self._ttfts)
        for request in self._engine.requests.explain_all(counted.running):
            generated[request.tenant] += request.completion_tokens
            if (first := request.first_token_at) is not None:
                ttfts.append((first, first - request.arrived_at))
        if len(generated) > TENANTS_MAX:
            self._forget_idle(generated)
        since = self.samples[-1].at if self.samples else now
        self.itl = self._gaps_since(now - LATENCY_S)
        self.ttft = _percentiles([span for at, span in ttfts if at > now - LATENCY_S])
        lately = _percentiles([span for at, span in ttfts if at > since])
        self.samples.append(Sample(now, counted, generated, self._gaps_since(since), lately))

    def _gaps_since(self, since: float) -> Percentiles:
        return _percentiles([gap for at, gaps in self._gaps if at > since for gap in gaps])

    def _forget_idle(self, generated: Counter[str]) -> None:
        """Tenants that got nothing since the oldest sample."""
        before = self.samples[0].generated if self.samples else generated
        for tenant, tokens in generated.items():
            if before[tenant] == tokens:
                self._generated.pop(tenant, None)


def _percentiles(seconds: list[float]) -> Percentiles:
    if not seconds:
        return Percentiles(None, None, None)
    return Percentiles(*(float(each) for each in np.percentile(seconds, (50, 95, 99))))
