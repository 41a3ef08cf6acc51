"""Runs the verify calls of an iteration, stage by stage, and reads what they answer.

A call is for one session, so one that fails is the fault of its own request alone. Where the
draft was wrong the sessions stand too far afterwards; the scheduler cuts them back by a command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_sched.native import NativeAnswerError, SkippyNativeError, VerifyOutput
from skippy_sched.scheduler.iteration import Fate, Fault, Iteration, Outcome, Verify
from skippy_sched.scheduler.stage import Stage


@dataclass(slots=True)
class VerifyRow:
    """``output``: of the last stage that it has passed."""

    verify: Verify
    output: VerifyOutput | None = None


def verify_rows(iteration: Iteration) -> list[VerifyRow]:
    return [VerifyRow(verify) for verify in iteration.verifies]


def pass_verifies(rows: Sequence[VerifyRow], stage: Stage, outcome: Outcome) -> None:
    """A call per row; not for rows whose command or earlier stage failed."""
    for row in rows:
        verify, key = row.verify, row.verify.key
        if key in outcome.faults:
            continue
        session = stage.sessions[key]
        frame = None if row.output is None else row.output.frame
        outcome.native_calls += 1
        try:
            row.output = session.verify_tokens_frame_sampled(
                verify.tokens, stage.sampling[key], frame, None, verify.propose
            )
            if session.position != session.token_count:
                raise NativeAnswerError(
                    f"the native session is at position {session.position}, "
                    f"expected {session.token_count}"
                )
        except SkippyNativeError as error:
            outcome.faults[key] = Fault(Fate.FAILED, error)


def answer_verifies(rows: Sequence[VerifyRow], outcome: Outcome, vocabulary: int) -> None:
    """What each row brings its request; nothing for one at fault."""
    verified: list[Sequence[int]] = []
    proposals: list[Sequence[int]] = []
    for row in rows:
        tokens: Sequence[int] = ()
        proposal: Sequence[int] = ()
        if row.verify.key not in outcome.faults:
            assert row.output is not None
            try:
                tokens = _valid_tokens(row.verify, row.output.predicted_tokens, vocabulary)
            except NativeAnswerError as error:
                outcome.faults[row.verify.key] = Fault(Fate.FAILED, error)
            else:
                draft = row.output.draft
                if draft is not None and len(tokens) == len(row.verify.tokens):
                    proposal = draft.token_ids
        verified.append(tokens)
        proposals.append(proposal)
    outcome.verified = verified
    if any(proposals):
        outcome.proposals = proposals


def _valid_tokens(verify: Verify, predicted: Sequence[int], vocabulary: int) -> Sequence[int]:
    """As far as the draft agrees, and one more: what follows a wrong token was never asked for."""
    draft = verify.tokens[1:]
    agreed = 0
    while agreed < min(len(draft), len(predicted)) and draft[agreed] == predicted[agreed]:
        agreed += 1
    tokens = predicted[: agreed + 1]
    if len(tokens) <= agreed:
        raise NativeAnswerError(
            f"verify answered {len(predicted)} tokens to {len(verify.tokens)}, "
            "and none of them differs from the draft"
        )
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise NativeAnswerError(f"verified token {token} is outside the vocabulary")
    return tokens
