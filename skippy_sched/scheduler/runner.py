"""Executes iterations on one model, or on the stages of one: sessions by key, faults per row.

Everything here runs on the one thread that owns the native calls. It finds out which row of a
failed batch is guilty and what became of the others; what that means for their requests is for
reconcile to say.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from skippy_sched.native import (
    DecodeRows,
    IterationEntry,
    Model,
    NativeAnswerError,
    PartialBatchExecution,
    Phase,
    SkippyNativeError,
    StageSession,
    iteration_batch_sampled,
)
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.iteration import (
    NO_SAMPLE,
    CloseSession,
    Command,
    DropPrefix,
    Fate,
    Fault,
    Iteration,
    OpenSession,
    Outcome,
    ResetSession,
    SavePrefix,
    SwapOut,
)


@dataclass(slots=True)
class Row:
    """One request's share of the batch: its session and its entry on every stage."""

    key: int
    sessions: Sequence[StageSession]
    entries: Sequence[IterationEntry]
    sample_last: bool


class ModelRunner:
    """``stages`` are the stages of one model in order; a whole model is its own only stage.

    ``clock`` gives the seconds by which native work is timed.
    """

    def __init__(self, *stages: Model, clock: Callable[[], float] = time.perf_counter) -> None:
        self.stages = stages
        self._clock = clock
        self._sessions: dict[int, list[StageSession]] = {}
        self._sampling: dict[int, SamplingConfig] = {}
        self._swapped: dict[int, list[Any]] = {}
        #: a whole model's rows of decoding requests, kept while the same ones decode
        self._decode_keys: Sequence[int] | None = None
        self._decodes = DecodeRows((), ())
        self._is_whole = len(stages) == 1 and stages[0].terminal_stage
        self._vocabulary = stages[-1].facts.n_vocab

    def execute(self, iteration: Iteration) -> Outcome:
        """Run commands and batch; native errors end up as faults of rows, never as exceptions."""
        outcome = Outcome(iteration.number)
        began = self._clock()
        for command in iteration.commands:
            self._command(command, outcome)
        if self._is_whole and not outcome.faults:
            self._run_whole(iteration, outcome)
        else:
            rows = self._rows(iteration, outcome)
            samples: dict[int, int] = {}
            if rows:
                self._run(rows, samples, outcome)
            self._answer(iteration, samples, outcome)
        outcome.native_s = self._clock() - began
        return outcome

    def sessions(self, key: int) -> Sequence[StageSession]:
        """The request's session on each stage; none when it has no lane."""
        return self._sessions.get(key, ())

    def close(self) -> None:
        for sessions in self._sessions.values():
            for session in sessions:
                session.close()
        self._sessions.clear()
        for stage in self.stages:
            stage.close()

    # --- commands -------------------------------------------------------------------------------

    def _command(self, command: Command, outcome: Outcome) -> None:
        outcome.native_calls += len(self.stages)
        try:
            match command:
                case OpenSession():
                    self._open(command, outcome)
                case CloseSession(key):
                    self._sampling.pop(key, None)
                    self._swapped.pop(key, None)
                    self._close(key)
                case ResetSession(key):
                    for session in self._sessions[key]:
                        session.reset()
                case SwapOut(key):
                    self._swap_out(key, outcome)
                case SavePrefix(key, sequence_id, length):
                    for session in self._sessions[key]:
                        session.save_prefix(sequence_id, length)
                case DropPrefix(sequence_id):
                    self._drop_prefix(sequence_id)
        except SkippyNativeError as error:
            match command:
                case OpenSession(key) | ResetSession(key):
                    # Restored or swapped in halfway, it can be computed; not opened, it can't.
                    opened = len(self._sessions.get(key, ())) == len(self.stages)
                    fate = Fate.LOST if opened and command.reusable else Fate.FAILED
                    outcome.faults[key] = Fault(fate, error)
                case SavePrefix(_, sequence_id):
                    outcome.unsaved.append(sequence_id)
                case _:
                    pass  # what was to be freed is gone, or is freed with the model

    def _open(self, command: OpenSession, outcome: Outcome) -> None:
        key = command.key
        self._decode_keys = None
        self._sampling[key] = command.sampling
        sessions = self._sessions[key] = []
        sessions.extend(stage.create_session() for stage in self.stages)
        if command.restore is not None:
            for session in sessions:
                session.restore_prefix(command.restore.sequence_id, command.restore.tokens)
        if command.swapped:
            states = self._swapped.pop(key, None)
            if states is None:
                raise NativeAnswerError("its state could not be swapped out")
            began = self._clock()
            for session, state in zip(sessions, states, strict=True):
                session.import_full_state(0, session.model.facts.n_layer, state)
            outcome.swap_s += self._clock() - began
            outcome.swapped_tokens += sessions[0].token_count

    def _swap_out(self, key: int, outcome: Outcome) -> None:
        """A state that can't be taken out is missing when it is wanted: then it is computed."""
        sessions = self._sessions[key]
        began = self._clock()
        try:
            self._swapped[key] = [
                session.export_full_state(0, session.model.facts.n_layer) for session in sessions
            ]
            outcome.swap_s += self._clock() - began
            outcome.swapped_tokens += sessions[0].token_count
        finally:
            self._close(key)

    def _close(self, key: int) -> None:
        self._decode_keys = None
        for session in self._sessions.pop(key, ()):
            session.close()

    def _drop_prefix(self, sequence_id: int) -> None:
        """The ABI drops a sequence through a session, any session."""
        sessions = next(iter(self._sessions.values()), None)
        if sessions is not None:
            for session in sessions:
                session.drop_sequence(sequence_id)
            return
        for stage in self.stages:
            with stage.create_session() as session:
                session.drop_sequence(sequence_id)

    # --- the batch ------------------------------------------------------------------------------

    def _run_whole(self, iteration: Iteration, outcome: Outcome) -> None:
        """One call on a model that samples, with no object per decoding request."""
        keys, chunks = iteration.decode_keys, iteration.chunks
        if keys != self._decode_keys:
            sessions, sampling = self._sessions, self._sampling
            self._decodes = DecodeRows(
                [sessions[key][0] for key in keys], [sampling[key] for key in keys]
            )
            self._decode_keys = keys
        entries = [
            self._row(chunk.key, chunk.tokens, chunk.sample_last, Phase.PREFILL).entries[0]
            for chunk in chunks
        ]
        if not keys and not entries:
            return
        outcome.native_calls += 1
        batch = self.stages[0].batch
        try:
            tokens = batch.run_with_decodes(self._decodes, iteration.decode_tokens, entries)
        except SkippyNativeError as error:
            samples: dict[int, int] = {}
            self._halve(self._rows(iteration, outcome), error, samples, outcome)
            self._answer(iteration, samples, outcome)
            return
        outcome.decode_samples, outcome.chunk_samples = tokens[: len(keys)], tokens[len(keys) :]
        if not self._is_sound(tokens, entries):
            self._collect(self._rows(iteration, outcome), list(enumerate(tokens)), {}, outcome)

    def _is_sound(self, tokens: Sequence[int], entries: Sequence[IterationEntry]) -> bool:
        """Whether all samples are tokens and all sessions are where they are counted to be."""
        kept = self._decodes.sessions
        samples = [
            *tokens[: len(kept)],
            *(t for t, e in zip(tokens[len(kept) :], entries, strict=True) if e.sample_last),
        ]
        if samples and not (min(samples) >= 0 and max(samples) < self._vocabulary):
            return False
        sessions = [*kept, *(entry.session for entry in entries)]
        position = self.stages[0].library.session_position
        counts = [session.token_count for session in sessions]
        return list(map(position, [session.address for session in sessions])) == counts

    def _answer(self, iteration: Iteration, samples: dict[int, int], outcome: Outcome) -> None:
        take = samples.get
        outcome.decode_samples = [take(key, NO_SAMPLE) for key in iteration.decode_keys]
        outcome.chunk_samples = [take(chunk.key, NO_SAMPLE) for chunk in iteration.chunks]

    def _rows(self, iteration: Iteration, outcome: Outcome) -> list[Row]:
        """Rows whose command failed are left out; they have their fault already."""
        rows = [
            self._row(key, (token,), True, Phase.DECODE)
            for key, token in zip(iteration.decode_keys, iteration.decode_tokens, strict=True)
            if key not in outcome.faults
        ]
        rows += [
            self._row(chunk.key, chunk.tokens, chunk.sample_last, Phase.PREFILL)
            for chunk in iteration.chunks
            if chunk.key not in outcome.faults
        ]
        return rows

    def _row(self, key: int, tokens: Sequence[int], sample_last: bool, phase: Phase) -> Row:
        sessions, sampling = self._sessions[key], self._sampling[key]
        entries = [
            IterationEntry(session, tokens, sampling=sampling, sample_last=sample_last, phase=phase)
            for session in sessions
        ]
        return Row(key, sessions, entries, sample_last)

    def _run(self, rows: Sequence[Row], samples: dict[int, int], outcome: Outcome) -> None:
        """One native batch per stage; after a failure again in halves, down to the guilty row."""
        output: Any = None
        for stage in range(len(self.stages)):
            entries = [row.entries[stage] for row in rows]
            if stage:
                for entry, frame in zip(entries, output.request_outputs, strict=True):
                    entry.input = frame
            outcome.native_calls += 1
            try:
                output = iteration_batch_sampled(entries)
            except PartialBatchExecution as partial:
                outcome.partial_batches += 1
                output = partial.outputs
                self._stopped_part_way(rows, partial, outcome)
                rows = rows[: partial.executed]
                if not rows:
                    return
            except SkippyNativeError as error:
                self._halve(rows, error, samples, outcome)
                return
        self._collect(rows, output.samples, samples, outcome)

    def _stopped_part_way(
        self, rows: Sequence[Row], partial: PartialBatchExecution, outcome: Outcome
    ) -> None:
        """The row at ``executed`` is guilty; those after it did not run on this stage."""
        guilty = rows[partial.executed]
        outcome.faults[guilty.key] = Fault(Fate.FAILED, partial.cause)
        for row in rows[partial.executed + 1 :]:
            back = self._bring_back(row, outcome)
            outcome.faults[row.key] = Fault(Fate.NOT_RUN if back else Fate.LOST, partial.cause)

    def _halve(
        self,
        rows: Sequence[Row],
        error: SkippyNativeError,
        samples: dict[int, int],
        outcome: Outcome,
    ) -> None:
        kept = []
        for row in rows:
            if self._bring_back(row, outcome):
                kept.append(row)
            else:
                outcome.faults[row.key] = Fault(Fate.LOST, error)
        if len(rows) == 1:
            outcome.faults[rows[0].key] = Fault(Fate.FAILED, error)
            return
        middle = len(kept) // 2
        for part in (kept[:middle], kept[middle:]):
            if part:
                self._run(part, samples, outcome)

    def _bring_back(self, row: Row, outcome: Outcome) -> bool:
        """Put a row's sessions back where they stood before the iteration, natively and here."""
        before = min(session.token_count for session in row.sessions)
        for session in row.sessions:
            with contextlib.suppress(SkippyNativeError):
                if session.position != before or session.token_count != before:
                    outcome.native_calls += 1
                    session.trim(before)
            if session.position != before or session.token_count != before:
                return False
        return True

    def _collect(
        self,
        rows: Sequence[Row],
        given: Sequence[Any],
        samples: dict[int, int],
        outcome: Outcome,
    ) -> None:
        """Take the samples of rows that ran; a row whose answer is impossible is at fault."""
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
            for session in row.sessions:
                if session.position != session.token_count:
                    problem = (
                        f"the native session is at position {session.position}, "
                        f"expected {session.token_count}"
                    )
            if problem:
                outcome.faults[row.key] = Fault(Fate.FAILED, NativeAnswerError(problem))
