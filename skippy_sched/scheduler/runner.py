"""Executes iterations on one model, or on the stages of one: faults per row.

It finds out which row of a failed batch is guilty and what became of the others; what that means
for their requests is for reconcile to say. A stage is used by one thread at a time: here by the
caller's, in pipeline.py by one of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from skippy_sched.native import (
    DecodeRows,
    IterationBatchOutput,
    IterationEntry,
    Model,
    ModelFacts,
    NativeAnswerError,
    PartialBatchExecution,
    Phase,
    SkippyNativeError,
    StageSession,
    iteration_batch_sampled,
)
from skippy_sched.scheduler.iteration import NO_SAMPLE, Fate, Fault, Iteration, Outcome
from skippy_sched.scheduler.stage import Stage
from skippy_sched.scheduler.verify import VerifyRow, answer_verifies, pass_verifies, verify_rows


@dataclass(slots=True)
class Row:
    """One request's share of the batch; ``sessions`` on the stages that it has reached."""

    key: int
    tokens: Sequence[int]
    sample_last: bool
    phase: Phase
    following: int | None = None
    sessions: list[StageSession] = field(default_factory=list)


@dataclass(slots=True)
class Passage:
    """Rows on their way through the stages; those that left it are behind a repair or a fault.

    Repairs touch all stages, so they wait until the rows have passed the last one.
    """

    iteration: Iteration
    outcome: Outcome
    rows: Sequence[Row]
    samples: dict[int, int]
    verifies: Sequence[VerifyRow] = ()
    output: IterationBatchOutput | None = None
    repairs: list[Callable[[], None]] = field(default_factory=list)


class ModelRunner:
    """``models`` are the stages of one model in order; a whole model is its own only stage.

    ``clock`` gives the seconds by which native work is timed.
    """

    def __init__(self, *models: Model, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stages = [Stage(model, number, clock) for number, model in enumerate(models)]
        self._clock = clock
        #: a whole model's rows of decoding requests, kept while the same ones decode
        self._decode_keys: Sequence[int] | None = None
        self._decodes = DecodeRows((), ())
        self._is_whole = len(models) == 1 and models[0].terminal_stage
        self._vocabulary = models[-1].facts.n_vocab

    def execute(self, iteration: Iteration) -> Outcome:
        """Run commands and batch; native errors end up as faults of rows, never as exceptions."""
        if self._is_whole:
            return self._execute_whole(iteration)
        passage = self.begin(iteration)
        for number in range(len(self.stages)):
            self.advance(passage, number)
        return self.finish(passage)

    def begin(self, iteration: Iteration) -> Passage:
        outcome = Outcome(iteration.number)
        return Passage(iteration, outcome, _rows(iteration), {}, verify_rows(iteration))

    def advance(self, passage: Passage, number: int) -> None:
        """The iteration's part on one stage: its commands there, then the rows' batch."""
        began = self._clock()
        stage = self.stages[number]
        for command in passage.iteration.commands:
            stage.command(command, passage.outcome)
        if stage.guides:
            stage.guide(passage.iteration, passage.outcome)
        self._pass(passage, stage)
        pass_verifies(passage.verifies, stage, passage.outcome)
        passage.outcome.native_s += self._clock() - began

    def finish(self, passage: Passage) -> Outcome:
        """Behind the last stage: what failed on the way is tried again, on every stage."""
        began = self._clock()
        self._settle(passage)
        self._answer(passage)
        answer_verifies(passage.verifies, passage.outcome, self._vocabulary)
        passage.outcome.native_s += self._clock() - began
        return passage.outcome

    def sessions(self, key: int) -> Sequence[StageSession]:
        """The request's session on each stage; none when it has no lane."""
        return [stage.sessions[key] for stage in self.stages if key in stage.sessions]

    @property
    def facts(self) -> ModelFacts:
        """Those of the last stage, which samples; sizes are those of all stages."""
        facts = [stage.model.facts for stage in self.stages]
        if len(facts) == 1:
            return facts[0]
        return replace(
            facts[-1],
            stages=len(facts),
            n_layer=sum(one.n_layer for one in facts),
            size_bytes=sum(one.size_bytes for one in facts),
            parameter_count=sum(one.parameter_count for one in facts),
        )

    def close(self) -> None:
        for stage in self.stages:
            stage.close()

    # --- a whole model ----------------------------------------------------------------------------

    def _execute_whole(self, iteration: Iteration) -> Outcome:
        outcome = Outcome(iteration.number)
        began = self._clock()
        stage = self.stages[0]
        for command in iteration.commands:
            self._decode_keys = None
            stage.command(command, outcome)
        if stage.guides:
            stage.guide(iteration, outcome)
        if not outcome.faults:
            self._run_whole(iteration, stage, outcome)
        else:
            passage = Passage(iteration, outcome, _rows(iteration), {})
            self._pass(passage, stage)
            self._settle(passage)
            self._answer(passage)
        if iteration.verifies:
            verifies = verify_rows(iteration)
            pass_verifies(verifies, stage, outcome)
            answer_verifies(verifies, outcome, self._vocabulary)
        outcome.native_s = self._clock() - began
        return outcome

    def _run_whole(self, iteration: Iteration, stage: Stage, outcome: Outcome) -> None:
        """One call on a model that samples, with no object per decoding request."""
        keys, chunks = iteration.decode_keys, iteration.chunks
        sessions, sampling = stage.sessions, stage.sampling
        if keys != self._decode_keys:
            self._decodes = DecodeRows(
                [sessions[key] for key in keys], [sampling[key] for key in keys]
            )
            self._decode_keys = keys
        entries = [
            IterationEntry(
                sessions[chunk.key],
                chunk.tokens,
                sampling=sampling[chunk.key],
                sample_last=chunk.needs_logits,
                phase=Phase.PREFILL,
            )
            for chunk in chunks
        ]
        if not keys and not entries:
            return
        outcome.native_calls += 1
        batch = stage.model.batch
        passage = Passage(iteration, outcome, (), {})
        try:
            tokens = batch.run_with_decodes(self._decodes, iteration.decode_tokens, entries)
        except SkippyNativeError as error:
            self._halve(self._rows_of(iteration, stage), error, passage)
            self._answer(passage)
            return
        outcome.decode_samples, outcome.chunk_samples = tokens[: len(keys)], tokens[len(keys) :]
        if stage.logprobs:
            _tell_logprobs(stage, self._rows_of(iteration, stage), tokens, outcome)
        if not self._is_sound(tokens, entries):
            passage.rows = self._rows_of(iteration, stage)
            _check_positions(passage)
            self._collect(passage, list(enumerate(tokens)))

    def _is_sound(self, tokens: Sequence[int], entries: Sequence[IterationEntry]) -> bool:
        """Whether all samples are tokens and all sessions are where they are counted to be."""
        decodes, position = self._decodes, self.stages[0].model.library.session_position
        if list(map(position, decodes.addresses)) != decodes.counts:
            return False
        samples = tokens[: len(decodes)]
        if samples and not (min(samples) >= 0 and max(samples) < self._vocabulary):
            return False
        return all(
            position(entry.session.address) == entry.session.token_count
            and (not entry.sample_last or 0 <= token < self._vocabulary)
            for token, entry in zip(tokens[len(decodes) :], entries, strict=True)
        )

    def _rows_of(self, iteration: Iteration, stage: Stage) -> list[Row]:
        """The rows of an iteration that has run on its only stage."""
        rows = _rows(iteration)
        for row in rows:
            row.sessions.append(stage.sessions[row.key])
        return rows

    # --- rows on their way ------------------------------------------------------------------------

    def _run(self, rows: Sequence[Row], passage: Passage) -> None:
        """Some rows again, through all stages."""
        for row in rows:
            row.sessions = []
        again = Passage(passage.iteration, passage.outcome, rows, passage.samples)
        for stage in self.stages:
            self._pass(again, stage)
        self._settle(again)

    def _pass(self, passage: Passage, stage: Stage) -> None:
        """One native batch; rows whose command failed are left out, they have their fault."""
        faults = passage.outcome.faults
        before = passage.output
        frames = before.request_outputs if before is not None else [None] * len(passage.rows)
        rows, entries = [], []
        for row, frame in zip(passage.rows, frames, strict=True):
            if row.key in faults:
                continue
            session = stage.sessions[row.key]
            row.sessions.append(session)
            rows.append(row)
            entries.append(
                IterationEntry(
                    session,
                    row.tokens,
                    sampling=stage.sampling[row.key],
                    input=frame,
                    sample_last=row.sample_last,
                    phase=row.phase,
                )
            )
        passage.rows = rows
        if not rows:
            passage.output = None
            return
        passage.outcome.native_calls += 1
        try:
            passage.output = iteration_batch_sampled(entries)
        except PartialBatchExecution as stopped:
            passage.outcome.partial_batches += 1
            passage.repairs.append(partial(self._stopped_part_way, rows, stopped, passage))
            passage.rows, passage.output = rows[: stopped.executed], stopped.outputs
            _check_positions(passage)
        except SkippyNativeError as error:
            passage.repairs.append(partial(self._halve, rows, error, passage))
            passage.rows, passage.output = [], None
        else:
            if stage.logprobs:
                samples = dict(passage.output.samples)
                tokens = [samples.get(index, NO_SAMPLE) for index in range(len(rows))]
                _tell_logprobs(stage, rows, tokens, passage.outcome)
            _check_positions(passage)

    def _settle(self, passage: Passage) -> None:
        """Collect from the rows that came through, then see to those that did not."""
        if passage.output is not None:
            self._collect(passage, passage.output.samples)
        for repair in passage.repairs:
            repair()

    def _answer(self, passage: Passage) -> None:
        outcome, iteration, take = passage.outcome, passage.iteration, passage.samples.get
        outcome.decode_samples = [take(key, NO_SAMPLE) for key in iteration.decode_keys]
        outcome.chunk_samples = [take(chunk.key, NO_SAMPLE) for chunk in iteration.chunks]

    def _stopped_part_way(
        self, rows: Sequence[Row], stopped: PartialBatchExecution, passage: Passage
    ) -> None:
        """The row at ``executed`` is guilty; those after it did not run on this stage."""
        faults = passage.outcome.faults
        faults[rows[stopped.executed].key] = Fault(Fate.FAILED, stopped.cause)
        for row in rows[stopped.executed + 1 :]:
            back = self._bring_back(row, passage.outcome)
            faults[row.key] = Fault(Fate.NOT_RUN if back else Fate.LOST, stopped.cause)

    def _halve(self, rows: Sequence[Row], error: SkippyNativeError, passage: Passage) -> None:
        """Again in halves, down to the guilty row."""
        kept = []
        for row in rows:
            if self._bring_back(row, passage.outcome):
                kept.append(row)
            else:
                passage.outcome.faults[row.key] = Fault(Fate.LOST, error)
        if len(rows) == 1:
            passage.outcome.faults[rows[0].key] = Fault(Fate.FAILED, error)
            return
        middle = len(kept) // 2
        for part in (kept[:middle], kept[middle:]):
            if part:
                self._run(part, passage)

    def _bring_back(self, row: Row, outcome: Outcome) -> bool:
        """Put a row's sessions back where they stood before the iteration, natively and here.

        Not those of a request that has ended meanwhile: they are closed.
        """
        if any(session.closed for session in row.sessions):
            return False
        before = min(session.token_count for session in row.sessions)
        for session in row.sessions:
            with contextlib.suppress(SkippyNativeError):
                if session.position != before or session.token_count != before:
                    outcome.native_calls += 1
                    session.trim(before)
            if session.position != before or session.token_count != before:
                return False
        return True

    def _collect(self, passage: Passage, given: Sequence[tuple[int, int]]) -> None:
        """Take the samples of rows that ran; a row whose answer is impossible is at fault."""
        rows, samples = passage.rows, passage.samples
        for index, token in given:
            if index < len(rows):
                samples[rows[index].key] = token
        vocabulary = self._vocabulary
        for row in rows:
            problem = None
            if row.sample_last:
                token = samples.get(row.key, NO_SAMPLE)
                if not 0 <= token < vocabulary:
                    problem = f"sampled token {token} is outside the vocabulary"
                    if token == NO_SAMPLE:
                        problem = "no sample came back"
            if problem:
                passage.outcome.faults[row.key] = Fault(Fate.FAILED, NativeAnswerError(problem))


def _tell_logprobs(
    stage: Stage, rows: Sequence[Row], tokens: Sequence[int], outcome: Outcome
) -> None:
    """Of the rows that ask for them and were just run: nothing else may have been since."""
    for row, token in zip(rows, tokens, strict=True):
        if row.sample_last and row.key in stage.logprobs:
            wanted = token if row.following is None else row.following
            stage.tell_logprobs(row.key, wanted, outcome)


def _check_positions(passage: Passage) -> None:
    """On the stage that the rows have just passed."""
    for row in passage.rows:
        session = row.sessions[-1]
        if session.position != session.token_count:
            problem = NativeAnswerError(
                f"the native session is at position {session.position}, "
                f"expected {session.token_count}"
            )
            passage.outcome.faults[row.key] = Fault(Fate.FAILED, problem)


def _rows(iteration: Iteration) -> list[Row]:
    rows = [
        Row(key, (token,), True, Phase.DECODE)
        for key, token in zip(iteration.decode_keys, iteration.decode_tokens, strict=True)
    ]
    rows += [
        Row(chunk.key, chunk.tokens, chunk.needs_logits, Phase.PREFILL, chunk.following)
        for chunk in iteration.chunks
    ]
    return rows
