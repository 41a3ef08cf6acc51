"""What goes into a batch call and what comes out: plain data.

Knows the words of an iteration: entry, phase, sample, output. Does not call anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from .errors import NativeAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .activation import ActivationFrame
    from .sampling import SamplingConfig
    from .session import StageSession
    from .state import Integers


class Phase(Enum):
    """Stated, never guessed from the token count: a one-token prefill tail is not a decode."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class IterationEntry:
    """One request's share of an iteration.

    `token_ids` and `positions` are sequences of ints or int32 arrays; no positions means from the
    session's position on. `sampling` None is greedy. `input` is the previous stage's frame.
    """

    session: StageSession
    token_ids: Integers
    positions: Integers = ()
    sampling: SamplingConfig | None = None
    input: ActivationFrame | None = None
    sample_last: bool = True
    phase: Phase = Phase.DECODE


class IterationSample(NamedTuple):
    """The token sampled for the entry at `request_index` of the call."""

    request_index: int
    predicted_token: int


class IterationBatchOutput:
    """Samples in entry order, and one output frame per entry (empty on a terminal stage)."""

    __slots__ = ("_frames", "samples")

    def __init__(
        self,
        request_outputs: list[ActivationFrame] | Callable[[], list[ActivationFrame]],
        samples: list[IterationSample],
    ) -> None:
        self._frames = request_outputs
        self.samples = samples

    @property
    def request_outputs(self) -> list[ActivationFrame]:
        """The output frames; empty ones are made when they are asked for."""
        if callable(self._frames):
            self._frames = self._frames()
        return self._frames

    def __repr__(self) -> str:
        return f"IterationBatchOutput({len(self.samples)} samples)"


@dataclass(slots=True)
class DecodeFrameBatchEntry:
    """One request's token of a decode batch."""

    session: StageSession
    token_id: int
    sampling: SamplingConfig | None = None
    input: ActivationFrame | None = None


class DecodeFrameBatchOutput(NamedTuple):
    """The sampled token (-1 on an exporting stage) and the output frame."""

    predicted_token: int
    output: ActivationFrame


def collect_iteration_samples(
    request_count: int,
    sampled_count: int,
    request_indexes: Sequence[int],
    predicted_tokens: Sequence[int],
) -> list[IterationSample]:
    """Pair the compact sample arrays of a native iteration.

    Raises NativeAnswerError for more samples than requests or array entries, an index beyond the
    requests, or two samples of one request. Entries past `sampled_count` are not looked at.
    """
    if sampled_count > min(request_count, len(request_indexes), len(predicted_tokens)):
        raise NativeAnswerError(
            f"the native iteration answered {sampled_count} samples to {request_count} requests"
        )
    indexes = request_indexes[:sampled_count]
    if sampled_count and (
        max(indexes) >= request_count or min(indexes) < 0 or len(set(indexes)) != sampled_count
    ):
        raise NativeAnswerError(_wrong_index(request_count, indexes))
    pairs = zip(indexes, predicted_tokens, strict=False)
    # As IterationSample(*pair) for each, without a Python call per sample.
    return list(map(tuple.__new__, repeat(IterationSample), pairs))


def _wrong_index(request_count: int, indexes: Sequence[int]) -> str:
    seen: set[int] = set()
    for index in indexes:
        if not 0 <= index < request_count:
            return (
                f"the native iteration answered a sample for request {index}, but there were only "
                f"{request_count} requests"
            )
        if index in seen:
            break
        seen.add(index)
    return f"the native iteration answered two samples for request {index}"
