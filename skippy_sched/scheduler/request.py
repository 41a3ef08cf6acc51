"""What a client asks for and what it gets back: the data that every part of the package shares.

Plain data, importing only the native sampling record. Knows nothing of queues, lanes or HTTP.
All instants (``_at``) are seconds on the scheduler's clock; token counts are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

from skippy_sched.errors import RequestError
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.grammar import Grammar
from skippy_sched.scheduler.history import History
from skippy_sched.scheduler.prefix_cache import Entry

#: Shared by all requests that say nothing: its C form is built once.
GREEDY = SamplingConfig()

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams:
    """How to generate. ``max_tokens`` None means: up to the context limit."""

    max_tokens: int | None = None
    sampling: SamplingConfig = GREEDY
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    tenant: str = "default"
    priority: int = 0
    timeout_s: float | None = None
    #: tell log-probabilities: of each token, and of so many likeliest ones beside it
    logprobs: int | None = None
    #: and those of the prompt's tokens; its tokens then go through one an iteration
    prompt_logprobs: bool = False
    #: what the answer has to fit, compiled by ``Engine.compile_schema`` and its like
    grammar: Grammar | None = None
    #: a W3C ``traceparent``, told to the observer with the receipt
    trace_parent: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Exact token counts of one request; ``cached_tokens`` of the prompt were not computed.

    Accepted draft tokens are those of the completion that took no iteration of their own.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class TokenLogprobs(NamedTuple):
    """What the model thought where a token stands, before biases, samplers and grammars.

    Natural logarithms; ``top`` are the likeliest tokens with theirs, highest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)  # not frozen: that takes three times as long to make
class Event:
    """What one iteration brought to one stream; the last one carries the finish and the usage.

    ``text`` may be empty while a character or a possible stop string is still incomplete, and may
    hold several tokens' text at once. ``stop_reason`` is the stop string or token id that matched.
    ``prompt_logprobs`` come once, with the first token: of each prompt token but the first.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class Status(Enum):
    """Where a request is in its life; the last three are final."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    def __init__(self, value: str) -> None:
        # Not a property: it is asked for every token.
        self.is_final = value in ("finished", "cancelled", "failed")


class Request:
    """The scheduler's record of one request; only the scheduler changes it.

    ``tokens`` is the prompt followed by what was generated; ``computed`` of them are in the KV
    cache of its session, so the rest is what the engine still has to be given.
    Invariant: 0 <= cached_tokens <= computed <= len(tokens).
    """

    __slots__ = (
        "accepted_tokens",
        "arrived_at",
        "cached_tokens",
        "cancel_requested",
        "charge",
        "computed",
        "crashes",
        "deadline_at",
        "drafted_tokens",
        "entry",
        "entry_before",
        "error",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "history",
        "in_flight",
        "key",
        "lane",
        "last_token_at",
        "name",
        "params",
        "paused",
        "planned_at",
        "preemptions",
        "prompt_logprobs",
        "prompt_tokens",
        "restarts",
        "sampling",
        "shared_tokens",
        "status",
        "stop_reason",
        "stop_tokens",
        "swapped_tokens",
        "tenant",
        "token_limit",
        "tokens",
    )

    def __init__(
        self,
        *,
        key: int,
        name: str,
        prompt: list[int],
        token_limit: int,
        params: RequestParams,
        sampling: SamplingConfig,
        stop_tokens: frozenset[int],
        arrived_at: float,
    ) -> None:
        self.key = key
        self.name = name
        self.tokens = prompt
        self.prompt_tokens = len(prompt)
        #: len(tokens) at which the request ends with "length"
        self.token_limit = token_limit
        self.params = params
        self.sampling = sampling
        #: a token of these ends the request with "stop"
        self.stop_tokens = stop_tokens
        self.arrived_at = arrived_at
        self.history = History(arrived_at)
        self.deadline_at = None if params.timeout_s is None else arrived_at + params.timeout_s
        self.tenant = params.tenant
        #: what one computed token adds to its tenant's counter: 1 / weight
        self.charge = 1.0
        #: its lane while it runs, the last one it had afterwards; -1 before
        self.lane = -1
        self.computed = 0
        self.cached_tokens = 0
        #: the saved prefix that it was restored from or saved as, and how many of its tokens
        #: have their cells there
        self.entry: Entry | None = None
        self.shared_tokens = 0
        #: what it used, and how much of that, before ``entry`` was saved from its session
        self.entry_before: tuple[Entry | None, int] = (None, 0)
        #: tokens whose state waits in host memory for a lane
        self.swapped_tokens = 0
        self.preemptions = 0
        #: times the engine was lost while it ran, since it was last seen to be harmless
        self.crashes = 0
        #: tokens handed to the engine and not yet reconciled
        self.in_flight = 0
        #: times its session was lost and its tokens computed again
        self.restarts = 0
        #: guesses at its next tokens that were verified, and those of them that it got
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        #: its consumer's buffer is full
        self.paused = False
        self.cancel_requested = False
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: RequestError | None = None
        self.planned_at: float | None = None
        #: of prompt tokens 1 and up, until they are told with the first token
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def takes_drafts(self) -> bool:
        """A verify call tells nothing of its rows and knows one mask for all of them."""
        return self.params.logprobs is None and self.params.grammar is None

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are still wanted."""
        return self.params.prompt_logprobs and len(self.tokens) == self.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self.accepted_tokens,
            self.drafted_tokens - self.accepted_tokens,
        )

    def pause(self, now: float) -> None:
        """Its consumer's buffer is full; it gets no more tokens for now."""
        self.paused = True
        self.history.enter("paused", now)

    def resume(self, now: float) -> None:
        self.paused = False
        if self.history.where == "paused":
            self.history.enter("decode", now)

    def __repr__(self) -> str:
        return (
            f"<Request {self.name} {self.status.value} {self.computed}/{len(self.tokens)} tokens, "
            f"prompt {self.prompt_tokens}>"
        )
