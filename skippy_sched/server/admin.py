"""What the operator may ask: which requests there are, why each waits, what each got.

Reads the engine's books on the event loop; never waits for the engine.
"""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import structlog

from skippy_sched import clock
from skippy_sched.errors import InvalidRequest
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.explain import Explanation, Requests
from skippy_sched.scheduler.plan import Wait
from skippy_sched.server.exchange import Exchange
from skippy_sched.server.problems import NotFound

log = structlog.get_logger("skippy_sched.admin")

LISTED_DEFAULT = 100
LISTED_MAX = 10_000
#: Lines of a dump are written on the event loop: a tenth of a second for so many.
DUMPED_MAX = 1_000


async def requests(exchange: Exchange, known: Requests) -> None:
    """``?limit=N``; running ones first, then the queue in its order, then the latest ended."""
    text = exchange.query("limit").get("limit", str(LISTED_DEFAULT))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= LISTED_MAX):
        raise InvalidRequest(f"limit is {text[:20]!r}, not 1 to {LISTED_MAX}", param="limit")
    now = known.now()
    listed = [explanation_object(each, now) for each in known.explain_all(int(text))]
    for each in listed:
        del each["steps"]
    await exchange.answer_json(200, {"object": "list", "data": listed})


async def request(exchange: Exchange, known: Requests, request_id: str) -> None:
    """By the answer's id, or by the ``x-request-id`` of its response."""
    bare = request_id.removeprefix("req-")
    for name in (request_id, f"chatcmpl-{bare}", f"cmpl-{bare}"):
        found = known.explain(name)
        if found is not None:
            await exchange.answer_json(200, explanation_object(found, known.now()))
            return
    raise NotFound(f"no request {request_id[:80]!r}: it never came, was refused, or ended long ago")


def log_state(engine: Engine, trouble: str | None) -> None:
    """A line of counters, and one for each request that waits or runs; nothing of their texts.

    As a warning: who asks for it wants to see it at every level but one.
    """
    known, counted = engine.requests, engine.statistics()
    log.warning("state", state=trouble or "ready", **dataclasses.asdict(counted))
    now, live = known.now(), counted.running + counted.waiting
    for each in known.explain_all(min(live, DUMPED_MAX)):
        facts = explanation_object(each, now)
        del facts["steps"]
        log.warning("request_state", request_id=facts.pop("id"), **facts)
    if live > DUMPED_MAX:
        log.warning("state_cut", requests_left_out=live - DUMPED_MAX)


def explanation_object(found: Explanation, now: float) -> dict[str, object]:
    """Instants as seconds since the request came, except ``arrived``."""
    arrived = datetime.fromtimestamp(clock.wall_time() - (now - found.arrived_at), UTC)
    return {
        "id": found.request_id,
        "state": found.state,
        "why": why(found),
        "waits_for": _name(found.waits_for),
        "queue_position": found.queue_position,
        "first_in_queue_waits_for": _name(found.first_waits_for),
        "predicted_start_s": _rounded(found.start_in_s),
        "tenant": found.tenant,
        "priority": found.priority,
        "arrived": arrived.isoformat(timespec="milliseconds"),
        "first_token_s": _since(found, found.first_token_at),
        "ended_s": _since(found, found.ended_at),
        "seconds": {where: _rounded(spent) for where, spent in found.seconds.items()},
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "computed_tokens": found.computed_tokens,
        "completion_tokens": found.completion_tokens,
        "completion_tokens_max": found.completion_tokens_max,
        "chunks": found.chunks,
        "preemptions": found.preemptions,
        "restarts": found.restarts,
        "finish_reason": found.finish_reason,
        "error": found.error,
        "steps_dropped": found.steps_dropped,
        "steps": [
            {"at_s": _since(found, step.at), "what": step.what, "tokens": step.tokens}
            for step in found.steps
        ],
    }


def why(found: Explanation) -> str:
    """The explanation in one sentence."""
    if found.ended_at is not None:
        outcome = found.error or f"{found.state} ({found.finish_reason})"
        got = f"{found.completion_tokens} tokens in {found.ended_at - found.arrived_at:.3f} s"
        return f"it ended after {got}: {outcome}"
    if found.waits_for is None:
        return f"it runs ({found.state}); nothing holds it up"
    if found.queue_position is None:
        return f"it runs ({found.state}) and waits for {found.waits_for.value}"
    sentence = f"it is number {found.queue_position} in the queue, for {found.waits_for.value}"
    if found.first_waits_for is not None:
        sentence += f"; the first waits for {found.first_waits_for.value}"
    if found.start_in_s is not None:
        sentence += f"; it should start in {found.start_in_s:.1f} s"
    return sentence


def _name(wait: Wait | None) -> str | None:
    return None if wait is None else wait.name.lower()


def _since(found: Explanation, at: float | None) -> float | None:
    return None if at is None else _rounded(at - found.arrived_at)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
