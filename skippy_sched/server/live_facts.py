"""What ``GET /admin/live`` answers: lanes, queue, rates, latencies, tenants, iterations.

Knows the shape of the JSON that top.py and page/live.js read. Reads snapshots only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise

from skippy_sched.errors import InvalidRequest
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.explain import Explanation
from skippy_sched.scheduler.observe import Statistics
from skippy_sched.server.exchange import Exchange
from skippy_sched.server.live import Iterated, Live, Percentiles, Sample
from skippy_sched.server.served_model import ServedModel

#: Waiting requests and tenants shown.
QUEUE_SHOWN_MAX = 20
TENANTS_SHOWN_MAX = 20
#: Rates are means over so many samples: less flickers, more lags behind.
RATE_SAMPLES = 10

Facts = dict[str, object]

#: As JSON writes numbers: "nan" and "1_0" are floats to Python only.
_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?([eE][+-]?\d{1,3})?", re.ASCII)


async def live(exchange: Exchange, served: ServedModel, kept: Live, trouble: str | None) -> None:
    """``?after=N``: only iterations after number N; ``?since=S``: only samples after instant S."""
    query = exchange.query("after", "since")
    after, since = _number(query, "after"), _number(query, "since")
    facts = {"model": served.name, "state": trouble or "ready"}
    await exchange.answer_json(200, facts | live_facts(served.engine, kept, after, since))


def live_facts(engine: Engine, kept: Live, after: float = -1, since: float = -1) -> Facts:
    """Instants in seconds on the engine's clock, spans in milliseconds; costs as much as there
    are running requests and iterations to tell."""
    now, counted = engine.requests.now(), engine.statistics()
    known = engine.requests.explain_all(counted.running + QUEUE_SHOWN_MAX)
    running = [each for each in known if each.lane is not None]
    waiting = [each for each in known if each.queue_position is not None]
    samples = list(kept.samples)
    return {
        "at": _rounded(now),
        "began_at": _rounded(kept.began_at),
        "lanes": counted.lanes,
        "running": [_runs(each, now) for each in sorted(running, key=lambda r: r.lane or 0)],
        "queue": {
            "requests": counted.waiting,
            "tokens": counted.waiting_tokens,
            "first": [_waits(each, now) for each in waiting[:QUEUE_SHOWN_MAX]],
        },
        "kv": {
            "tokens": counted.kv_tokens,
            "tokens_max": counted.kv_tokens_max,
            "prefixes": counted.prefixes,
            "prefix_tokens": counted.prefix_tokens,
        },
        "rates": _rates(samples[-RATE_SAMPLES - 1 :]),
        "latency": {"ttft_ms": _ms(kept.ttft), "itl_ms": _ms(kept.itl)},
        "counted": {
            "finished": counted.finished,
            "cancelled": counted.cancelled,
            "failed": counted.failed,
            "preemptions": counted.preemptions,
            "recoveries": counted.recoveries,
        },
        "tenants": _tenants(engine, running, samples[-RATE_SAMPLES - 1 :]),
        "history": [_moment(*two) for two in pairwise(samples) if round(two[1].at, 6) > since],
        "budget_tokens": engine.facts.n_batch,
        **_iterations(kept, after),
    }


def _number(query: dict[str, str], name: str) -> float:
    text = query.get(name, "-1")
    if _NUMBER.fullmatch(text) is None:
        raise InvalidRequest(f"{name} is {text[:20]!r}, not a number", param=name)
    return float(text)


# --- requests -----------------------------------------------------------------------------------


def _runs(request: Explanation, now: float) -> Facts:
    return {
        "lane": request.lane,
        "id": request.request_id,
        "tenant": request.tenant,
        "state": request.state,
        "waits_for": request.waits_for and request.waits_for.value,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "computed_tokens": request.computed_tokens,
        "completion_tokens": request.completion_tokens,
        "completion_tokens_max": request.completion_tokens_max,
        "age_s": _rounded(now - request.arrived_at),
    }


def _waits(request: Explanation, now: float) -> Facts:
    return {
        "position": request.queue_position,
        "id": request.request_id,
        "tenant": request.tenant,
        "priority": request.priority,
        "waits_for": request.waits_for and request.waits_for.value,
        "start_in_s": _rounded(request.start_in_s),
        "prompt_tokens": request.prompt_tokens,
        "age_s": _rounded(now - request.arrived_at),
    }


def _tenants(engine: Engine, running: list[Explanation], samples: list[Sample]) -> list[Facts]:
    """The busiest first."""
    lanes: dict[str, int] = {}
    for request in running:
        lanes[request.tenant] = lanes.get(request.tenant, 0) + 1
    waiting = engine.requests.waiting_by_tenant()
    rates: dict[str, float] = {}
    if len(samples) > 1:
        first, last = samples[0], samples[-1]
        for tenant, tokens in last.generated.items():
            rates[tenant] = max(0, tokens - first.generated[tenant]) / (last.at - first.at)
    rows = [
        (rates.get(tenant, 0.0), lanes.get(tenant, 0), waiting.get(tenant, 0), tenant)
        for tenant in rates.keys() | lanes.keys() | waiting.keys()
    ]
    rows = sorted((row for row in rows if any(row[:3])), reverse=True)
    return [
        {"tenant": tenant, "running": runs, "waiting": waits, "tokens_per_s": _rounded(rate)}
        for rate, runs, waits, tenant in rows[:TENANTS_SHOWN_MAX]
    ]


# --- rates --------------------------------------------------------------------------------------


def _rates(samples: list[Sample]) -> Facts | None:
    """Means over the samples' time; None until there are two."""
    if len(samples) < 2:
        return None
    span_s = samples[-1].at - samples[0].at
    was, now = samples[0].counted, samples[-1].counted

    def per_s(count: int) -> float | None:
        return _rounded(count / span_s)

    iterations = now.iterations - was.iterations
    batches = now.decode_iterations - was.decode_iterations
    prompts = now.prompt_tokens - was.prompt_tokens
    decodes = now.decode_sequences - was.decode_sequences
    prefill = now.prefill_tokens - was.prefill_tokens
    return {
        "generated_tokens_per_s": per_s(max(0, now.generated_tokens - was.generated_tokens)),
        "prefill_tokens_per_s": per_s(prefill),
        "requests_per_s": per_s(_ended(now) - _ended(was)),
        "iterations_per_s": per_s(iterations),
        "decodes_per_iteration": _rounded(decodes / batches) if batches else None,
        "tokens_per_iteration": _rounded((decodes + prefill) / iterations) if iterations else None,
        "cached_share": (
            # A prompt counts when it comes, what is cached of it when it gets its lane.
            _rounded(min(1.0, (now.cached_tokens - was.cached_tokens) / prompts))
            if prompts
            else None
        ),
    }


def _moment(before: Sample, sample: Sample) -> Facts:
    """A second of history: what was done in it, and the gauges at its end."""
    span_s, was, now = sample.at - before.at, before.counted, sample.counted
    return {
        "at": _rounded(sample.at),
        "generated_tokens_per_s": _rounded(
            max(0, now.generated_tokens - was.generated_tokens) / span_s
        ),
        "prefill_tokens_per_s": _rounded((now.prefill_tokens - was.prefill_tokens) / span_s),
        "running": now.running,
        "waiting": now.waiting,
        "kv_tokens": now.kv_tokens,
        "itl_ms": _ms(sample.itl),
        "ttft_ms": _ms(sample.ttft),
    }


def _ended(counted: Statistics) -> int:
    return counted.finished + counted.cancelled + counted.failed


# --- iterations ---------------------------------------------------------------------------------


def _iterations(kept: Live, after: float) -> Facts:
    """``iterations``: [number, submitted at, reconciled at, index in ``decodes``, chunks, tokens].

    ``decodes``: the different lists of rows, each [lane, key, lane, key, ...]; ``chunks``:
    [lane, key, tokens]; ``requests``: key -> [id, tenant].
    """
    told = [each for each in kept.iterations if each.number > after]
    rows: dict[int, int] = {}  # id of a list of rows -> its index
    decodes: list[list[int]] = []
    iterations = []
    for each in told:
        index = rows.setdefault(id(each.decodes), len(rows))
        if index == len(decodes):
            decodes.append([part for row in each.decodes for part in row])
        iterations.append(
            [
                each.number,
                _rounded(each.submitted_at),
                _rounded(each.reconciled_at),
                index,
                each.chunks,
                each.tokens,
            ]
        )
    keys = {key for flat in decodes for key in flat[1::2]} | _chunk_keys(told)
    return {
        "iterations": iterations,
        "decodes": decodes,
        "requests": {key: kept.names[key] for key in sorted(keys) if key in kept.names},
    }


def _chunk_keys(told: Iterable[Iterated]) -> set[int]:
    return {key for each in told for _, key, _ in each.chunks}


def _ms(of: Percentiles) -> Facts:
    return {
        name: None if value is None else round(value * 1e3, 3)
        for name, value in of._asdict().items()
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
