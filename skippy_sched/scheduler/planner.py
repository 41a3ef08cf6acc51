"""Chooses the next iteration: a pure function of the state and its limits.

Decodes first, so that no running stream ever waits for somebody's prompt; then the prompts that
have a lane, in the order of their admission; then new ones while lanes last. Does not change the
state and does not talk to an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from skippy_sched.scheduler.iteration import Chunk
from skippy_sched.scheduler.request import Request
from skippy_sched.scheduler.state import State


class Wait(Enum):
    """What a request waits for when it got nothing, or less than it could use."""

    LANE = "a free lane"
    BUDGET = "room in the iteration's token budget"
    CONSUMER = "its consumer to read"
    OUTCOME = "its iteration under way"
    QUEUE = "the requests before it"


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of the next iteration, whom it admits, and why the others have to wait.

    ``waits`` names the running requests that were left out or cut short, and the head of the
    waiting queue; everyone behind the head waits for ``Wait.QUEUE``.
    """

    decodes: list[Request]
    chunks: list[Chunk]
    admitted: list[Request]
    waits: dict[int, Wait]

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks


def plan(state: State, now: float) -> Plan:
    limits = state.limits
    waits: dict[int, Wait] = {}
    decodes: list[Request] = []
    for request in state.decoding.values():
        if request.in_flight:
            waits[request.key] = Wait.OUTCOME
        elif request.paused:
            waits[request.key] = Wait.CONSUMER
        else:
            decodes.append(request)
    left = limits.batch_tokens - len(decodes)
    assert left >= 0, "the token budget is at least the lane count"

    chunks: list[Chunk] = []

    def give(request: Request) -> None:
        nonlocal left
        wanted = len(request.tokens) - request.computed
        given = min(wanted, left, limits.chunk_tokens)
        if given < wanted:
            waits[request.key] = Wait.BUDGET
        if given > 0:
            end = request.computed + given
            chunk = request.tokens[request.computed : end]
            chunks.append(Chunk(request.key, request.computed, chunk, given == wanted))
            left -= given

    for request in state.prefilling.values():
        if request.in_flight:
            waits[request.key] = Wait.OUTCOME
        else:
            give(request)

    admitted: list[Request] = []
    for request in state.waiting.in_order(now):
        if len(admitted) == state.lanes_free:
            waits[request.key] = Wait.LANE
            break
        if left == 0:
            waits[request.key] = Wait.BUDGET
            break
        admitted.append(request)
        give(request)
    return Plan(decodes, chunks, admitted, waits)
