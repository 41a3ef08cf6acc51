"""What travels between the scheduler and an executor: iterations down, outcomes up.

Plain data; a session is named by its request's key, so the model may live in another thread,
process or machine. Knows nothing of why an iteration looks as it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.grammar import Grammar
from skippy_sched.scheduler.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Restore:
    """Start from saved cells: the first ``tokens`` of the saved sequence."""

    sequence_id: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Give the request a lane and a session: empty, with a restored prefix, or swapped in."""

    key: int
    sampling: SamplingConfig
    restore: Restore | None = None
    swapped: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    #: where the answer begins, and what there is of it
    answer_start: int = 0
    answer: Sequence[int] = ()

    @property
    def reusable(self) -> bool:
        """Whether a session that was opened but not filled can be computed instead."""
        return self.restore is not None or self.swapped


@dataclass(frozen=True, slots=True)
class CloseSession:
    """Free the request's session and its lane, and its state if that was swapped out."""

    key: int


@dataclass(frozen=True, slots=True)
class ResetSession:
    """Empty the request's session, which keeps its lane."""

    key: int
    reusable = False


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Keep the session's state in host memory and free its lane and cells."""

    key: int


@dataclass(frozen=True, slots=True)
class SavePrefix:
    """Save the first ``length`` tokens of the request's session as a sequence of its own."""

    key: int
    sequence_id: int
    length: int


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """Free a saved sequence."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class SettleVerify:
    """After a verify of ``count`` tokens from position ``start``: keep the first ``accepted``."""

    key: int
    start: int
    count: int
    accepted: int
    reusable = True


Command = (
    OpenSession | CloseSession | ResetSession | SwapOut | SavePrefix | DropPrefix | SettleVerify
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a prompt: ``tokens`` go to positions ``start`` and up; phase is prefill.

    ``following``: the prompt's next token, if its log-probability is to be told.
    """

    key: int
    start: int
    tokens: Sequence[int]
    sample_last: bool
    following: int | None = None

    @property
    def needs_logits(self) -> bool:
        return self.sample_last or self.following is not None


@dataclass(frozen=True, slots=True)
class Verify:
    """A decode with a draft behind it: the first of ``tokens`` is the request's last one, the
    others are a guess at what follows. ``propose``: so many tokens of the model's own are asked
    for, to be the next draft."""

    key: int
    tokens: Sequence[int]
    propose: int = 0


@dataclass(frozen=True, slots=True)
class Iteration:
    """Commands, then one native batch: a row per decoding request and a row per chunk.

    The decode rows are two parallel lists, because there are many of them in every iteration and
    they are all alike: one token at the session's position, sampled. Each of ``verifies`` is a
    native call of its own, behind the batch.
    """

    number: int
    commands: Sequence[Command]
    decode_keys: Sequence[int]
    decode_tokens: Sequence[int]
    chunks: Sequence[Chunk]
    verifies: Sequence[Verify] = ()


class Fate(Enum):
    """What became of a row that brought no ordinary result."""

    NOT_RUN = "not run"  # its session has not moved: plan it again unchanged
    FAILED = "failed"  # it is the guilty one: its request ends
    LOST = "lost"  # its session can't be trusted any more: compute it again from its tokens


@dataclass(frozen=True, slots=True)
class Fault:
    fate: Fate
    error: Exception | None = None


#: In a list of samples: the row asked for no sample or got none.
NO_SAMPLE = -1


@dataclass(slots=True)
class Outcome:
    """What an iteration brought: a sample per decode row and per chunk, and the faults by key.

    ``verified`` has the tokens that follow each verify's first one: the draft's as far as the
    model chose them too, and one more. ``proposals`` has the model's guesses behind those.
    ``fatal`` says that the executor itself can't go on; then nothing else is to be relied on.
    """

    number: int
    decode_samples: Sequence[int] = ()
    chunk_samples: Sequence[int] = ()
    verified: Sequence[Sequence[int]] = ()
    proposals: Sequence[Sequence[int]] = ()
    faults: dict[int, Fault] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # of rows that ask for them
    unsaved: list[int] = field(default_factory=list)  # sequence ids whose SavePrefix failed
    swapped_tokens: int = 0
    swap_s: float = 0.0
    native_calls: int = 0
    partial_batches: int = 0
    native_s: float = 0.0
    fatal: str | None = None


class Executor(Protocol):
    """Runs iterations in the order given; every one is answered by exactly one outcome.

    ``depth`` iterations may be under way at once. A session is in at most one of them.
    """

    depth: int

    def submit(self, iteration: Iteration) -> None: ...

    def start(self, on_outcome: Callable[[Outcome], None]) -> None:
        """Begin; outcomes are handed to ``on_outcome`` on the event loop's thread."""

    async def close(self, timeout_s: float) -> None:
        """Free every session and the model; what does not return in time is left behind."""
