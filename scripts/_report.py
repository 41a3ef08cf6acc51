"""What a load test measured: percentiles, the JSON summary, the table for people.

Pure but for the machine's description. The JSON has the names that vLLM's benchmark uses, so
that scripts made for those read it; times in it are milliseconds where the name says ``_ms``.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from _client import Answer

PERCENTILES = (50, 90, 95, 99)
METRICS = {
    "ttft": "First token (TTFT)",
    "itl": "Between tokens (ITL)",
    "tpot": "Mean per token (TPOT)",
    "e2el": "End to end (E2EL)",
}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, linear between neighbours."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Latencies:
    """One answer's intervals in seconds; None where it has too few tokens to have one."""

    ttft: float | None
    tpot: float | None
    e2el: float
    itl: tuple[float, ...]


def output_tokens(answer: Answer) -> int:
    """What the server counted, else the events with text."""
    if answer.completion_tokens is not None:
        return answer.completion_tokens
    return len(answer.text_at)


def latencies(answer: Answer) -> Latencies:
    """TPOT spreads the time after the first text over the tokens that it brought."""
    text_at = answer.text_at
    later_tokens = output_tokens(answer) - 1
    return Latencies(
        ttft=text_at[0] - answer.sent_at if text_at else None,
        tpot=(text_at[-1] - text_at[0]) / later_tokens if text_at and later_tokens > 0 else None,
        e2el=answer.ended_at - answer.sent_at,
        itl=tuple(after - before for before, after in pairwise(text_at)),
    )


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """``["ttft:500", "tpot:50"]`` as seconds per metric; raises ValueError."""
    limits = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            limits[name] = float(limit) / 1000
        except ValueError:
            limits[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or limits[name] <= 0:
            raise ValueError(f"goodput limit {item!r}: expected ttft:MS, tpot:MS or e2el:MS")
    return limits


def is_good(one: Latencies, limits: Mapping[str, float]) -> bool:
    """Within every limit; an interval that the answer does not have cannot break one."""
    return all((getattr(one, name) or 0.0) <= limit for name, limit in limits.items())


def concurrency_peak(answers: Sequence[Answer]) -> int:
    """Most requests in flight at one instant."""
    changes = sorted([(a.sent_at, 1) for a in answers] + [(a.ended_at, -1) for a in answers])
    peak = running = 0
    for _at, change in changes:
        running += change
        peak = max(peak, running)
    return peak


def summarize(answers: Sequence[Answer], goodput: Mapping[str, float]) -> dict[str, Any]:
    """The figures of all answers; those that we closed on purpose count in none but their own."""
    complete = [answer for answer in answers if answer.is_complete]
    failed = [answer for answer in answers if answer.error is not None]
    each = [latencies(answer) for answer in complete]
    start = min((answer.sent_at for answer in answers), default=0.0)
    duration_s = max((answer.ended_at for answer in answers), default=0.0) - start
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    tokens = sum(output_tokens(answer) for answer in complete)
    prompt_tokens = sum(
        answer.prompt_tokens if answer.prompt_tokens is not None else answer.prompt_tokens_asked
        for answer in complete
    )
    good = sum(is_good(one, goodput) for one in each)
    judged = len(complete) + len(failed)
    late = sorted(a.sent_at - a.due_at for a in answers if a.due_at is not None)
    summary: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(failed),
        "cancelled": len(answers) - judged,
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(complete) * per_s,
        "request_goodput": good * per_s if goodput else None,
        "good_share": good / judged if goodput and judged else None,
        "output_throughput": tokens * per_s,
        "total_token_throughput": (tokens + prompt_tokens) * per_s,
        "max_concurrent_requests": concurrency_peak(answers),
        "output_count_deviations": sum(
            a.completion_tokens is not None and a.completion_tokens != a.expected_tokens
            for a in complete
        ),
        "output_count_unknown": sum(a.completion_tokens is None for a in complete),
        "text_events": sum(len(answer.text_at) for answer in complete),
        "errors_by_kind": dict(Counter(answer.error for answer in failed)),
        "error_samples": {answer.error: answer.error_message for answer in reversed(failed)},
        "send_late_p99_ms": percentile(late, 99) * 1000 if late else None,
        "send_late_max_ms": late[-1] * 1000 if late else None,
    }
    for name in METRICS:
        values = [getattr(one, name) for one in each]
        flat = [gap for gaps in values for gap in gaps] if name == "itl" else values
        summary |= _metric(name, sorted(1000 * value for value in flat if value is not None))
    return summary


def _metric(name: str, ordered: Sequence[float]) -> dict[str, float]:
    if not ordered:
        return {}
    return {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": statistics.pstdev(ordered),
        **{f"p{percent}_{name}_ms": percentile(ordered, percent) for percent in PERCENTILES},
        f"max_{name}_ms": ordered[-1],
    }


def details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Per-request lists, as vLLM's benchmark saves them: seconds, in the order of sending."""
    each = [latencies(answer) for answer in answers]
    return {
        "input_lens": [a.prompt_tokens or a.prompt_tokens_asked for a in answers],
        "output_lens": [output_tokens(answer) for answer in answers],
        "ttfts": [one.ttft or 0.0 for one in each],
        "itls": [list(one.itl) for one in each],
        "errors": [a.error_message or a.error or "" for a in answers],
    }


def latency_table(summary: Mapping[str, Any]) -> Table:
    """Milliseconds per metric; a dash where nothing was measured."""
    table = Table("milliseconds", title_justify="left")
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES), "max")
    for column in columns:
        table.add_column(column, justify="right")
    for name, title in METRICS.items():
        values = [summary.get(f"{column}_{name}_ms") for column in columns]
        table.add_row(title, *(_cell(value) for value in values))
    return table


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def figures_table(summary: Mapping[str, Any]) -> Table:
    """Counts and rates."""
    judged = summary["completed"] + summary["failed"]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("requests completed", f"{summary['completed']:,} of {judged:,}")
    for kind, count in sorted(summary["errors_by_kind"].items()):
        table.add_row(f"  failed: {kind}", f"{count:,}")
    if summary["cancelled"]:
        table.add_row("closed on purpose (in no other figure)", f"{summary['cancelled']:,}")
    table.add_row("duration", f"{summary['duration']:,.2f} s")
    table.add_row("requests/s", f"{summary['request_throughput']:,.2f}")
    if summary["request_goodput"] is not None:
        table.add_row(
            "good requests/s (share of all)",
            f"{summary['request_goodput']:,.2f} ({summary['good_share'] or 0:.1%})",
        )
    table.add_row("output tokens/s", f"{summary['output_throughput']:,.1f}")
    table.add_row("prompt + output tokens/s", f"{summary['total_token_throughput']:,.1f}")
    table.add_row("prompt tokens", f"{summary['total_input_tokens']:,}")
    table.add_row("output tokens", f"{summary['total_output_tokens']:,}")
    table.add_row(
        "  answers with another count than asked", f"{summary['output_count_deviations']:,}"
    )
    if summary["output_count_unknown"]:
        table.add_row("  answers without usage", f"{summary['output_count_unknown']:,}")
    if 0 < summary["text_events"] != summary["total_output_tokens"]:
        # then ITL is the gap between events, some of which brought several tokens or none
        table.add_row("  events with text", f"{summary['text_events']:,}")
    table.add_row("most requests in flight", f"{summary['max_concurrent_requests']:,}")
    if summary["send_late_p99_ms"] is not None:
        late = f"{summary['send_late_p99_ms']:.1f} / {summary['send_late_max_ms']:.1f} ms"
        table.add_row("sent later than due (p99 / max)", late)
    if (mean := summary.get("sequences_per_decode_iteration")) is not None:
        table.add_row("sequences per decode iteration", f"{mean:.2f}")
    table.add_row(
        "client's own CPU",
        f"{summary['client_cpu_s']:.2f} s, {summary['client_cpu_share']:.1%} of a core",
    )
    return table


def machine() -> str:
    """One line: processor, usable cores, memory, system, interpreter."""
    model = platform.processor() or platform.machine()
    memory = ""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = f", {size / 2**30:.0f} GiB"
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{model}, {cores} cores{memory}, {platform.system()} {platform.release()}, {python}"
