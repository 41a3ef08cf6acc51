"""One log line per request, at its end: what it cost and how it went, never what it said."""

from __future__ import annotations

import structlog

from skippy_sched.scheduler.observe import IterationRecord, Observer, RequestRecord

log = structlog.get_logger("skippy_sched.receipts")


class Receipts:
    """An observer that logs each request's end and hands everything on to the next observer."""

    def __init__(self, following: Observer) -> None:
        self._following = following

    def on_iteration(self, record: IterationRecord) -> None:
        self._following.on_iteration(record)

    def on_request_end(self, record: RequestRecord) -> None:
        self._following.on_request_end(record)
        error = record.error
        log.info(
            "request_ended",
            request_id=record.request_id,
            outcome=record.outcome,
            finish_reason=record.finish_reason,
            prompt_tokens=record.usage.prompt_tokens,
            cached_tokens=record.usage.cached_tokens,
            completion_tokens=record.usage.completion_tokens,
            seed=record.seed,
            tenant=record.tenant,
            queue_s=_span(record.arrived_at, record.planned_at),
            first_token_s=_span(record.arrived_at, record.first_token_at),
            total_s=_span(record.arrived_at, record.finished_at),
            **({} if error is None else {"code": error.code, "error": error.message[:200]}),
        )


def _span(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 4)
