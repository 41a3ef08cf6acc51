"""What a run comes to: latencies, goodput, utilisation, queues; as JSON and as tables.

Fed with steps, in virtual or recorded time; its memory does not grow with the run. The JSON has
the load test's names, so that a prediction and a measurement lie side by side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group
from rich.table import Table

from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.request import Request, Status
from skippy_sched.simulate.driver import Step
from skippy_sched.simulate.histogram import Histogram
from skippy_sched.simulate.timeline import Timeline
from skippy_sched.simulate.traces import Arrival

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "first token (TTFT)",
    "itl": "between tokens (ITL)",
    "tpot": "mean per token (TPOT)",
    "e2el": "end to end (E2EL)",
}


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """``["ttft:500", "tpot:50"]`` (milliseconds) as seconds; raises ValueError."""
    limits = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            limits[name] = float(limit) / 1000
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits[name] > 0:
            raise ValueError(f"{item}: expected ttft:MS, tpot:MS or e2el:MS")
    return limits


@dataclass(slots=True)
class Report:
    """Collects; ``goodput`` are the limits in seconds that a good answer keeps."""

    goodput: Mapping[str, float] = field(default_factory=dict)
    pool_cells: int = 0
    latencies: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram() for name in METRICS}
    )
    tenants: dict[str, Histogram] = field(default_factory=dict)  # TTFT by tenant
    timeline: Timeline = field(default_factory=Timeline)
    refusals: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    status: Counter[Status] = field(default_factory=Counter)
    good: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    queue_area: float = 0.0
    running_area: float = 0.0
    kv_area: float = 0.0
    queue_max: int = 0
    first_at: float | None = None
    last_at: float = 0.0
    totals: Any = None

    # --- fed by the driver ------------------------------------------------------------------------

    def refused(self, arrival: Arrival) -> None:
        self.refusals += 1

    def step(self, step: Step, scheduler: Scheduler) -> None:
        state = scheduler.state
        now, waiting, running = step.now, len(state.waiting), state.running
        if self.first_at is None:
            self.first_at = self.last_at = now
        span = now - self.last_at
        self.last_at = now
        self.totals = state.totals
        self.queue_max = max(self.queue_max, waiting)
        if step.ended:
            for request in step.ended:
                self._ended(request)
        if step.outcome is None or step.reconciled is None:
            return
        self.busy_s += step.outcome.native_s
        self.queue_area += waiting * span
        self.running_area += running * span
        self.kv_area += state.kv_tokens * span
        self.timeline.queue(now - self.first_at, waiting, running)
        self.latencies["itl"].extend(step.reconciled.gaps_s)
        for request in step.reconciled.ended:
            self._ended(request)

    def _ended(self, request: Request) -> None:
        self.status[request.status] += 1
        if request.error is not None:
            self.errors[str(request.error.code)] += 1
        if request.status is not Status.FINISHED:
            return
        first, last, end = request.first_token_at, request.last_token_at, request.finished_at
        assert first is not None
        assert last is not None
        assert end is not None
        tokens = request.completion_tokens
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += tokens
        taken = {"ttft": first - request.arrived_at, "e2el": end - request.arrived_at}
        if tokens > 1:
            taken["tpot"] = (last - first) / (tokens - 1)
        for name, seconds in taken.items():
            self.latencies[name].add(seconds)
        self.tenants.setdefault(request.tenant, Histogram()).add(taken["ttft"])
        assert self.first_at is not None
        self.timeline.first_token(first - self.first_at, taken["ttft"])
        if all(taken.get(name, 0.0) <= limit for name, limit in self.goodput.items()):
            self.good += 1

    # --- the result -------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        duration = self.last_at - (self.first_at or 0.0)
        per_s = 1 / duration if duration > 0 else 0.0
        finished = self.status[Status.FINISHED]
        judged = finished + self.status[Status.FAILED] + self.refusals
        totals = self.totals
        result: dict[str, Any] = {
            "duration": duration,
            "completed": finished,
            "failed": self.status[Status.FAILED],
            "cancelled": self.status[Status.CANCELLED],
            "refused": self.refusals,
            "errors_by_kind": dict(self.errors),
            "total_input_tokens": self.prompt_tokens,
            "total_output_tokens": self.output_tokens,
            "request_throughput": finished * per_s,
            "output_throughput": self.output_tokens * per_s,
            "request_goodput": self.good * per_s if self.goodput else None,
            "good_share": self.good / judged if self.goodput and judged else None,
            "busy_share": self.busy_s * per_s,
            "mean_running": self.running_area * per_s,
            "mean_queue": self.queue_area * per_s,
            "max_queue": self.queue_max,
            "kv_share": self.kv_area * per_s / self.pool_cells if self.pool_cells else None,
        }
        if totals is not None:
            result |= {
                "iterations": totals.iterations,
                "sequences_per_decode_iteration": totals.decode_rows
                / max(1, totals.decode_iterations),
                "cached_tokens": totals.cached_tokens,
                "recomputed_tokens": totals.recomputed_tokens,
                "preemptions": totals.preemptions,
                "swaps": totals.swaps,
            }
        for name, histogram in self.latencies.items():
            result |= _percentiles(name, histogram)
        if len(self.tenants) > 1:
            result["tenants"] = {
                tenant: _percentiles("ttft", histogram)
                for tenant, histogram in sorted(self.tenants.items())
            }
        return result


def _percentiles(name: str, histogram: Histogram) -> dict[str, float]:
    if not len(histogram):
        return {}
    return {
        f"mean_{name}_ms": histogram.mean * 1000,
        **{f"p{p}_{name}_ms": histogram.percentile(p) * 1000 for p in PERCENTILES},
        f"max_{name}_ms": histogram.max * 1000,
    }


def tables(summary: Mapping[str, Any]) -> Group:
    """For people: latencies in milliseconds, then counts and rates."""
    return Group(latency_table({"": summary}), _tenant_table(summary), _figures(summary))


def latency_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """One row per metric and run; runs are told apart by their names."""
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    table = Table("milliseconds", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, title in METRICS.items():
        for run, summary in runs.items():
            cells = (_number(summary.get(f"{column}_{name}_ms")) for column in columns)
            table.add_row(f"{title} {run}".rstrip(), *cells)
    return table


def _tenant_table(summary: Mapping[str, Any]) -> Table | str:
    tenants = summary.get("tenants")
    if not tenants:
        return ""
    table = Table("TTFT by tenant, milliseconds", "mean", "p50", "p95", "p99")
    for tenant, row in tenants.items():
        names = ("mean", "p50", "p95", "p99")
        table.add_row(tenant, *(_number(row[f"{name}_ttft_ms"]) for name in names))
    return table


def _figures(summary: Mapping[str, Any]) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows: list[tuple[str, str]] = [
        ("requests completed", f"{summary['completed']:,}"),
        ("refused, failed", f"{summary['refused']:,}, {summary['failed']:,}"),
        ("lengths clipped to the context", f"{summary.get('clipped', 0):,}"),
        ("simulated time", f"{summary['duration']:,.1f} s"),
        ("requests/s", f"{summary['request_throughput']:,.2f}"),
        ("output tokens/s", f"{summary['output_throughput']:,.1f}"),
        ("engine busy", f"{summary['busy_share']:.1%}"),
        ("running (mean)", f"{summary['mean_running']:.1f}"),
        ("waiting (mean, most)", f"{summary['mean_queue']:.1f}, {summary['max_queue']:,}"),
    ]
    if summary.get("request_goodput") is not None:
        share = summary["good_share"] or 0.0
        rows.insert(4, ("good requests/s", f"{summary['request_goodput']:,.2f} ({share:.1%})"))
    if "iterations" in summary:
        rows += [
            ("iterations", f"{summary['iterations']:,}"),
            ("decode rows (mean)", f"{summary['sequences_per_decode_iteration']:.1f}"),
            ("cached prompt tokens", f"{summary['cached_tokens']:,}"),
            ("preemptions", f"{summary['preemptions']:,}"),
        ]
    if summary.get("kv_share") is not None:
        rows.append(("KV cells in use (mean)", f"{summary['kv_share']:.1%}"))
    for row in rows:
        table.add_row(*row)
    return table


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
