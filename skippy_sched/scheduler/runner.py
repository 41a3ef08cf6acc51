"""Executes iterations on one model: sessions by key, one native batch each, faults per row.

Everything here runs on the one thread that owns the model's native calls. It finds out which row
of a failed batch is guilty and what became of the others; what that means for their requests is
for reconcile to say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from skippy_sched.native import (
    IterationEntry,
    IterationSample,
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
    Fate,
    Fault,
    Iteration,
    OpenSession,
    Outcome,
)


class ModelRunner:
    """Sessions of one model, and how an iteration runs on them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._sessions: dict[int, StageSession] = {}
        self._sampling: dict[int, SamplingConfig] = {}

    def execute(self, iteration: Iteration) -> Outcome:
        """Run commands and batch; native errors end up as faults of rows, never as exceptions."""
        outcome = Outcome(iteration.number)
        began = time.perf_counter()
        for command in iteration.commands:
            self._command(command, outcome)
        keys, entries = self._entries(iteration, outcome)
        samples: dict[int, int] = {}
        if entries:
            self._run(keys, entries, samples, outcome)
        take = samples.get
        outcome.decode_samples = [take(key, NO_SAMPLE) for key in iteration.decode_keys]
        outcome.chunk_samples = [take(chunk.key, NO_SAMPLE) for chunk in iteration.chunks]
        outcome.native_s = time.perf_counter() - began
        return outcome

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        self.model.close()

    # --- commands -------------------------------------------------------------------------------

    def _command(self, command: Command, outcome: Outcome) -> None:
        key = command.key
        outcome.native_calls += 1
        try:
            if isinstance(command, OpenSession):
                self._sessions[key] = self.model.create_session()
                self._sampling[key] = command.sampling
            elif isinstance(command, CloseSession):
                self._sampling.pop(key, None)
                session = self._sessions.pop(key, None)
                if session is not None:
                    session.close()
            else:
                self._sessions[key].reset()
        except SkippyNativeError as error:
            if not isinstance(command, CloseSession):
                outcome.faults[key] = Fault(Fate.FAILED, error)

    # --- the batch ------------------------------------------------------------------------------

    def _entries(
        self, iteration: Iteration, outcome: Outcome
    ) -> tuple[list[int], list[IterationEntry]]:
        """Rows of sessions that failed to open are left out; they have their fault already."""
        sessions, sampling, faults = self._sessions, self._sampling, outcome.faults
        keys: list[int] = []
        entries: list[IterationEntry] = []
        for key, token in zip(iteration.decode_keys, iteration.decode_tokens, strict=True):
            if key not in faults:
                keys.append(key)
                entries.append(
                    IterationEntry(
                        sessions[key], (token,), sampling=sampling[key], phase=Phase.DECODE
                    )
                )
        for chunk in iteration.chunks:
            key = chunk.key
            if key in faults:
                continue
            keys.append(key)
            entries.append(
                IterationEntry(
                    sessions[key],
                    chunk.tokens,
                    sampling=sampling[key],
                    sample_last=chunk.sample_last,
                    phase=Phase.PREFILL,
                )
            )
        return keys, entries

    def _run(
        self,
        keys: Sequence[int],
        entries: Sequence[IterationEntry],
        samples: dict[int, int],
        outcome: Outcome,
    ) -> None:
        """One native batch; after a failure again in halves, down to the row that is guilty."""
        outcome.native_calls += 1
        try:
            output = iteration_batch_sampled(entries)
            self._collect(keys, entries, output.samples, samples, outcome)
        except PartialBatchExecution as partial:
            outcome.partial_batches += 1
            done = partial.executed
            self._collect(keys, entries[:done], partial.outputs.samples, samples, outcome)
            outcome.faults[keys[done]] = Fault(Fate.FAILED, partial.cause)
            for key in keys[done + 1 :]:
                outcome.faults[key] = Fault(Fate.NOT_RUN)
        except SkippyNativeError as error:
            kept = self._bring_back(keys, entries, error, outcome)
            if len(entries) == 1:
                outcome.faults[keys[0]] = Fault(Fate.FAILED, error)
                return
            middle = len(kept) // 2
            for part in (kept[:middle], kept[middle:]):
                if part:
                    self._run(
                        [keys[row] for row in part],
                        [entries[row] for row in part],
                        samples,
                        outcome,
                    )

    def _collect(
        self,
        keys: Sequence[int],
        entries: Sequence[IterationEntry],
        given: Sequence[IterationSample],
        samples: dict[int, int],
        outcome: Outcome,
    ) -> None:
        """Take the samples of rows that ran; a row whose answer is impossible is at fault."""
        vocabulary = self.model.facts.n_vocab
        for sample in given:
            samples[keys[sample.request_index]] = sample.predicted_token
        for key, entry in zip(keys, entries, strict=False):
            session = entry.session
            problem = None
            if entry.sample_last:
                token = samples.get(key, NO_SAMPLE)
                if not 0 <= token < vocabulary:
                    problem = (
                        "no sample came back"
                        if token == NO_SAMPLE
                        else f"sampled token {token} is outside the vocabulary of {vocabulary}"
                    )
            if session.position != session.token_count:
                problem = (
                    f"the native session is at position {session.position}, "
                    f"expected {session.token_count}"
                )
            if problem:
                outcome.faults[key] = Fault(Fate.FAILED, NativeAnswerError(problem))

    def _bring_back(
        self,
        keys: Sequence[int],
        entries: Sequence[IterationEntry],
        error: Exception,
        outcome: Outcome,
    ) -> list[int]:
        """After a failed batch: the rows whose sessions stand where they stood before it.

        A session that moved natively is trimmed back; where that fails it counts as lost.
        """
        kept: list[int] = []
        for row, entry in enumerate(entries):
            session = entry.session
            try:
                if session.position != session.token_count:
                    outcome.native_calls += 1
                    session.trim(session.token_count)
                if session.position == session.token_count:
                    kept.append(row)
                    continue
            except SkippyNativeError:
                pass
            outcome.faults[keys[row]] = Fault(Fate.LOST, error)
        return kept
