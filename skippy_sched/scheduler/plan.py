"""What a plan is, and what it may cost: the planner's result, its reasons, and its budget.

Plain data; how they are chosen is planner.py's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from skippy_sched.scheduler.cost import Coefficients, Work
from skippy_sched.scheduler.iteration import Chunk, Verify
from skippy_sched.scheduler.prefix_cache import Match
from skippy_sched.scheduler.request import Request


class Wait(Enum):
    """What a request waits for when it got nothing, or less than it could use."""

    LANE = "a free lane"
    CELLS = "free KV cells"
    BUDGET = "room in the iteration's budget"
    PREFIX = "a prefix that another request is computing"
    CONSUMER = "its consumer to read"
    OUTCOME = "its iteration under way"
    GROUP = "the next of the iterations side by side"
    SUSPECT = "requests that may have taken the engine down, running alone"
    QUEUE = "the requests before it"
    PLAN = "the next plan"
    ENGINE = "the engine, which is being opened again"


#: While streams run, an iteration may take this many times what they alone would take.
STRETCH = 3.0
#: A few prompts among many streams may widen a gap to this: some 70 tokens on two cores with a
#: small model, and the engine's attention kernel needs 64 to be at its best.
FEW_PROMPTS_S = 0.3
#: And this where at least as many requests wait for their first token as have streams: the sooner
#: these decode with the others, the more an iteration brings. With no stream to disturb, too: an
#: iteration still ends soon enough to notice what has changed.
MANY_PROMPTS_S = 0.5


@dataclass(frozen=True, slots=True)
class Budget:
    """What an iteration may cost. ``inter_token_s`` None: ``STRETCH`` times what the decodes take
    alone, or ``FEW_PROMPTS_S`` or ``MANY_PROMPTS_S`` if that is more.

    ``costs`` None: only tokens count. ``caution``: measured over predicted seconds to reckon with.
    """

    tokens: int
    costs: Coefficients | None = None
    inter_token_s: float | None = None
    caution: float = 1.0

    def prefill_s(self, decode_rows: int, attended_tokens: int, prompts: int) -> float:
        """The seconds that so many prompts may take beside so many decodes."""
        if self.costs is None:
            return math.inf
        decodes_s = self.costs.predict(Work(decode_rows, 0, attended_tokens))
        if not decode_rows:
            return MANY_PROMPTS_S - decodes_s
        if self.inter_token_s is not None:
            return self.inter_token_s / self.caution - decodes_s
        least = MANY_PROMPTS_S if prompts >= decode_rows else FEW_PROMPTS_S
        return max(STRETCH * decodes_s, least) - decodes_s


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of the next iteration, and what has to happen before it, in this order:
    ``evict`` prefixes, ``preempt`` running requests, ``admit`` waiting ones.

    ``waits`` names the running requests that were left out or cut short, and the waiting ones
    that were looked at; everyone behind them waits for ``Wait.QUEUE``.
    """

    decodes: list[Request]
    chunks: list[Chunk]
    verifies: list[Verify]
    admit: list[tuple[Request, Match | None]]
    preempt: list[Request]
    evict_tokens: int
    waits: dict[int, Wait]
    work: Work

    @property
    def is_empty(self) -> bool:
        return not (self.decodes or self.chunks or self.verifies)
