"""The scheduler without I/O: requests and outcomes go in, iterations and tokens come out.

It holds the state and the iterations under way, and calls planner and reconcile. It is driven by
engine.py in real time, and can be driven by anything else that hands it a time; it starts no
task, reads no clock and touches no session.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

from skippy_sched.errors import DeadlineExceeded, EngineFailure, QueueFull, RequestError
from skippy_sched.scheduler.cost import CostModel
from skippy_sched.scheduler.drain_rate import DrainRate
from skippy_sched.scheduler.iteration import Iteration, Outcome
from skippy_sched.scheduler.plan import Budget, Plan
from skippy_sched.scheduler.planner import plan
from skippy_sched.scheduler.policy import FairShare
from skippy_sched.scheduler.prefix_cache import PrefixCache
from skippy_sched.scheduler.reconcile import Reconciled, reconcile
from skippy_sched.scheduler.request import Request, Status
from skippy_sched.scheduler.speculation import Speculation
from skippy_sched.scheduler.state import Limits, State


@dataclass(slots=True)
class UnderWay:
    """An iteration that was handed out, with the requests of its rows."""

    iteration: Iteration
    plan: Plan
    chunk_requests: list[Request]
    verify_requests: list[Request]
    began_at: float

    @property
    def requests(self) -> list[Request]:
        return [*self.plan.decodes, *self.chunk_requests, *self.verify_requests]


class Scheduler:
    """``inter_token_s``: the gap between tokens that prompts may cause; None: automatic."""

    def __init__(
        self,
        limits: Limits,
        *,
        share: FairShare | None = None,
        costs: CostModel | None = None,
        cache: PrefixCache | None = None,
        inter_token_s: float | None = None,
        preemption: Literal["auto", "swap", "recompute"] = "auto",
        speculation: Speculation | None = None,
    ) -> None:
        self.state = State(limits, share, cache, speculation)
        self.preemption = preemption
        self.costs = costs or CostModel()
        self.inter_token_s = inter_token_s
        self.last_plan: Plan | None = None
        self.drain_rate = DrainRate()
        self._under_way: dict[int, UnderWay] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._next_number = 1

    @property
    def iterations_under_way(self) -> int:
        return len(self._under_way)

    # --- requests in ----------------------------------------------------------------------------

    def check_room(self, prompt_tokens: int, now: float) -> None:
        """Raise QueueFull if a request with that prompt could not wait.

        It says when there will be room, by the rate at which the queue drains.
        """
        state, limits = self.state, self.state.limits
        waiting = len(state.waiting)
        if waiting >= limits.waiting_requests:
            raise QueueFull(
                f"{waiting} requests are waiting, the most that may; try again later "
                "or raise scheduler.waiting_requests_max",
                retry_after_s=self.drain_rate.room_in_s(waiting, now),
            )
        excess = state.waiting.tokens + prompt_tokens - limits.waiting_tokens
        if waiting and excess > 0:
            raise QueueFull(
                f"{state.waiting.tokens} prompt tokens are waiting and this prompt has "
                f"{prompt_tokens}; at most {limits.waiting_tokens} may wait; try again later "
                "or raise scheduler.waiting_tokens_max",
                retry_after_s=self.drain_rate.tokens_in_s(min(excess, state.waiting.tokens)),
            )

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull, and then nothing has changed."""
        self.check_room(request.prompt_tokens, request.arrived_at)
        self.state.enqueue(request)
        if request.deadline_at is not None:
            heapq.heappush(self._deadlines, (request.deadline_at, request.key, request))

    def cancel(self, request: Request) -> None:
        """Mark it; the mark is looked at before the next plan and can't be lost."""
        if not request.status.is_final and not request.cancel_requested:
            request.cancel_requested = True
            self.state.marked.append(request)

    # --- ends that no outcome brings ------------------------------------------------------------

    def sweep(self, now: float) -> list[Request]:
        """End the requests that were cancelled or whose deadline passed; returns them."""
        state = self.state
        ended: list[Request] = []
        while state.marked:
            request = state.marked.popleft()
            if not request.status.is_final:
                state.finish(request, "cancelled", now)
                ended.append(request)
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.status.is_final:
                self._expire(request, now)
                ended.append(request)
        return ended

    @property
    def next_deadline_at(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def _expire(self, request: Request, now: float) -> None:
        """With what it has, or failed if it has nothing."""
        if request.completion_tokens:
            self.state.finish(request, "length", now)
            request.stop_reason = "deadline"
        else:
            waited = now - request.arrived_at
            error = DeadlineExceeded(
                f"no token within the request's timeout of {request.params.timeout_s} s "
                f"(it was {request.status.value} for {waited:.3f} s)"
            )
            self.state.fail(request, error, now)

    def stop(self, request: Request, stop: str, now: float, behind: int = 0) -> bool:
        """End a request whose text reached a stop string; False if it had ended otherwise.

        A stop string completed by the last allowed token still is a stop. So many tokens as are
        ``behind`` the one that completed it do not count.
        """
        if request.status is Status.FINISHED:
            request.finish_reason = "stop"
        elif request.status.is_final:
            return False
        else:
            self.state.finish(request, "stop", now)
        request.stop_reason = stop
        if behind:
            self.state.take_back(request, behind)
        return True

    def fail(self, request: Request, error: RequestError, now: float) -> bool:
        if request.status.is_final:
            return False
        self.state.fail(request, error, now)
        return True

    def engine_lost(self, now: float) -> list[Request]:
        """Every session is gone, and iterations under way will have no outcome.

        The requests of those iterations are under suspicion; who is for the second time in a row
        is failed. The others are computed again. Returns the failed ones.
        """
        failed = []
        for under_way in self._under_way.values():
            for request in under_way.requests:
                request.in_flight = 0
                if request.status.is_final:
                    continue
                self.state.suspect(request)
                if request.crashes > 1:
                    error = EngineFailure("the engine was lost twice while it ran this request")
                    self.state.fail(request, error, now)
                    failed.append(request)
        self._under_way.clear()
        self.state.forget_sessions(now)
        return failed

    def live_requests(self) -> list[Request]:
        state = self.state
        return [*state.decoding.values(), *state.prefilling.values(), *state.waiting]

    # --- iterations out, outcomes in ------------------------------------------------------------

    def next_iteration(self, now: float) -> Iteration | None:
        """Plan, book and return the next iteration; None when there is nothing to do."""
        state = self.state
        costs = self.costs
        budget = Budget(
            state.limits.batch_tokens, costs.coefficients, self.inter_token_s, costs.caution
        )
        chosen = plan(state, budget, now)
        self.last_plan = chosen
        if chosen.is_empty and not state.commands and not chosen.preempt:
            self._measure_drain(chosen, now)
            return None
        matched = [match.entry for _, match in chosen.admit if match is not None]
        for entry in matched:
            entry.users += 1  # not to be evicted before it is restored
        state.evict(chosen.evict_tokens)
        for request in chosen.preempt:
            state.preempt(request, now, swap=self._should_swap())
        for entry in matched:
            entry.users -= 1
        for request, match in chosen.admit:
            state.admit(request, match, now)
            if request.planned_at is None:
                request.planned_at = now
        self._measure_drain(chosen, now)
        for request in chosen.decodes:
            request.in_flight = 1
        chunk_requests = []
        for chunk in chosen.chunks:
            request = state.prefilling[chunk.key]
            request.in_flight = len(chunk.tokens)
            chunk_requests.append(request)
        verify_requests = []
        for verify in chosen.verifies:
            request = state.decoding[verify.key]
            request.in_flight = len(verify.tokens)
            verify_requests.append(request)
        iteration = Iteration(
            self._next_number,
            state.take_commands(),
            [request.key for request in chosen.decodes],
            [request.tokens[-1] for request in chosen.decodes],
            chosen.chunks,
            chosen.verifies,
        )
        self._next_number += 1
        self._under_way[iteration.number] = UnderWay(
            iteration, chosen, chunk_requests, verify_requests, now
        )
        return iteration

    def on_outcome(self, outcome: Outcome, now: float) -> Reconciled:
        """Apply an outcome; what it returns may be told to the streams."""
        under_way = self._under_way.pop(outcome.number)
        iteration = under_way.iteration
        totals = self.state.totals
        totals.iterations += 1
        totals.native_calls += outcome.native_calls
        totals.partial_batches += outcome.partial_batches
        if decodes := len(iteration.decode_keys) + len(iteration.verifies):
            totals.decode_iterations += 1
            totals.decode_rows += decodes
        reconciled = reconcile(
            self.state,
            iteration,
            under_way.plan.decodes,
            under_way.chunk_requests,
            under_way.verify_requests,
            outcome,
            now,
        )
        totals.prefill_tokens += reconciled.prefill_tokens
        reconciled.work = under_way.plan.work
        # What a stream feels is the time from plan to outcome; side by side, that is not one's own.
        alone = self.state.limits.groups == 1
        reconciled.seconds = now - under_way.began_at if alone else outcome.native_s
        return reconciled

    def _measure_drain(self, chosen: Plan, now: float) -> None:
        left, tokens = len(chosen.admit) - len(chosen.preempt), 0
        if left > 0:
            tokens = sum(len(request.tokens) for request, _ in chosen.admit)
        self.drain_rate.observe(now, left, tokens, is_waiting=len(self.state.waiting) > 0)

    def _should_swap(self) -> bool:
        """Swap out, or compute again later: whichever takes less time, unless told."""
        if self.preemption != "auto":
            return self.preemption == "swap"
        costs = self.costs.coefficients
        return self.costs.swap_token_s < costs.prefill_token_s

    def learn(self, outcome: Outcome, reconciled: Reconciled) -> None:
        """Fit the costs to a clean iteration; apart from ``on_outcome`` so that it can wait."""
        self.costs.observe_swap(outcome.swapped_tokens, outcome.swap_s)
        if not outcome.faults and reconciled.work is not None:
            self.costs.observe(reconciled.work, reconciled.seconds)
