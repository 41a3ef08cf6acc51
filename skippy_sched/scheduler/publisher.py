"""Gives the tokens of an outcome to their streams, and each request its one terminal answer.

Runs while the next iteration does. Knows streams, text and the observer; nothing of planning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skippy_sched.clock import Clock
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.explain import Requests
from skippy_sched.scheduler.iteration import Outcome
from skippy_sched.scheduler.observe import IterationRecord, Observer, RequestRecord
from skippy_sched.scheduler.reconcile import Reconciled
from skippy_sched.scheduler.request import Event, Request
from skippy_sched.scheduler.stream import Stream


class Publisher:
    """The streams of the live requests; ``idle`` is set while there are none."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: Requests,
        clock: Clock,
        observer: Observer | None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._clock = clock
        self._observer = observer
        self._streams: dict[int, Stream] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def add(self, stream: Stream) -> None:
        self._streams[stream.request.key] = stream
        self._requests.add(stream.request)
        self.idle.clear()

    def publish(self, reconciled: Reconciled) -> None:
        """Hand the tokens of one outcome to their streams."""
        streams, logprobs = self._streams, reconciled.logprobs
        # Written flat: it runs once per running request and iteration.
        for request, token in reconciled.tokens:
            stream = streams.get(request.key)
            if stream is None:
                continue
            assembler = stream.assembler
            text = assembler.push(token)
            if assembler.stopped_by is not None:
                self._apply_stop(request, stream)
            event = Event((token,), text)
            if logprobs and request.key in logprobs:
                event.logprobs = logprobs[request.key]
                event.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
            if request.status.is_final:
                self.end(request, event)
            elif not stream.push(event):
                request.pause(self._clock.now())
        for request, run in reconciled.runs:
            if (stream := streams.get(request.key)) is not None:
                self._publish_run(request, stream, run)
        for request in reconciled.ended:
            self.end(request)

    def _publish_run(self, request: Request, stream: Stream, run: Sequence[int]) -> None:
        """Several tokens at once; those behind the end of a stop string are never told."""
        text, told = "", 0
        while told < len(run) and stream.assembler.stopped_by is None:
            text += stream.assembler.push(run[told])
            told += 1
        self._apply_stop(request, stream, len(run) - told)
        if request.status.is_final:
            self.end(request, Event(tuple(run[:told]), text))
        elif not stream.push(Event(tuple(run), text)):
            request.pause(self._clock.now())

    def _apply_stop(self, request: Request, stream: Stream, behind: int = 0) -> None:
        stop = stream.assembler.stopped_by
        if stop is not None:
            self._scheduler.stop(request, stop, self._clock.now(), behind)

    def end(self, request: Request, last: Event | None = None) -> None:
        """Give the terminal answer, once, and forget the request."""
        stream = self._streams.pop(request.key, None)
        if stream is None:
            return
        if request.error is not None:
            stream.fail(request.error)
        else:
            event = last or Event((), "")
            event.text += stream.assembler.flush()
            self._apply_stop(request, stream)
            event.finish_reason = request.finish_reason
            event.stop_reason = request.stop_reason
            event.usage = request.usage
            stream.push(event)
        if not self._streams:
            self.idle.set()
        self._requests.on_end(request)
        if self._observer is not None:
            self._observer.on_request_end(_receipt(request))

    def observe(
        self,
        outcome: Outcome,
        reconciled: Reconciled,
        submitted_at: float,
        reconciled_at: float,
        plan_s: float,
        reconcile_s: float,
    ) -> None:
        if self._observer is None:
            return
        self._observer.on_iteration(
            IterationRecord(
                outcome.number,
                reconciled.iteration,
                reconciled.decodes,
                reconciled.chunk_requests,
                reconciled.verify_requests,
                submitted_at,
                reconciled_at,
                reconciled.prefill_tokens,
                len(outcome.chunk_samples),
                len(outcome.decode_samples) + len(outcome.verified),
                reconciled.draft_tokens,
                outcome.native_s,
                plan_s,
                reconcile_s,
                reconciled.gaps_s,
            )
        )


def _receipt(request: Request) -> RequestRecord:
    assert request.finished_at is not None
    return RequestRecord(
        key=request.key,
        request_id=request.name,
        tenant=request.params.tenant,
        outcome=request.status.value,
        finish_reason=request.finish_reason,
        error=request.error,
        usage=request.usage,
        preemptions=request.preemptions,
        seed=request.sampling.seed if request.sampling.enabled else None,
        arrived_at=request.arrived_at,
        planned_at=request.planned_at,
        first_token_at=request.first_token_at,
        finished_at=request.finished_at,
        steps=request.history.steps,
        trace_parent=request.params.trace_parent,
    )
