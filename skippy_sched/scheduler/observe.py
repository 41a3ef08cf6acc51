"""What the engine tells about itself: records pushed to an observer, and a snapshot to read.

Plain data. Nothing here waits for the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.history import Step
from skippy_sched.scheduler.iteration import Iteration
from skippy_sched.scheduler.request import FinishReason, Request, Usage
from skippy_sched.scheduler.state import State


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """One iteration: its rows, where its time went (seconds), the gaps between streams' tokens.

    The lists of requests are those of its rows, in row order: to be read at once and not kept,
    because they hold their tokens. Instants are on the engine's clock.
    """

    number: int
    iteration: Iteration
    decodes: Sequence[Request]
    chunk_requests: Sequence[Request]
    verify_requests: Sequence[Request]
    submitted_at: float
    reconciled_at: float
    prefill_tokens: int
    prefill_requests: int
    decode_requests: int
    draft_tokens: int
    native_s: float
    plan_s: float
    reconcile_s: float
    token_gaps: list[float]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The receipt of one request; instants in seconds on the engine's clock, None: not reached."""

    key: int
    request_id: str
    tenant: str
    outcome: str  # "finished", "cancelled" or "failed"
    finish_reason: FinishReason | None
    error: RequestError | None
    usage: Usage
    preemptions: int
    seed: int | None
    arrived_at: float
    planned_at: float | None
    first_token_at: float | None
    finished_at: float
    steps: Sequence[Step]
    trace_parent: str | None


class Observer(Protocol):
    """Called on the event loop while the next iteration runs; must not block."""

    def on_iteration(self, record: IterationRecord) -> None: ...

    def on_request_end(self, record: RequestRecord) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """A snapshot; gauges describe this moment, the rest has counted since the start."""

    waiting: int
    waiting_tokens: int
    prefilling: int
    decoding: int
    lanes: int
    lanes_free: int
    kv_tokens: int
    kv_tokens_max: int
    accepted: int
    finished: int
    cancelled: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    recomputed_tokens: int
    prefixes: int
    prefix_tokens: int
    preemptions: int
    swaps: int
    iterations: int
    decode_iterations: int
    decode_sequences: int
    prefill_tokens: int
    native_calls: int
    partial_batches: int
    drafted_tokens: int
    accepted_tokens: int
    requeued_entries: int
    last_iteration_age_s: float | None
    draining: bool
    recoveries: int
    recovery_s: float
    recovering: str | None
    dead: str | None

    @property
    def running(self) -> int:
        return self.prefilling + self.decoding


def snapshot(
    state: State,
    *,
    kv_tokens_max: int,
    last_iteration_age_s: float | None,
    draining: bool,
    recoveries: int,
    recovery_s: float,
    recovering: str | None,
    dead: str | None,
) -> Statistics:
    """Read the state as it is; costs as much as there are running requests."""
    totals = state.totals
    live = [*state.decoding.values(), *state.prefilling.values()]
    return Statistics(
        waiting=len(state.waiting),
        waiting_tokens=state.waiting.tokens,
        prefilling=len(state.prefilling),
        decoding=len(state.decoding),
        lanes=state.limits.lanes,
        lanes_free=state.lanes_free,
        kv_tokens=state.kv_tokens,
        kv_tokens_max=kv_tokens_max,
        accepted=totals.accepted,
        finished=totals.finished,
        cancelled=totals.cancelled,
        failed=totals.failed,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        generated_tokens=totals.generated_tokens + sum(r.completion_tokens for r in live),
        recomputed_tokens=totals.recomputed_tokens,
        prefixes=len(state.cache),
        prefix_tokens=state.cache.tokens,
        preemptions=totals.preemptions,
        swaps=totals.swaps,
        iterations=totals.iterations,
        decode_iterations=totals.decode_iterations,
        decode_sequences=totals.decode_rows,
        prefill_tokens=totals.prefill_tokens,
        native_calls=totals.native_calls,
        partial_batches=totals.partial_batches,
        drafted_tokens=totals.drafted_tokens,
        accepted_tokens=totals.accepted_tokens,
        requeued_entries=totals.requeued_rows,
        last_iteration_age_s=last_iteration_age_s,
        draining=draining,
        recoveries=recoveries,
        recovery_s=recovery_s,
        recovering=recovering,
        dead=dead,
    )
