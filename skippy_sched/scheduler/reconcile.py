"""Applies an outcome to the state: counts first, then who goes on, ends, or starts again.

Pure over plain data: no I/O, no clock of its own. What it returns is what the streams may be
told, and only after it has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skippy_sched.errors import EngineFailure
from skippy_sched.scheduler.cost import Work
from skippy_sched.scheduler.iteration import (
    NO_SAMPLE,
    Fate,
    Fault,
    Iteration,
    Outcome,
    ResetSession,
    SettleVerify,
    Verify,
)
from skippy_sched.scheduler.request import Request, Status, TokenLogprobs
from skippy_sched.scheduler.state import State

#: A request whose session was lost this often without a token in between is failed.
RESTARTS_MAX = 3


@dataclass(slots=True)
class Reconciled:
    """``tokens``: who got which token; ``runs``: who got several at once. ``ended``: whose last
    word this is. Order is the batch's.

    ``decodes``, ``chunk_requests`` and ``verify_requests`` are the requests of the iteration's
    rows, in row order.
    """

    iteration: Iteration
    decodes: list[Request]
    chunk_requests: list[Request]
    verify_requests: list[Request]
    tokens: list[tuple[Request, int]] = field(default_factory=list)
    runs: list[tuple[Request, Sequence[int]]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prefill_tokens: int = 0
    draft_tokens: int = 0
    work: Work | None = None
    seconds: float = 0.0  # that the work took


def reconcile(
    state: State,
    iteration: Iteration,
    decodes: list[Request],
    chunk_requests: list[Request],
    verify_requests: list[Request],
    outcome: Outcome,
    now: float,
) -> Reconciled:
    """The lists of requests are those of the iteration's rows, in row order."""
    assert outcome.number == iteration.number
    result = Reconciled(
        iteration, decodes, chunk_requests, verify_requests, logprobs=outcome.logprobs
    )
    faults = outcome.faults
    for sequence_id in outcome.unsaved:
        state.forget_prefix(sequence_id)
    tokens, gaps = result.tokens, result.gaps_s
    served, decoding = state.share.served, Status.DECODE

    # The common case, written flat: it runs once per running request and iteration.
    for request, sample in zip(decodes, outcome.decode_samples, strict=True):
        request.in_flight = 0
        if faults and request.key in faults:
            _apply_fault(state, request, faults[request.key], result, now)
            continue
        request.computed += 1
        if request.status is not decoding:
            continue  # it has ended meanwhile
        if request.crashes:
            state.clear_suspicion(request)
        served[request.tenant] += request.charge
        last = request.last_token_at
        if last is not None:
            gaps.append(now - last)
        request.last_token_at = now
        request.tokens.append(sample)
        tokens.append((request, sample))
        if sample in request.stop_tokens or len(request.tokens) >= request.token_limit:
            _end_by_token(state, request, sample, result, now)

    for request, chunk, sample in zip(
        chunk_requests, iteration.chunks, outcome.chunk_samples, strict=True
    ):
        request.in_flight = 0
        if request.key in faults:
            _apply_fault(state, request, faults[request.key], result, now)
            continue
        request.computed += len(chunk.tokens)
        result.prefill_tokens += len(chunk.tokens)
        request.history.chunk(len(chunk.tokens), now)
        if request.status.is_final:
            continue
        served[request.tenant] += request.charge * len(chunk.tokens)
        if chunk.following is not None and request.key in outcome.logprobs:
            del request.prompt_logprobs[chunk.start :]  # those of a session that was lost
            request.prompt_logprobs.append(outcome.logprobs[request.key])
        if not chunk.sample_last:
            continue
        assert sample != NO_SAMPLE
        request.restarts = 0
        state.save_prefix(request, request.prompt_tokens, now)
        state.start_decode(request, now)
        if request.first_token_at is None:
            request.first_token_at = now
        elif request.last_token_at is not None:
            gaps.append(now - request.last_token_at)
        request.last_token_at = now
        request.tokens.append(sample)
        tokens.append((request, sample))
        _end_by_token(state, request, sample, result, now)
    if verify_requests:
        _apply_verifies(state, iteration.verifies, verify_requests, outcome, result, now)
    if faults:
        rows = {request.key for request in (*decodes, *chunk_requests, *verify_requests)}
        _apply_faults_without_rows(state, rows, faults, result, now)
    return result


def _apply_verifies(
    state: State,
    verifies: Sequence[Verify],
    requests: list[Request],
    outcome: Outcome,
    result: Reconciled,
    now: float,
) -> None:
    """Several tokens at once, up to one that ends the request; then the session is cut back.

    What was computed is charged, also for a draft that was wrong.
    """
    proposals = outcome.proposals or [()] * len(requests)
    for request, verify, got, proposal in zip(
        requests, verifies, outcome.verified, proposals, strict=True
    ):
        request.in_flight = 0
        if request.key in outcome.faults:
            _apply_fault(state, request, outcome.faults[request.key], result, now)
            continue
        if request.status.is_final:
            continue
        if request.crashes:
            state.clear_suspicion(request)
        count = len(verify.tokens)
        result.draft_tokens += count - 1
        ends = (i for i, token in enumerate(got, start=1) if token in request.stop_tokens)
        tokens = list(got[: next(ends, len(got))])
        assert 1 <= len(tokens) <= count, (verify, got)
        state.share.served[request.tenant] += request.charge * count
        if request.last_token_at is not None:
            result.gaps_s.append(now - request.last_token_at)
            result.gaps_s += [0.0] * (len(tokens) - 1)
        request.last_token_at = now
        start = request.computed
        request.computed += len(tokens)
        request.tokens += tokens
        request.drafted_tokens += count - 1
        request.accepted_tokens += len(tokens) - 1
        state.totals.drafted_tokens += count - 1
        state.totals.accepted_tokens += len(tokens) - 1
        result.runs.append((request, tokens))
        _end_by_token(state, request, tokens[-1], result, now)
        if request.status.is_final:
            continue
        state.commands.append(SettleVerify(request.key, start, count, len(tokens)))
        if proposal and state.speculation is not None:
            state.speculation.proposed(request, proposal)


def _apply_faults_without_rows(
    state: State, rows: set[int], faults: dict[int, Fault], result: Reconciled, now: float
) -> None:
    """A command can fail for a request that had no row: it has a lane, but no tokens yet."""
    for key in faults.keys() - rows:
        request = state.prefilling.get(key) or state.decoding.get(key)
        if request is not None:
            _apply_fault(state, request, faults[key], result, now)


def _end_by_token(
    state: State, request: Request, token: int, result: Reconciled, now: float
) -> None:
    """An end token wins over the limit: a request whose last allowed token ends it did stop."""
    if token in request.stop_tokens:
        request.stop_reason = token
        state.finish(request, "stop", now)
    elif len(request.tokens) >= request.token_limit:
        state.finish(request, "length", now)
    else:
        return
    result.ended.append(request)


def _apply_fault(
    state: State, request: Request, fault: Fault, result: Reconciled, now: float
) -> None:
    if request.status.is_final:
        return
    if fault.fate is Fate.NOT_RUN:
        state.totals.requeued_rows += 1
        return
    request.restarts += 1 if fault.fate is Fate.LOST else 0
    if fault.fate is Fate.LOST and request.restarts <= RESTARTS_MAX:
        state.totals.requeued_rows += 1
        state.restart(request, now)
        state.commands.append(ResetSession(request.key))
        return
    error = EngineFailure(f"the engine failed on this request: {fault.error}")
    error.__cause__ = fault.error
    state.fail(request, error, now)
    result.ended.append(request)
