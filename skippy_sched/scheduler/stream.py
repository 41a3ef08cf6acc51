"""One consumer's end of a request: a bounded buffer of events between engine and consumer.

Knows nothing of scheduling; it tells the engine when its buffer fills, empties, or is abandoned.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.request import Event, Request
from skippy_sched.scheduler.text import TextAssembler

if TYPE_CHECKING:
    from skippy_sched.scheduler.engine import Engine


class Stream:
    """Async iterator over a request's events.

    The last event carries finish reason and usage; a failed request raises its RequestError
    instead. One consumer at a time. Leaving the iteration early needs ``aclose`` (or ``async
    with``) so that the request is cancelled and its lane freed.
    """

    __slots__ = (
        "_buffer_tokens",
        "_buffered",
        "_ended",
        "_engine",
        "_error",
        "_events",
        "_new_waiter",
        "_waiter",
        "assembler",
        "request",
    )

    def __init__(self, engine: Engine, request: Request, assembler: TextAssembler) -> None:
        self.request = request
        self.assembler = assembler
        self._engine = engine
        self._buffer_tokens = engine.stream_buffer_tokens
        self._events: deque[Event] = deque()
        self._buffered = 0  # tokens of these
        self._new_waiter = asyncio.get_running_loop().create_future
        self._waiter: asyncio.Future[None] | None = None
        self._error: RequestError | None = None
        self._ended = False

    @property
    def request_id(self) -> str:
        return self.request.name

    @property
    def seed(self) -> int | None:
        """The seed that the samples are drawn with; None for a greedy request."""
        sampling = self.request.sampling
        return sampling.seed if sampling.enabled else None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        """The next event; cancelling the wait loses no event."""
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            assert self._waiter is None, "a stream has one consumer"
            self._waiter = self._new_waiter()
            try:
                await self._waiter
            finally:
                self._waiter = None
        event = self._events.popleft()
        self._buffered -= len(event.token_ids)
        if self.request.paused and self._buffered * 2 <= self._buffer_tokens:
            self._engine.resume(self.request)
        return event

    def cancel(self) -> None:
        """Ask for the end; the stream then ends with finish reason "cancelled"."""
        self._engine.cancel_request(self.request)

    async def aclose(self) -> None:
        """Give the stream up; the request is cancelled if it still runs. Idempotent."""
        self.cancel()
        self._events.clear()
        self._buffered = 0
        self._ended = True

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- the engine's side ------------------------------------------------------------------------

    def push(self, event: Event) -> bool:
        """Hand an event over; False when the buffer is full and the request should pause."""
        if self._ended:
            return True
        events, waiter = self._events, self._waiter
        events.append(event)
        self._buffered += len(event.token_ids)
        if event.finish_reason is not None:
            self._ended = True
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return self._buffered < self._buffer_tokens

    def fail(self, error: RequestError) -> None:
        if not self._ended:
            self._error = error
            self._ended = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
