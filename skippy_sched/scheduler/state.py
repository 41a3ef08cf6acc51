"""The scheduler's only mutable state: which request is where, and what is free.

Knows counts and containers. Does not decide (planner.py) and does not interpret outcomes
(reconcile.py); it only moves requests so that the books stay balanced.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.iteration import (
    NO_SAMPLE,
    CloseSession,
    Command,
    DropPrefix,
    OpenSession,
    Restore,
    SavePrefix,
    SwapOut,
)
from skippy_sched.scheduler.policy import FairShare, WaitingQueue
from skippy_sched.scheduler.prefix_cache import PREFIX_TOKENS_MIN, Entry, Match, PrefixCache
from skippy_sched.scheduler.request import FinishReason, Request, Status
from skippy_sched.scheduler.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that the scheduler lives within; all in tokens or requests."""

    lanes: int
    batch_tokens: int  # of one iteration
    context_tokens: int  # of one request, prompt and completion
    chunk_tokens: int  # of one request in one iteration
    waiting_requests: int
    waiting_tokens: int
    isolate_tenants: bool = False  # whether saved prefixes are only for the tenant they came from
    pool_cells: int | None = None  # cells that all lanes share; None: each lane has its own
    groups: int = 1  # iterations that may be under way at once, on as many stages
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
    preemptions: int = 0
    swaps: int = 0
    iterations: int = 0
    decode_iterations: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    native_calls: int = 0
    partial_batches: int = 0
    requeued_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class State:
    """Requests by stage of life. Every live request is in exactly one container."""

    def __init__(
        self,
        limits: Limits,
        share: FairShare | None = None,
        cache: PrefixCache | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.limits = limits
        self.cache = PrefixCache(0) if cache is None else cache
        self.share = share or FairShare()
        #: None: no drafts
        self.speculation = speculation
        self.waiting = WaitingQueue(self.share, limits.aging_s)
        self.prefilling: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self._free_lanes = list(range(limits.lanes))  # a heap: the lowest is given first
        #: sent ahead of the next iteration's batch, in this order
        self.commands: list[Command] = []
        #: requests with ``cancel_requested``, looked at before each plan
        self.marked: deque[Request] = deque()
        #: running or waiting requests under suspicion of having taken the engine down
        self.suspects: dict[int, Request] = {}
        self.totals = Totals()

    @property
    def lanes_free(self) -> int:
        return len(self._free_lanes)

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    @property
    def live(self) -> int:
        return self.running + len(self.waiting)

    @property
    def kv_tokens(self) -> int:
        """KV cells in use: what running requests hold themselves, and the saved prefixes."""
        own = sum(r.computed - r.shared_tokens for r in self.decoding.values())
        own += sum(r.computed - r.shared_tokens for r in self.prefilling.values())
        return own + self.cache.tokens

    # --- moves ------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        assert request.status is Status.WAITING
        self.share.enter(request.tenant)
        request.charge = 1.0 / self.share.weight(request.tenant)
        self.waiting.push(request)
        self.totals.accepted += 1
        self.totals.prompt_tokens += request.prompt_tokens

    def admit(self, request: Request, match: Match | None, now: float) -> None:
        """From the queue to a lane, with what is saved of its tokens."""
        assert self.lanes_free > 0
        self.waiting.remove(request)
        request.lane = heapq.heappop(self._free_lanes)
        restore = None
        swapped = request.swapped_tokens > 0
        if swapped:
            request.computed, request.swapped_tokens = request.swapped_tokens, 0
        elif match is not None:
            match.entry.used_at = now
            self._hold(request, match.entry, match.length)
            request.computed = match.length
            restore = Restore(match.entry.sequence_id, request.tokens[: match.length])
            if not request.preemptions:
                request.cached_tokens = min(match.length, request.prompt_tokens)
                self.totals.cached_tokens += request.cached_tokens
        history = request.history
        history.enter("prefill", now)
        history.step("swapped in" if swapped else "admitted", request.computed, now)
        self.commands.append(
            OpenSession(
                request.key,
                request.sampling,
                restore,
                swapped,
                request.params.logprobs,
                request.params.grammar,
                request.prompt_tokens,
                request.tokens[request.prompt_tokens :],
            )
        )
        request.status = Status.PREFILL
        self.prefilling[request.key] = request

    def preempt(self, request: Request, now: float, *, swap: bool) -> None:
        """From its lane back to the queue; its state is kept in host memory, or computed again."""
        assert not request.in_flight
        self._leave_lane(request)
        self.totals.preemptions += 1
        request.preemptions += 1
        swap = swap and request.computed > 0
        request.history.enter("waiting", now)
        request.history.step("swapped out" if swap else "preempted", request.computed, now)
        if swap:
            self.totals.swaps += 1
            request.swapped_tokens = request.computed
            self.commands.append(SwapOut(request.key))
        else:
            self.totals.recomputed_tokens += request.computed
            self.commands.append(CloseSession(request.key))
        request.computed = 0
        request.paused = False
        request.status = Status.WAITING
        self.waiting.push(request, returned=True)

    def forget_sessions(self, now: float) -> None:
        """The engine is gone, and with it every session, saved prefix and swapped state.

        All running requests return to the queue, to be computed again from their tokens.
        """
        self.commands.clear()
        for request in self.waiting:
            request.swapped_tokens = 0
        for request in (*self.decoding.values(), *self.prefilling.values()):
            self._leave_lane(request)
            self.totals.recomputed_tokens += request.computed
            request.history.enter("waiting", now)
            request.history.step("engine lost", request.computed, now)
            request.computed = request.in_flight = 0
            request.status = Status.WAITING
            self.waiting.push(request, returned=True)
        self.cache.clear()

    def suspect(self, request: Request) -> None:
        request.crashes += 1
        self.suspects[request.key] = request

    def clear_suspicion(self, request: Request) -> None:
        request.crashes = 0
        self.suspects.pop(request.key, None)

    def _leave_lane(self, request: Request) -> None:
        table = self.prefilling if request.status is Status.PREFILL else self.decoding
        del table[request.key]
        heapq.heappush(self._free_lanes, request.lane)
        self._hold(request, None, 0)

    def salt(self, request: Request) -> str:
        return request.tenant if self.limits.isolate_tenants else ""

    # --- saved prefixes ---------------------------------------------------------------------------

    def _hold(self, request: Request, entry: Entry | None, shared_tokens: int) -> None:
        """The request uses cells of this entry from now on; it can't be evicted meanwhile."""
        if request.entry is not None:
            request.entry.users -= 1
        if entry is not None:
            entry.users += 1
        request.entry_before = (None, 0)
        request.entry = entry
        request.shared_tokens = 0 if self.cache.copies else shared_tokens

    def save_prefix(self, request: Request, length: int, now: float) -> None:
        """Keep the first ``length`` computed tokens for others, if that adds enough."""
        cache = self.cache
        tokens = request.tokens[:length]
        salt = self.salt(request)
        known = cache.match([*tokens, NO_SAMPLE], salt) if cache.tokens_max else None
        known_length = known.length if known else 0
        if length - known_length < PREFIX_TOKENS_MIN or length > cache.tokens_max:
            return
        if not cache.copies and known_length > request.shared_tokens:
            return  # its own cells would double those that are saved already
        doubles = request.entry.doubles if request.entry and request.shared_tokens else 0
        pool = self.limits.pool_cells
        if doubles and pool is not None and self.kv_tokens + doubles > pool:
            return  # counting them again would exceed the pool
        size = length if cache.copies else length - request.shared_tokens + doubles
        self.evict(cache.tokens + size - cache.tokens_max)
        if cache.tokens + size > cache.tokens_max:
            return
        if not cache.has_free_id:
            self.evict(0, ids=1)
        entry = cache.add(tokens, now, salt, shared_tokens=request.shared_tokens, doubles=doubles)
        if entry is not None:
            self.commands.append(SavePrefix(request.key, entry.sequence_id, length))
            before = (request.entry, request.shared_tokens)
            self._hold(request, entry, length)
            request.entry_before = before

    def evict(self, tokens: int, *, ids: int = 0) -> None:
        """Drop least recently used prefixes until so many tokens (and ids) are free."""
        if tokens <= 0 and not ids:
            return
        for entry in self.cache.victims(tokens, ids=ids):
            self.cache.remove(entry)
            self.commands.append(DropPrefix(entry.sequence_id))

    def forget_prefix(self, sequence_id: int) -> None:
        """Saving it failed: nobody may use it, and whom it came from still uses what it did."""
        for request in (*self.prefilling.values(), *self.decoding.values()):
            if request.entry is not None and request.entry.sequence_id == sequence_id:
                entry, shared_tokens = request.entry_before
                there = entry is not None and entry in self.cache.entries
                self._hold(request, entry if there else None, shared_tokens if there else 0)
        for entry in self.cache.entries:
            if entry.sequence_id == sequence_id:
                self.cache.remove(entry)

    def take_commands(self) -> list[Command]:
        """The commands to send ahead of the next batch; a lane is freed before it is given away."""
        commands, self.commands = self.commands, []
        return commands

    def start_decode(self, request: Request, now: float) -> None:
        del self.prefilling[request.key]
        request.status = Status.DECODE
        self.decoding[request.key] = request
        request.history.enter("decode", now)
        request.history.step("decoding", request.computed, now)

    def restart(self, request: Request, now: float) -> None:
        """Its session was emptied: its tokens have to be computed again, on the same lane."""
        self._hold(request, None, 0)
        self.totals.recomputed_tokens += request.computed
        request.history.enter("prefill", now)
        request.history.step("restarted", request.computed, now)
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
            if request.swapped_tokens:
                self.commands.append(CloseSession(request.key))
        else:
            if status is not Status.FAILED:
                self.save_prefix(request, request.computed, now)
            self._leave_lane(request)
            self.commands.append(CloseSession(request.key))
        request.status = status
        request.finished_at = now
        request.paused = False
        request.history.enter("ended", now)
        request.history.step("ended", request.completion_tokens, now)
        self.suspects.pop(request.key, None)
        self.share.leave(request.tenant)
        if self.speculation is not None:
            self.speculation.forget(request)
        totals = self.totals
        totals.generated_tokens += request.completion_tokens
        if status is Status.FINISHED:
            totals.finished += 1
        elif status is Status.CANCELLED:
            totals.cancelled += 1
        else:
            totals.failed += 1

    def take_back(self, request: Request, tokens: int) -> None:
        """An ended request's last tokens come after its end: a verify brought them all at once."""
        assert request.status.is_final
        del request.tokens[len(request.tokens) - tokens :]
        request.computed = min(request.computed, len(request.tokens))
        request.accepted_tokens -= tokens
        self.totals.accepted_tokens -= tokens
        self.totals.generated_tokens -= tokens

    # --- invariants ---------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between iterations."""
        totals = self.totals
        ended = totals.finished + totals.cancelled + totals.failed
        assert totals.accepted == ended + self.live, (totals, self.live)
        held = [r.lane for r in (*self.prefilling.values(), *self.decoding.values())]
        assert sorted([*held, *self._free_lanes]) == list(range(self.limits.lanes)), held
        self.cache.check()
        running = (*self.prefilling.values(), *self.decoding.values())
        users = sum(entry.users for entry in self.cache.entries)
        assert users == sum(1 for request in running if request.entry is not None)
        if self.limits.pool_cells is not None:
            assert self.kv_tokens <= self.limits.pool_cells, (self.kv_tokens, self.limits)
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
                assert 0 <= request.shared_tokens <= request.computed <= len(request.tokens)
                assert len(request.tokens) <= request.token_limit
