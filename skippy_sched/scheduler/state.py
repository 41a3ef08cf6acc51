"""The scheduler's only mutable state: which request is where, and what is free.

Knows counts and containers. Does not decide (planner.py) and does not interpret outcomes
(reconcile.py); it only moves requests so that the books stay balanced.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.iteration import CloseSession, Command, OpenSession
from skippy_sched.scheduler.policy import FairShare, WaitingQueue
from skippy_sched.scheduler.request import FinishReason, Request, Status


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that the scheduler lives within; all in tokens or requests."""

    lanes: int
    batch_tokens: int  # of one iteration
    context_tokens: int  # of one request, prompt and completion
    chunk_tokens: int  # of one request in one iteration
    waiting_requests: int
    waiting_tokens: int
    aging_s: float = 30.0  # waiting that long lifts a request by one priority class


@dataclass(slots=True)
class Totals:
    """Counters that only grow."""

    accepted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    iterations: int = 0
    decode_iterations: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    native_calls: int = 0
    partial_batches: int = 0
    requeued_rows: int = 0


class State:
    """Requests by stage of life. Every live request is in exactly one container."""

    def __init__(self, limits: Limits, share: FairShare | None = None) -> None:
        self.limits = limits
        self.share = share or FairShare()
        self.waiting = WaitingQueue(self.share, limits.aging_s)
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self.lanes_free = limits.lanes
        #: sent ahead of the next iteration's batch, in this order
        self.commands: list[Command] = []
        #: requests with ``cancel_requested``, looked at before each plan
        self.marked: deque[Request] = deque()
        self.totals = Totals()

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def live(self) -> int:
        return self.running + len(self.waiting)

    @property
    def kv_tokens(self) -> int:
        running = (*self.prefilling.values(), *self.decoding.values())
        return sum(request.computed for request in running)

    # --- moves ------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        assert request.status is Status.WAITING
        self.share.enter(request.tenant)
        request.charge = 1.0 / self.share.weight(request.tenant)
        self.waiting.push(request)
        self.totals.accepted += 1
        self.totals.prompt_tokens += request.prompt_tokens

    def admit(self, request: Request) -> None:
        """From the queue to a lane."""
        assert self.lanes_free > 0
        self.waiting.remove(request)
        self.lanes_free -= 1
        self.commands.append(OpenSession(request.key, request.sampling))
        request.status = Status.PREFILL
        self.prefilling[request.key] = request

    def take_commands(self) -> list[Command]:
        """The commands to send ahead of the next batch; a lane is freed before it is given away."""
        commands, self.commands = self.commands, []
        return commands

    def start_decode(self, request: Request) -> None:
        del self.prefilling[request.key]
        request.status = Status.DECODE
        self.decoding[request.key] = request

    def restart(self, request: Request) -> None:
        """Its session was emptied: its tokens have to be computed again, on the same lane."""
        self.totals.recomputed_tokens += request.computed
        request.computed = 0
        request.cached_tokens = 0
        if request.status is Status.DECODE:
            del self.decoding[request.key]
            request.status = Status.PREFILL
            self.prefilling[request.key] = request

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        status = Status.CANCELLED if reason == "cancelled" else Status.FINISHED
        request.finish_reason = reason
        self._end(request, status, now)

    def fail(self, request: Request, error: RequestError, now: float) -> None:
        request.error = error
        self._end(request, Status.FAILED, now)

    def _end(self, request: Request, status: Status, now: float) -> None:
        """The one place where a request ends; its lane is free for the next iteration."""
        assert not request.status.is_final, f"{request} ended twice"
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        else:
            table = self.prefilling if request.status is Status.PREFILL else self.decoding
            del table[request.key]
            self.lanes_free += 1
            self.commands.append(CloseSession(request.key))
        request.status = status
        request.finished_at = now
        request.paused = False
        self.share.leave(request.tenant)
        totals = self.totals
        totals.generated_tokens += request.completion_tokens
        if status is Status.FINISHED:
            totals.finished += 1
        elif status is Status.CANCELLED:
            totals.cancelled += 1
        else:
            totals.failed += 1

    # --- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between iterations."""
        totals = self.totals
        ended = totals.finished + totals.cancelled + totals.failed
        assert totals.accepted == ended + self.live, (totals, self.live)
        assert self.lanes_free + self.running == self.limits.lanes
        waiting = list(self.waiting)
        assert len(self.waiting) == len(waiting)
        assert self.waiting.tokens == sum(len(request.tokens) for request in waiting)
        for requests, status in (
            (waiting, Status.WAITING),
            (self.prefilling.values(), Status.PREFILL),
            (self.decoding.values(), Status.DECODE),
        ):
            for request in requests:
                assert request.status is status, request
                assert 0 <= request.cached_tokens <= request.computed <= len(request.tokens)
                assert len(request.tokens) <= request.token_limit
