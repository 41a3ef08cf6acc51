"""Chooses the next iteration: a pure function of the state, the budget and the time.

Decodes first, so that no running stream ever waits for somebody's prompt; then the prompts that
have a lane, in the order of their admission; then new ones while lanes last. Prompts share what
the budget leaves: tokens of the native batch, and the time that running streams can spare.
Does not change the state and does not talk to an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from skippy_sched.scheduler.cost import Coefficients, Work
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


#: While streams run, an iteration may take this many times what they alone would take.
STRETCH = 2.0
#: Prompts always advance by this many tokens, even if the decodes alone exceed the target.
PREFILL_TOKENS_MIN = 4
#: With no stream to disturb, an iteration still ends soon enough to notice what has changed.
UNDISTURBED_S = 0.5


@dataclass(frozen=True, slots=True)
class Budget:
    """What an iteration may cost. ``inter_token_s`` None: ``STRETCH`` times the decodes alone.

    ``costs`` None: only tokens count.
    """

    tokens: int
    costs: Coefficients | None = None
    inter_token_s: float | None = None

    def prefill_tokens(self, decode_rows: int, cached_tokens: int) -> int:
        """The most prompt tokens to put beside so many decodes."""
        left = self.tokens - decode_rows
        if self.costs is None:
            return left
        decodes = Work(decode_rows, 0, cached_tokens)
        if not decode_rows:
            target_s = UNDISTURBED_S
        elif self.inter_token_s is not None:
            target_s = self.inter_token_s
        else:
            target_s = STRETCH * self.costs.predict(decodes)
        within = self.costs.prefill_tokens_within(target_s, decodes)
        return min(left, max(within, PREFILL_TOKENS_MIN))


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
    work: Work

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks


def plan(state: State, budget: Budget, now: float) -> Plan:
    limits = state.limits
    waits: dict[int, Wait] = {}
    decodes: list[Request] = []
    cached = 0
    for request in state.decoding.values():
        if request.in_flight:
            waits[request.key] = Wait.OUTCOME
        elif request.paused:
            waits[request.key] = Wait.CONSUMER
        else:
            decodes.append(request)
            cached += request.computed
    assert len(decodes) <= budget.tokens, "the token budget is at least the lane count"

    chunks: list[Chunk] = []
    allowed = left = budget.prefill_tokens(len(decodes), cached)

    def give(request: Request) -> None:
        nonlocal left, cached
        wanted = len(request.tokens) - request.computed
        given = min(wanted, left, limits.chunk_tokens)
        if given < wanted:
            waits[request.key] = Wait.BUDGET
        if given > 0:
            end = request.computed + given
            chunk = request.tokens[request.computed : end]
            chunks.append(Chunk(request.key, request.computed, chunk, given == wanted))
            left -= given
            cached += request.computed

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
    work = Work(len(decodes), allowed - left, cached)
    return Plan(decodes, chunks, admitted, waits, work)
