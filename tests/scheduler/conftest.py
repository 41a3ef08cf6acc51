"""Engines on the simulated library, and ways to collect what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams, Usage


@dataclass(slots=True)
class Answer:
    tokens: list[int]
    text: str
    finish_reason: str | None = None
    usage: Usage | None = None
    error: RequestError | None = None


async def answer(
    engine: Engine,
    prompt: str | Sequence[int],
    params: RequestParams | None = None,
    *,
    leave_after: int | None = None,
) -> Answer:
    """Everything that a request brings; ``leave_after`` so many tokens its consumer goes away."""
    got = Answer([], "")
    try:
        async with await engine.submit(prompt, params) as stream:
            async for event in stream:
                got.tokens += event.token_ids
                got.text += event.text
                got.finish_reason, got.usage = event.finish_reason, event.usage
                if leave_after is not None and len(got.tokens) >= leave_after:
                    break
    except RequestError as error:
        got.error = error
    return got


def assert_books_balance(engine: Engine) -> None:
    """The common end of every test: no lane, cell or request is unaccounted for."""
    engine.check_invariants()
    now = engine.statistics()
    assert now.lanes_free == now.lanes
    assert now.running == now.waiting == 0
    assert now.accepted == now.finished + now.cancelled + now.failed
    assert now.kv_tokens == now.prefix_tokens
