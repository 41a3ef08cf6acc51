"""Prometheus metrics, in the names that dashboards for vLLM know, under ``skippy:``.

Gauges and counters are read from the engine's statistics at each scrape, so they cannot go stale;
histograms are fed by the engine between iterations. All on the event loop, without locks.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from skippy_sched.clock import Clock, MonotonicClock
from skippy_sched.errors import RequestError
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.explain import Requests
from skippy_sched.scheduler.observe import IterationRecord, RequestRecord, Statistics

PREFIX = "skippy:"
VLLM_PREFIX = "vllm:"

#: From an iteration of a small model to a request that waited for half an hour.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
#: Python's own share of an iteration is microseconds.
SHORT_SECONDS = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 5.0),
)
SEQUENCES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
PREEMPTIONS = (0, 1, 2, 3, 4, 8)
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

#: Often enough to catch what a person would notice, seldom enough to cost nothing.
LAG_PROBE_S = 0.05


class Histogram:
    """Counts per bucket; upper bounds are inclusive."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as the exposition wants them."""
        cumulative, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            cumulative += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(cumulative)))
        return rows


#: name -> (documentation, attribute of Statistics)
GAUGES = {
    "num_requests_running": ("Requests that have a lane.", "running"),
    "num_requests_waiting": ("Requests that wait for a lane.", "waiting"),
    "waiting_prompt_tokens": ("Prompt tokens that wait.", "waiting_tokens"),
    "lanes": ("Lanes: requests that can run at once.", "lanes"),
    "lanes_free": ("Lanes that no request holds.", "lanes_free"),
    "kv_cache_tokens": ("Tokens in the KV cache.", "kv_tokens"),
    "prefixes": ("Prefixes kept for requests that share them.", "prefixes"),
    "prefix_tokens": ("Tokens of the prefixes kept.", "prefix_tokens"),
    "kv_cache_tokens_max": ("Tokens that the KV cache can hold.", "kv_tokens_max"),
}
COUNTERS = {
    "requests_accepted": ("Requests taken into the queue.", "accepted"),
    "prompt_tokens": ("Prompt tokens of accepted requests.", "prompt_tokens"),
    "prefix_cache_queries": ("Prompt tokens that were looked up.", "prompt_tokens"),
    "prefix_cache_hits": ("Prompt tokens that needed no computing.", "cached_tokens"),
    "generation_tokens": ("Tokens generated.", "generated_tokens"),
    "prefill_tokens": ("Tokens computed in prefill.", "prefill_tokens"),
    "recomputed_tokens": ("Tokens computed again after a fault.", "recomputed_tokens"),
    "num_preemptions": ("Running requests that had to make room.", "preemptions"),
    "swaps": ("Preemptions that kept what was computed.", "swaps"),
    "spec_decode_num_draft_tokens": ("Tokens guessed ahead and verified.", "drafted_tokens"),
    "spec_decode_num_accepted_tokens": ("Of these, tokens that were right.", "accepted_tokens"),
    "iterations": ("Iterations executed.", "iterations"),
    "decode_iterations": ("Iterations with decode sequences.", "decode_iterations"),
    "decode_sequences": ("Decode sequences over all iterations.", "decode_sequences"),
    "native_calls": ("Native batch calls.", "native_calls"),
    "partial_batches": ("Batches that stopped at a failing entry.", "partial_batches"),
    "entries_requeued": ("Entries put back unexecuted.", "requeued_entries"),
}


#: What vLLM has, too: our name -> its name, where it is another one.
VLLM_NAMES = {
    **{
        name: name
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "prompt_tokens",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "num_preemptions",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "request_success",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "iteration_tokens_total",
            "request_prompt_tokens",
            "request_generation_tokens",
        )
    },
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
}


class Metrics(Collector):
    """The engine's observer, and what is scraped. Before ``watch`` there are no engine numbers."""

    def __init__(
        self, model_name: str, clock: Clock | None = None, *, vllm_names: bool = False
    ) -> None:
        self._vllm_names = vllm_names
        self._labels = {"model_name": model_name}
        self._clock = clock or MonotonicClock()
        self._engine: Engine | None = None
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._cut: Counter[str] = Counter()
        self._connections: Callable[[], int] | None = None
        #: name, documentation, labels of its own, histogram
        self._histograms: list[tuple[str, str, dict[str, str], Histogram]] = []
        seconds = self._seconds
        self._ttft = seconds("time_to_first_token_seconds", "Arrival to first token.")
        self._itl = seconds("inter_token_latency_seconds", "Gap between tokens of a stream.")
        self._tpot = seconds("time_per_output_token_seconds", "Mean gap per request.")
        self._e2e = seconds("e2e_request_latency_seconds", "Arrival to end.")
        self._queue = seconds("request_queue_time_seconds", "Arrival to first planned.")
        self._prefill = seconds("request_prefill_time_seconds", "First planned to first token.")
        self._decode = seconds("request_decode_time_seconds", "First to last token.")
        self._inference = seconds("request_inference_time_seconds", "First planned to end.")
        self._parts = {
            part: self._add(
                "iteration_seconds", "Where an iteration's time goes.", SHORT_SECONDS, part=part
            )
            for part in ("plan", "native", "reconcile")
        }
        self._lag = self._add("loop_lag_seconds", "Lateness of the event loop.", SHORT_SECONDS)
        self._batch = self._add("decode_batch_size", "Decode sequences per iteration.", SEQUENCES)
        self._tokens = self._add("iteration_tokens_total", "Tokens per iteration.", TOKENS)
        self._prompts = self._add("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self._outputs = self._add("request_generation_tokens", "Tokens per request.", TOKENS)
        self._cached = self._add(
            "request_cached_tokens", "Prompt tokens per request that needed no computing.", TOKENS
        )
        self._preemptions = self._add(
            "request_preemptions", "How often a request had to make room.", PREEMPTIONS
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def watch(self, engine: Engine) -> None:
        self._engine = engine

    def watch_connections(self, count: Callable[[], int]) -> None:
        self._connections = count

    def exposition(self, accept: str) -> tuple[str, bytes]:
        """Content type and text of a scrape."""
        encode, content_type = choose_encoder(accept)
        text: bytes = encode(self._registry)
        return content_type, text

    def _add(
        self, name: str, documentation: str, bounds: Iterable[float], **labels: str
    ) -> Histogram:
        histogram = Histogram(bounds)
        self._histograms.append((name, documentation, labels, histogram))
        return histogram

    def _seconds(self, name: str, documentation: str) -> Histogram:
        return self._add(name, documentation, SECONDS)

    # --- fed ------------------------------------------------------------------------------------

    def on_iteration(self, record: IterationRecord) -> None:
        # Streams that decode side by side have the same gap to the last digit.
        for gap_s, streams in Counter(record.token_gaps).items():
            self._itl.observe(gap_s, streams)
        if record.decode_requests:
            self._batch.observe(record.decode_requests)
        self._tokens.observe(record.prefill_tokens + record.decode_requests + record.draft_tokens)
        self._parts["plan"].observe(record.plan_s)
        self._parts["native"].observe(record.native_s)
        self._parts["reconcile"].observe(record.reconcile_s)

    def on_request_end(self, record: RequestRecord) -> None:
        if record.outcome == "finished":
            self._finished[record.finish_reason or "stop"] += 1
        end, planned, first = record.finished_at, record.planned_at, record.first_token_at
        self._e2e.observe(end - record.arrived_at)
        self._outputs.observe(record.usage.completion_tokens)
        if planned is None:
            return
        self._queue.observe(planned - record.arrived_at)
        self._inference.observe(end - planned)
        self._prompts.observe(record.usage.prompt_tokens)
        self._cached.observe(record.usage.cached_tokens)
        self._preemptions.observe(record.preemptions)
        if first is None:
            return
        self._ttft.observe(first - record.arrived_at)
        self._prefill.observe(first - planned)
        self._decode.observe(end - first)
        if (gaps := record.usage.completion_tokens - 1) > 0:
            self._tpot.observe((end - first) / gaps)

    def count_refusal(self, error: RequestError) -> None:
        self._refused[error.code or str(error.http_status)] += 1

    def count_cut(self, reason: str) -> None:
        self._cut[reason] += 1

    async def probe_lag(self) -> None:
        """Measure how late the event loop wakes a sleeper; runs until cancelled."""
        while True:
            due = self._clock.now() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self._lag.observe(max(0.0, self._clock.now() - due))

    # --- scraped --------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()
        if self._vllm_names:
            for family in self._collect():
                if (name := VLLM_NAMES.get(family.name.removeprefix(PREFIX))) is not None:
                    yield _renamed(family, VLLM_PREFIX + name)

    def _collect(self) -> Iterator[Metric]:
        if self._engine is not None:
            yield from self._collect_statistics(self._engine.statistics())
            yield from self._collect_queue(self._engine.requests)
        yield self._counter(
            "request_success", "Requests finished.", "finished_reason", self._finished
        )
        yield self._counter(
            "requests_refused", "Requests answered with an error status.", "reason", self._refused
        )
        if self._connections is not None:
            yield self._gauge("connections", "Open connections.", self._connections())
        tasks = len(asyncio.all_tasks())
        yield self._gauge("event_loop_tasks", "Tasks of the event loop.", tasks)
        yield self._counter(
            "connections_cut", "Connections ended by the daemon.", "reason", self._cut
        )
        yield from self._collect_histograms()

    def _collect_statistics(self, now: Statistics) -> Iterator[Metric]:
        for name, (documentation, attribute) in GAUGES.items():
            yield self._gauge(name, documentation, getattr(now, attribute))
        share = now.kv_tokens / now.kv_tokens_max if now.kv_tokens_max else 0.0
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.", share)
        age_s = now.last_iteration_age_s
        yield self._gauge(
            "last_iteration_age_seconds",
            "Seconds since an iteration ended; -1 before the first.",
            -1.0 if age_s is None else age_s,
        )
        for name, (documentation, attribute) in COUNTERS.items():
            family = CounterMetricFamily(PREFIX + name, documentation, labels=tuple(self._labels))
            family.add_metric(tuple(self._labels.values()), getattr(now, attribute))
            yield family
        outcomes = Counter(finished=now.finished, cancelled=now.cancelled, failed=now.failed)
        yield self._counter("requests", "Requests that ended.", "outcome", outcomes)

    def _collect_queue(self, requests: Requests) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            PREFIX + "num_requests_waiting_by_reason",
            "Requests that wait, by what they wait for.",
            labels=(*self._labels, "reason"),
        )
        for reason, count in sorted(requests.waiting_by_reason().items()):
            family.add_metric((*self._labels.values(), reason), count)
        yield family
        yield self._gauge(
            "predicted_wait_seconds",
            "Wait for a lane that a request which comes now has before it.",
            requests.predicted_wait_s(),
        )

    def _gauge(self, name: str, documentation: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, documentation, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _counter(
        self, name: str, documentation: str, label: str, counts: Counter[str]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=(*self._labels, label))
        for value, count in sorted(counts.items()):
            family.add_metric((*self._labels.values(), value), count)
        return family

    def _collect_histograms(self) -> Iterator[Metric]:
        families: dict[str, HistogramMetricFamily] = {}
        for name, documentation, own, histogram in self._histograms:
            labels = {**self._labels, **own}
            family = families.get(name)
            if family is None:
                family = HistogramMetricFamily(PREFIX + name, documentation, labels=tuple(labels))
                families[name] = family
            family.add_metric(tuple(labels.values()), histogram.buckets(), histogram.total)
        yield from families.values()


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    copy.samples = [
        Sample(name + sample.name.removeprefix(family.name), *sample[1:])
        for sample in family.samples
    ]
    return copy
