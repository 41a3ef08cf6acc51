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
    IterationEntry,
    Library,
    Model,
    ModelOptions,
    Phase,
    SkippyNativeError,
    TokenSignal,
    iteration_batch_sampled,
)

PROMPT_TOKENS = 16
DECODED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """What a model answered, step by step: a token and its signal for each sequence."""

    tokens: list[int]
    signals: list[TokenSignal]
    boundaries: list[str]  # identity of what crosses each cut


def prompt_of(vocabulary: int, length: int = PROMPT_TOKENS, number: int = 0) -> list[int]:
    """Any tokens, but always the same ones."""
    return [(7919 * place + 1009 + 104729 * number) % vocabulary for place in range(length)]


def run(
    library: Library,
    files: Sequence[Path],
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    decoded_tokens: int = DECODED_TOKENS,
    sequences: int = 1,
    n_ubatch: int | None = None,
) -> Run:
    """Prefill prompts as one batch and decode them greedily as batches, with one thread and KV
    per lane: the configuration in which a split has to be exact. Raises SplitError."""
    batch = sequences * prompt_tokens
    options = ModelOptions(
        ctx_size=prompt_tokens + decoded_tokens + 1,
        lanes=sequences,
        n_batch=batch,
        n_ubatch=n_ubatch or batch,
        n_threads=1,
        kv_unified=False,
    )
    stages: list[Model] = []
    try:
        stages.extend(Model.open(library, file, options) for file in files)
        vocabulary = stages[-1].facts.n_vocab
        prompts = [prompt_of(vocabulary, prompt_tokens, n) for n in range(sequences)]
        return _run(stages, prompts, decoded_tokens)
    except SkippyNativeError as error:
        raise SplitError(f"the self-check could not run {files[0]}: {error}") from error
    finally:
        for stage in stages:
            stage.close()


def _run(stages: Sequence[Model], prompts: Sequence[list[int]], decoded_tokens: int) -> Run:
    sessions = [[stage.create_session() for _ in prompts] for stage in stages]
    tokens: list[int] = []
    signals: list[TokenSignal] = []
    given, phase = list(prompts), Phase.PREFILL
    for _ in range(decoded_tokens + 1):
        frames: list[ActivationFrame | None] = [None] * len(prompts)
        for of_stage in sessions:
            output = iteration_batch_sampled(
                [
                    IterationEntry(session, row, input=frame, phase=phase)
                    for session, row, frame in zip(of_stage, given, frames, strict=True)
                ]
            )
            frames = list(output.request_outputs)
        given, phase = [[sample.predicted_token] for sample in output.samples], Phase.DECODE
        tokens += [row[0] for row in given]
        signals += [session.last_token_signal() for session in sessions[-1]]
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
