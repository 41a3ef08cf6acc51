"""Runs a model whole and split and compares: the proof that a split is exact.

Knows the native layer. A token's signal (entropy and the two largest log probabilities) is
computed from all logits of its row, so equal signals mean equal logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skippy_sched.errors import SplitError
from skippy_sched.native import (
    ActivationFrame,
    Library,
    Model,
    ModelOptions,
    SkippyNativeError,
    TokenSignal,
)

PROMPT_TOKENS = 16
DECODED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """What a model answered: a token and its signal for the prompt and for each decode."""

    tokens: list[int]
    signals: list[TokenSignal]
    boundaries: list[str]  # identity of what crosses each cut


def run(library: Library, files: Sequence[Path]) -> Run:
    """Prefill a prompt and decode greedily; one thread, one lane. Raises SplitError."""
    options = ModelOptions(
        ctx_size=2 * (PROMPT_TOKENS + DECODED_TOKENS),
        lanes=1,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        kv_unified=False,
        batched_exports=True,
    )
    stages: list[Model] = []
    try:
        stages.extend(Model.open(library, file, options) for file in files)
        return _run(stages)
    except SkippyNativeError as error:
        raise SplitError(f"the self-check could not run {files[0]}: {error}") from error
    finally:
        for stage in stages:
            stage.close()


def _run(stages: Sequence[Model]) -> Run:
    sessions = [stage.create_session() for stage in stages]
    vocabulary = stages[-1].facts.n_vocab
    prompt = [(7919 * place + 1009) % vocabulary for place in range(PROMPT_TOKENS)]
    tokens: list[int] = []
    signals: list[TokenSignal] = []
    given = prompt
    while len(tokens) <= DECODED_TOKENS:
        frame: ActivationFrame | None = None
        for session in sessions:
            if tokens:
                token, frame = session.decode_step_frame_sampled(given[0], None, frame)
            else:
                token, frame = session.prefill_chunk_frame_sampled(given, None, frame)
        tokens.append(token)
        signals.append(sessions[-1].last_token_signal())
        given = [token]
    boundaries = [
        stage.output_boundary.frontier_identity.hex()
        for stage in stages
        if stage.output_boundary is not None
    ]
    return Run(tokens, signals, boundaries)


def compare(whole: Run, split: Run) -> None:
    """Raises SplitError unless both runs are equal in every bit."""
    if whole.tokens == split.tokens and whole.signals == split.signals:
        return
    same = sum(a == b for a, b in zip(whole.tokens, split.tokens, strict=True))
    equal = sum(a == b for a, b in zip(whole.signals, split.signals, strict=True))
    farthest = max(
        abs(a.top_logprob - b.top_logprob)
        for a, b in zip(whole.signals, split.signals, strict=True)
    )
    raise SplitError(
        f"the split is not exact: of {len(whole.tokens)} tokens {same} are the same as with the "
        f"whole model, of as many token signals {equal} (log probabilities differ by up to "
        f"{farthest:.3g}); nothing was kept"
    )
