"""One stage of a model with the sessions of the requests that have a lane; a whole model is one.

Carries out the commands of an iteration. Used by one thread at a time; knows nothing of the
stages beside it, nor of batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skippy_sched.native import Model, NativeAnswerError, SkippyNativeError, StageSession
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.grammar import GrammarError, Guide, grammars_of
from skippy_sched.scheduler.iteration import (
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
    SettleVerify,
    SwapOut,
)
from skippy_sched.scheduler.request import TokenLogprobs


class Stage:
    """``number``: its place among the stages, from 0."""

    def __init__(self, model: Model, number: int, clock: Callable[[], float]) -> None:
        self.model = model
        self.number = number
        self.sessions: dict[int, StageSession] = {}
        self.sampling: dict[int, SamplingConfig] = {}
        #: how many likeliest tokens to tell of, for those who ask
        self.logprobs: dict[int, int] = {}
        #: of those whose answer has to fit a grammar
        self.guides: dict[int, Guide] = {}
        self._grammars = grammars_of(model)
        self._clock = clock
        self._swapped: dict[int, Any] = {}
        options = model.options
        self._layers = (options.layer_start, options.layer_end or model.facts.n_layer)

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.sessions.clear()
        self.model.close()

    def command(self, command: Command, outcome: Outcome) -> None:
        """What fails ends up in the outcome, never as an exception."""
        outcome.native_calls += 1
        try:
            match command:
                case OpenSession():
                    self._open(command, outcome)
                case CloseSession(key):
                    self.sampling.pop(key, None)
                    self.logprobs.pop(key, None)
                    self.guides.pop(key, None)
                    self._swapped.pop(key, None)
                    self._close(key)
                case ResetSession(key):
                    self.sessions[key].reset()
                case SwapOut(key):
                    self._swap_out(key, outcome)
                case SavePrefix(key, sequence_id, length):
                    self.sessions[key].save_prefix(sequence_id, length)
                case DropPrefix(sequence_id):
                    self._drop_prefix(sequence_id)
                case SettleVerify(key, start, count, accepted):
                    if accepted == count:
                        self.sessions[key].retire_verify_checkpoint(start, count)
                    else:
                        self.sessions[key].trim(start + accepted)
        except (SkippyNativeError, GrammarError) as error:
            match command:
                case OpenSession(key) | ResetSession(key) | SettleVerify(key):
                    # Restored, swapped in or cut halfway, it can be computed; not opened, not.
                    opened = key in self.sessions
                    fate = Fate.LOST if opened and command.reusable else Fate.FAILED
                    known = outcome.faults.get(key)  # of an earlier stage
                    if known is None or known.fate is not Fate.FAILED:
                        outcome.faults[key] = Fault(fate, error)
                case SavePrefix(_, sequence_id):
                    if sequence_id not in outcome.unsaved:
                        outcome.unsaved.append(sequence_id)
                case _:
                    pass  # what was to be freed is gone, or is freed with the model

    def guide(self, iteration: Iteration, outcome: Outcome) -> None:
        """Let the rows that are to be sampled have only what fits their grammars."""
        decodes = dict(zip(iteration.decode_keys, iteration.decode_tokens, strict=True))
        chunks = {chunk.key: chunk for chunk in iteration.chunks}
        for key, guide in self.guides.items():
            if key in outcome.faults:
                continue
            try:
                if key in decodes:
                    guide.advance(self.sessions[key].token_count, (decodes[key],))
                elif key in chunks and chunks[key].sample_last:
                    guide.advance(chunks[key].start, chunks[key].tokens)
                else:
                    continue
                self.sessions[key].set_mask(guide.mask())
            except (SkippyNativeError, GrammarError) as error:
                outcome.faults[key] = Fault(Fate.FAILED, error)

    def tell_logprobs(self, key: int, token: int, outcome: Outcome) -> None:
        """Put what the model thinks of ``token`` at the session's last row into the outcome.

        To be called before anything else is executed.
        """
        try:
            told = self.sessions[key].logprobs(token, self.logprobs[key])
            if told is None:
                raise NativeAnswerError("the library tells no log-probabilities")
        except SkippyNativeError as error:
            outcome.faults[key] = Fault(Fate.FAILED, error)
        else:
            outcome.logprobs[key] = TokenLogprobs(token, told[0], tuple(told[1]))

    def _open(self, command: OpenSession, outcome: Outcome) -> None:
        key = command.key
        self.sampling[key] = command.sampling
        if command.logprobs is not None and self.model.terminal_stage:
            self.logprobs[key] = command.logprobs
        if command.grammar is not None and self.model.terminal_stage:
            self.guides[key] = self._grammars.guide(
                command.grammar, command.answer_start, command.answer
            )
        session = self.sessions[key] = self.model.create_session()
        if command.restore is not None:
            session.restore_prefix(command.restore.sequence_id, command.restore.tokens)
        if command.swapped:
            state = self._swapped.pop(key, None)
            if state is None:
                raise NativeAnswerError("its state could not be swapped out")
            began = self._clock()
            session.import_full_state(*self._layers, state)
            self._note_swap(session, began, outcome)

    def _swap_out(self, key: int, outcome: Outcome) -> None:
        """A state that can't be taken out is missing when it is wanted: then it is computed."""
        session = self.sessions[key]
        began = self._clock()
        try:
            if key not in outcome.faults:  # otherwise nobody knows what it holds
                self._swapped[key] = session.export_full_state(*self._layers)
                self._note_swap(session, began, outcome)
        finally:
            self._close(key)

    def _note_swap(self, session: StageSession, began: float, outcome: Outcome) -> None:
        outcome.swap_s += self._clock() - began
        if self.number == 0:  # a token is swapped once, by all stages
            outcome.swapped_tokens += session.token_count

    def _close(self, key: int) -> None:
        session = self.sessions.pop(key, None)
        if session is not None:
            session.close()

    def _drop_prefix(self, sequence_id: int) -> None:
        """The ABI drops a sequence through a session, any session."""
        session = next(iter(self.sessions.values()), None)
        if session is not None:
            session.drop_sequence(sequence_id)
            return
        with self.model.create_session() as session:
            session.drop_sequence(sequence_id)
