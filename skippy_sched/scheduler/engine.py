"""The engine to embed: one asyncio task drives the scheduler, streams carry its tokens out.

It owns time, tasks and streams. What to run is the scheduler's decision (core.py), running it is
the executor's (worker.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from skippy_sched.clock import Clock, MonotonicClock, random_generator
from skippy_sched.config import Config
from skippy_sched.errors import Draining, EngineDead, InvalidRequest, RequestError, StartupError
from skippy_sched.native.facts import ModelFacts
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.explain import Requests
from skippy_sched.scheduler.grammar import Grammar, grammars_of
from skippy_sched.scheduler.intake import Intake
from skippy_sched.scheduler.iteration import Outcome
from skippy_sched.scheduler.journal import RecordingScheduler, open_journal
from skippy_sched.scheduler.loading import (
    context_tokens,
    make_scheduler,
)
from skippy_sched.scheduler.native import Native, open_native, reopen_native
from skippy_sched.scheduler.observe import Observer, Statistics, snapshot
from skippy_sched.scheduler.publisher import Publisher
from skippy_sched.scheduler.reconcile import Reconciled
from skippy_sched.scheduler.request import Event, Request, RequestParams
from skippy_sched.scheduler.stream import Stream
from skippy_sched.scheduler.text import TextAssembler
from skippy_sched.scheduler.vocabulary import Vocabulary

log = structlog.get_logger("skippy_sched.engine")

#: An engine lost more often than that in the window is given up.
LOSSES_MAX = 5
LOSSES_WINDOW_S = 300.0
#: The longest wait for the last native call when the engine is closed.
CLOSE_TIMEOUT_S = 10.0


class Engine:
    """Serves generation requests on one model; made by ``Engine.open``."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        config: Config,
        *,
        observer: Observer | None = None,
        clock: Clock | None = None,
        seed: int | None = None,
    ) -> AsyncIterator[Engine]:
        """Load the model and serve until the block is left; raises StartupError.

        Leaving the block fails what still runs; call ``drain`` first to let it finish. ``seed``
        makes the seeds of unseeded requests repeatable.
        """
        native = await asyncio.to_thread(open_native, config)
        try:
            journal = open_journal(config, native.facts)
        except StartupError:
            await native.close(CLOSE_TIMEOUT_S)
            raise
        engine = cls(
            config,
            native,
            clock or MonotonicClock(),
            random_generator(seed),
            observer,
            Scheduler if journal is None else partial(RecordingScheduler, journal),
        )
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine._run(), name="skippy-scheduler")
                tasks.create_task(engine._watch(), name="skippy-watchdog")
                try:
                    yield engine
                except Exception as error:
                    # The caller's own exception must not reach it wrapped in a group.
                    failure = error
                finally:
                    engine._stop()
        finally:
            # A hung or dead worker can't be waited for.
            await engine._native.close(0.0 if engine._dead else CLOSE_TIMEOUT_S)
            if journal is not None:
                journal.close()
        if failure is not None:
            raise failure

    def __init__(
        self,
        config: Config,
        native: Native,
        clock: Clock,
        rng: random.Random,
        observer: Observer | None,
        scheduler_kind: Callable[..., Scheduler] = Scheduler,
    ) -> None:
        self.facts: ModelFacts = native.facts
        self.context_tokens = context_tokens(config, native.facts)
        self.stream_buffer_tokens = config.scheduler.stream_buffer_tokens
        self._scheduler = make_scheduler(config, native.facts, scheduler_kind)
        self._watchdog_s = config.scheduler.watchdog_s
        self._config = config
        self._native = native
        #: between text and tokens
        self.vocabulary = Vocabulary(native.model, native.end_tokens)
        self._clock = clock
        self._intake = Intake(native.facts.n_vocab, self.context_tokens, native.end_tokens, rng)
        #: the requests by id, to explain them
        self.requests = Requests(self._scheduler, clock)
        self._publisher = Publisher(self._scheduler, self.requests, clock, observer)
        self._outcomes: deque[Outcome] = deque()
        self._submitted_at: dict[int, float] = {}
        self._last_iteration_at: float | None = None
        self._wake = asyncio.Event()
        self._died = asyncio.Event()
        self._closing = asyncio.Event()
        self._dead: str | None = None
        self._lost: str | None = None
        self._recoveries = 0
        self._recovery_s = 0.0
        self._losses_at: deque[float] = deque()
        self._draining = False

    # --- requests -------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
    ) -> AsyncIterator[Event]:
        """Generate from a text or token ids; the last event carries finish reason and usage.

        Leaving the iteration early (also by cancellation) cancels the request. Raises
        RequestError.
        """
        async with await self.submit(prompt, params, request_id=request_id) as stream:
            async for event in stream:
                yield event

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: RequestParams | None = None,
        *,
        request_id: str | None = None,
    ) -> Stream:
        """Check and queue a request.

        Raises InvalidRequest, ContextLengthExceeded, QueueFull, Draining or EngineDead, and then
        nothing was queued; the same holds when cancelled.
        """
        params = params or RequestParams()
        self._check_open()
        known_tokens = 0 if isinstance(prompt, str) else len(prompt)
        self._scheduler.check_room(known_tokens, self._clock.now())
        tokens = await self.vocabulary.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self._check_open()
        if request_id is not None and self.requests.find(request_id) is not None:
            raise InvalidRequest(f"request id {request_id!r} belongs to a request that still runs")
        self._check_abilities(params)
        request = self._intake.request(tokens, params, request_id, self._clock.now())
        self._scheduler.submit(request)
        stream = Stream(self, request, TextAssembler(self.vocabulary.pieces, params.stop))
        self._publisher.add(stream)
        self._wake.set()
        return stream

    async def compile_schema(self, schema: dict[str, Any], *, lenient: bool = False) -> Grammar:
        """For answers that are JSON of this schema; ``lenient``: keywords that cannot be held to
        are no error. Raises GrammarError."""
        grammars = grammars_of(self._native.model)
        return await asyncio.to_thread(grammars.compile_schema, schema, lenient=lenient)

    async def compile_gbnf(self, text: str) -> Grammar:
        """For answers that fit a grammar in llama.cpp's notation; raises GrammarError."""
        return await asyncio.to_thread(grammars_of(self._native.model).compile_gbnf, text)

    async def compile_lark(self, text: str) -> Grammar:
        """For answers that fit a grammar in Lark's notation, in which ``%json`` and a schema stand
        for JSON; raises GrammarError."""
        return await asyncio.to_thread(grammars_of(self._native.model).compile_lark, text)

    def _check_abilities(self, params: RequestParams) -> None:
        """What a libskippy may lack."""
        offers = self._native.model.library.offers
        if params.logprobs is not None and not offers("skippyx_session_logprobs"):
            raise InvalidRequest(
                "this server's native library tells no log-probabilities; leave logprobs out",
                param="logprobs",
            )
        if params.grammar is not None and not offers("skippyx_session_set_mask"):
            raise InvalidRequest(
                "this server's native library cannot hold an answer to a grammar or schema; "
                "ask for plain text"
            )

    def cancel(self, request_id: str) -> bool:
        """Cancel by id; False when no such request is live."""
        request = self.requests.find(request_id)
        if request is None:
            return False
        self.cancel_request(request)
        return True

    def cancel_request(self, request: Request) -> None:
        self._scheduler.cancel(request)
        self._wake.set()

    def resume(self, request: Request) -> None:
        """Its consumer has room again."""
        request.resume(self._clock.now())
        self._wake.set()

    # --- life -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, let the others finish, fail what is left at the limit.

        Returns how many were cut. If cancelled, the engine keeps refusing new requests.
        """
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._publisher.idle.wait()
        return self._fail_all(
            Draining("the server shut down before this request was finished", retry_after_s=1)
        )

    def limit_queue(self, requests: int, tokens: int) -> None:
        """From now on so many requests and prompt tokens may wait; none that waits is dropped."""
        state = self._scheduler.state
        state.limits = replace(state.limits, waiting_requests=requests, waiting_tokens=tokens)

    async def died(self) -> str:
        """Wait until the engine cannot go on; returns why."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    def statistics(self) -> Statistics:
        last = self._last_iteration_at
        return snapshot(
            self._scheduler.state,
            kv_tokens_max=self.facts.pool_cells,
            last_iteration_age_s=None if last is None else self._clock.now() - last,
            draining=self._draining,
            recoveries=self._recoveries,
            recovery_s=self._recovery_s,
            recovering=self._lost,
            dead=self._dead,
        )

    def check_invariants(self) -> None:
        """Assert what must hold between iterations; for tests and idle checks."""
        self._scheduler.state.check()

    def _check_open(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine is dead: {self._dead}", retry_after_s=5)
        if self._draining or self._closing.is_set():
            raise Draining("the server is shutting down and takes no new requests", retry_after_s=5)

    # --- the scheduler's task ---------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            self._native.executor.start(partial(self._on_outcome, self._native))
            while not self._closing.is_set() and self._dead is None:
                self._step()
                if self._lost is None:
                    await self._wait()
                else:
                    await self._recover()
        except Exception as error:
            # A bug of ours must still answer every client.
            log.exception("scheduler_failed")
            self._die(f"the scheduler failed: {type(error).__name__}: {error}")

    def _on_outcome(self, native: Native, outcome: Outcome) -> None:
        if native is self._native:  # what a lost engine still brings is of no use
            self._outcomes.append(outcome)
            self._wake.set()

    def _step(self) -> None:
        """Reconcile what has come back, send the next iteration off, then tell the streams."""
        clock, scheduler = self._clock, self._scheduler
        came: list[tuple[Outcome, Reconciled, float, float, float]] = []
        while self._outcomes:
            outcome = self._outcomes.popleft()
            if outcome.fatal is not None:
                self._lost = outcome.fatal
                break
            now = clock.now()
            submitted_at = self._submitted_at.pop(outcome.number)
            self._last_iteration_at = now
            reconciled = scheduler.on_outcome(outcome, now)
            came.append((outcome, reconciled, submitted_at, now, clock.now() - now))
        began = clock.now()
        ended = scheduler.sweep(began)
        executor = self._native.executor
        while self._lost is None and scheduler.iterations_under_way < executor.depth:
            iteration = scheduler.next_iteration(began)
            if iteration is None:
                break
            self._submitted_at[iteration.number] = began
            executor.submit(iteration)
        plan_s = clock.now() - began
        for outcome, reconciled, submitted_at, now, reconcile_s in came:
            self._publisher.publish(reconciled)
            scheduler.learn(outcome, reconciled)
            self._publisher.observe(outcome, reconciled, submitted_at, now, plan_s, reconcile_s)
        for request in ended:
            self._publisher.end(request)
        if scheduler.state.commands and scheduler.iterations_under_way < executor.depth:
            self._wake.set()  # a stop string has just freed a lane

    async def _wait(self) -> None:
        deadline = self._scheduler.next_deadline_at
        if deadline is None:
            await self._wake.wait()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                    await self._wake.wait()
        self._wake.clear()

    async def _watch(self) -> None:
        """Declare the engine lost when a native call takes longer than the watchdog allows."""
        while self._dead is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._watchdog_s / 4, 1.0)):
                    await self._closing.wait()
                    return
            oldest = min(self._submitted_at.values(), default=None)
            if oldest is not None and self._clock.now() - oldest > self._watchdog_s:
                self._lost = (
                    f"a native call has not returned within {self._watchdog_s} s "
                    "(scheduler.watchdog_s)"
                )
                self._wake.set()

    async def _recover(self) -> None:
        """Open the engine again; what ran on the lost one is computed again from its tokens.

        A thread that hangs can't be ended: it and its model are left behind. Engines that are
        lost again and again are given up.
        """
        reason, began = self._lost, self._clock.now()
        assert reason is not None
        self._losses_at.append(began)
        while self._losses_at[0] < began - LOSSES_WINDOW_S:
            self._losses_at.popleft()
        if len(self._losses_at) > LOSSES_MAX:
            self._die(reason)
            return
        log.warning("engine_lost", reason=reason, requests=self._scheduler.state.running)
        lost = self._native
        self._native = replace(lost)  # so that late outcomes of the lost one are told apart
        await lost.executor.close(0.0)
        self.requests.engine_is_lost = True
        self._outcomes.clear()
        self._submitted_at.clear()
        for request in self._scheduler.engine_lost(began):
            self._publisher.end(request)
        try:
            self._native = await asyncio.to_thread(reopen_native, self._config, lost)
        except StartupError as error:
            self._die(f"{reason}; it could not be opened again: {error}")
            return
        self.vocabulary.model = self._native.model
        self._native.executor.start(partial(self._on_outcome, self._native))
        self._lost = None
        self.requests.engine_is_lost = False
        self._recoveries += 1
        self._recovery_s += self._clock.now() - began
        log.info("engine_recovered", seconds=round(self._clock.now() - began, 3))

    def _die(self, reason: str) -> None:
        if self._dead is not None:
            return
        self._dead = reason
        log.error("engine_dead", reason=reason)
        self._fail_all(EngineDead(f"the engine died: {reason}", retry_after_s=5))
        self._died.set()
        self._wake.set()

    def _stop(self) -> None:
        self._closing.set()
        self._fail_all(Draining("the engine was closed", retry_after_s=1))
        self._wake.set()

    def _fail_all(self, error: RequestError) -> int:
        cut = 0
        for request in self._scheduler.live_requests():
            if self._scheduler.fail(request, error, self._clock.now()):
                self._publisher.end(request)
                cut += 1
        self._wake.set()
        return cut
