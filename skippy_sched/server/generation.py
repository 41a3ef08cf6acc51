"""Carries one HTTP request's choices from the engine to the client, streamed or whole.

Knows streams and their ends. Does not know which endpoint it serves: the format does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import Event, RequestParams, Usage
from skippy_sched.scheduler.stream import Stream
from skippy_sched.server.exchange import Exchange
from skippy_sched.server.logprobs import CompletionLogprobs, Logprobs, Part, joined
from skippy_sched.server.problems import Cancelled, ClientGone
from skippy_sched.server.replies import DONE, Choice, Format


@dataclass(frozen=True, slots=True)
class Order:
    """One choice to be generated; ``echo`` comes before its text."""

    prompt: str | Sequence[int]
    params: RequestParams
    echo: str = ""
    #: the first choice of its prompt, which accounts for the prompt's tokens
    counts_prompt: bool = True
    #: only the prompt's log-probabilities are wanted; to get them takes a token more
    drops_answer: bool = False


class Generation:
    """The choices of one request, each with its stream."""

    def __init__(self, engine: Engine, orders: Sequence[Order], streams: Sequence[Stream]) -> None:
        self.engine = engine
        self.orders = orders
        self.streams = streams
        self.choices = [Choice() for _ in orders]
        self._usages = [Usage(0, 0)] * len(orders)
        self._is_flowing = False

    @classmethod
    @asynccontextmanager
    async def submitted(
        cls, engine: Engine, orders: Sequence[Order], request_id: str
    ) -> AsyncIterator[Generation]:
        """Queue all choices, or none; leaving the block frees what still runs."""
        async with AsyncExitStack() as stack:
            streams = []
            for index, order in enumerate(orders):
                name = f"{request_id}-{index}" if index else request_id
                stream = await engine.submit(order.prompt, order.params, request_id=name)
                streams.append(await stack.enter_async_context(stream))
            yield cls(engine, orders, streams)

    def cancel(self) -> None:
        for stream in self.streams:
            stream.cancel()

    @property
    def prompt_tokens(self) -> int:
        """Known from the start; a prompt counts once, however many choices it has."""
        pairs = zip(self.streams, self.orders, strict=True)
        return sum(stream.request.prompt_tokens for stream, order in pairs if order.counts_prompt)

    @property
    def generated_tokens(self) -> int:
        """So far, also of choices that were cut or are not told."""
        return sum(stream.request.completion_tokens for stream in self.streams)

    @property
    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has."""
        firsts = [
            usage
            for usage, order in zip(self._usages, self.orders, strict=True)
            if order.counts_prompt
        ]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in firsts),
            completion_tokens=sum(usage.completion_tokens for usage in self._usages),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in self._usages),
            rejected_draft_tokens=sum(usage.rejected_draft_tokens for usage in self._usages),
        )

    # --- whole ----------------------------------------------------------------------------------

    async def answer(
        self, exchange: Exchange, form: Format, idle_s: float, best: tuple[int, int] | None = None
    ) -> None:
        """``best`` (k, of): only the k likeliest of every so many choices are told.

        Raises RequestError, and ClientGone.
        """
        async with exchange.watched(self.cancel, idle_s, lambda: ()):
            await self._each_choice(lambda index: self._collect_choice(exchange, form, index))
        choices = self.choices if best is None else likeliest(self.choices, *best)
        await exchange.answer_json(200, form.whole(choices, self.usage))

    async def _collect_choice(self, exchange: Exchange, form: Format, index: int) -> None:
        choice, writer = self.choices[index], self._writer(form)
        texts: list[str] = []
        parts: list[Part] = []
        told: list[float] = []
        async for event in self.streams[index]:
            if event.logprobs is not None:
                told.append(event.logprobs.logprob)
            for text, part in self._pieces(index, event, writer, is_first=not texts):
                texts.append(text)
                if part is not None:
                    parts.append(part)
            if event.finish_reason is not None:
                self._end(exchange, index, event)
        choice.text = "".join(texts)
        choice.logprobs = joined(parts)
        choice.mean_logprob = sum(told) / len(told) if told else 0.0

    def _writer(self, form: Format) -> Logprobs | None:
        return form.logprobs_of(self.engine.vocabulary) if form.tells_logprobs else None

    def _pieces(
        self, index: int, event: Event, writer: Logprobs | None, *, is_first: bool
    ) -> list[tuple[str, Part | None]]:
        """The texts of an event and what goes with them; the echo comes with the first."""
        order = self.orders[index]
        pieces: list[tuple[str, Part | None]] = []
        if is_first:
            part = None
            if isinstance(writer, CompletionLogprobs) and order.params.prompt_logprobs:
                request = self.streams[index].request
                part = writer.prompt_part(
                    request.tokens[: request.prompt_tokens],
                    event.prompt_logprobs,
                    order.echo,
                    as_text=isinstance(order.prompt, str),
                )
            pieces.append((order.echo, part))
        if not order.drops_answer:
            told = event.logprobs
            pieces.append(
                (event.text, None if writer is None or told is None else writer.part(told))
            )
        return pieces

    # --- streamed -------------------------------------------------------------------------------

    async def stream(self, exchange: Exchange, form: Format, idle_s: float) -> None:
        """Raises RequestError, perhaps in mid-stream, and ClientGone."""
        form.prepare_stream(len(self.streams))
        async with exchange.watched(self.cancel, idle_s, self._waiting):
            await self._each_choice(lambda index: self._write_choice(exchange, form, index))
        tail = form.usage_event(self.usage).encode() if form.include_usage else b""
        await exchange.write(tail + DONE)
        await exchange.end()

    async def _write_choice(self, exchange: Exchange, form: Format, index: int) -> None:
        """One write per iteration: an event's text, and what opens or ends the choice with it."""
        choice, writer = self.choices[index], self._writer(form)
        before, is_first = form.opening(index), True
        async for event in self.streams[index]:
            data = before
            if is_first or writer is not None:
                for text, part in self._pieces(index, event, writer, is_first=is_first):
                    if text or part is not None:
                        data += form.delta(index, text, part)
            elif event.text:
                data += form.delta(index, event.text)
            before, is_first = "", False
            if event.finish_reason is not None:
                self._end(exchange, index, event)
                data += form.finish(index, choice)
            if data:
                self._is_flowing = True
                await exchange.write(data.encode())

    def _waiting(self) -> Iterable[bytes]:
        """A comment for proxies, which cut silent connections, and for people with curl."""
        if self._is_flowing:
            return
        now = self.engine.statistics()
        yield f": {now.waiting} requests waiting, {now.running} running\n\n".encode()

    def _end(self, exchange: Exchange, index: int, event: Event) -> None:
        if exchange.is_gone:
            raise ClientGone
        if event.finish_reason == "cancelled":
            raise Cancelled("the request was cancelled")
        assert event.usage is not None
        choice, usage = self.choices[index], event.usage
        choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
        if self.orders[index].drops_answer:
            choice.finish_reason, choice.stop_reason = "length", None
            usage = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        self._usages[index] = usage

    async def _each_choice(self, run: Callable[[int], Coroutine[None, None, None]]) -> None:
        """All choices side by side; the first to fail ends them all."""
        if len(self.streams) == 1:
            await run(0)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self.streams)):
                    tasks.create_task(run(index))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None


def likeliest(choices: Sequence[Choice], keep: int, of: int) -> list[Choice]:
    """Of every ``of`` choices the ``keep`` with the highest log-probability per token."""
    kept: list[Choice] = []
    for start in range(0, len(choices), of):
        group = sorted(choices[start : start + of], key=lambda c: c.mean_logprob, reverse=True)
        kept += group[:keep]
    return kept
