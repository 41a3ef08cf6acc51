"""Random sequences of native calls with faults at any point: counts here equal native positions.

A failed call may leave a session's native position ahead of or behind its count. The recovery that
the layer promises is then: trim to the count when ahead, reset when behind or when trimming fails.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from skippy_sched.native import (
    DecodeFrameBatchEntry,
    IterationEntry,
    Library,
    Model,
    ModelOptions,
    NativeError,
    PartialBatchExecution,
    Phase,
    SamplingConfig,
    SkippyNativeError,
    StageSession,
    decode_step_frame_batch_sampled,
    find_library,
    iteration_batch_sampled,
)

from .conftest import CUT_A, add_fault, clear_faults, live_objects

LANES, CTX = 3, 48
STATUSES = ("INVALID_ARGUMENT", "UNSUPPORTED", "BUFFER_TOO_SMALL", "RUNTIME_ERROR", "ERROR")
CALLS = (
    "any", "iteration", "prefill", "decode", "verify", "reset", "trim", "set_position",
    "save_prefix", "restore_prefix", "export_state", "import_state", "export_kv", "import_kv",
    "retire", "session_create", "session_free", "copy_frame", "sample",
)  # fmt: skip
ANSWERS = ("wrong_count", "duplicate_index", "index_out_of_range", "fewer_samples", "grow_buffer")
SAMPLED = SamplingConfig(enabled=True, temperature=1, seed=5)

tokens = st.lists(st.integers(256, 511), min_size=1, max_size=9)
any_session = st.integers(0, LANES - 1)


class NativeCalls(RuleBasedStateMachine):
    """One model, up to LANES sessions, any call with any argument, any fault."""

    spec: Path
    library: Library
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.before = live_objects(self.library)
        given = {"ctx_size": CTX, "lanes": LANES, "n_batch": 24, "n_ubatch": 16} | self.options
        self.model = Model.open(self.library, self.spec, ModelOptions(**given))
        self.sessions: list[StageSession] = []
        self.state: Any = None

    def teardown(self) -> None:
        clear_faults(self.model)
        self.model.close()
        assert live_objects(self.library) == self.before

    def attempt(self, call: Callable[[], object], *touched: StageSession) -> None:
        """Make the call; if it fails, recover the sessions that it may have moved."""
        counts = [session.token_count for session in touched]
        try:
            call()
        except PartialBatchExecution as error:
            self.check_partial(error, touched, counts)
        except SkippyNativeError:
            assert [session.token_count for session in touched] == counts
        else:
            return
        clear_faults(self.model)
        for session in touched:
            self.recover(session)

    def check_partial(
        self, error: PartialBatchExecution, touched: tuple[StageSession, ...], counts: list[int]
    ) -> None:
        outputs = error.outputs
        done = outputs if isinstance(outputs, list) else outputs.request_outputs
        assert len(done) == error.executed < len(touched)
        for index, (session, count) in enumerate(zip(touched, counts, strict=True)):
            assert (session.token_count > count) == (index < error.executed)

    def recover(self, session: StageSession) -> None:
        if session.closed or session.position == session.token_count:
            return
        try:
            if session.position < session.token_count:
                session.reset()
            else:
                session.trim(session.token_count)
        except NativeError:
            session.reset()

    def pick(self, index: int) -> StageSession:
        return self.sessions[index % len(self.sessions)]

    # ---- faults -----------------------------------------------------------------------------

    @rule(
        call=st.sampled_from(CALLS),
        status=st.sampled_from(STATUSES),
        when=st.sampled_from(["before", "middle", "after"]),
        nth=st.integers(1, 3),
    )
    def arm_failure(self, call: str, status: str, when: str, nth: int) -> None:
        add_fault(self.model, f"call={call} nth={nth} status={status} when={when}")

    @rule(effect=st.sampled_from(ANSWERS), count=st.integers(0, 2))
    def arm_answer(self, effect: str, count: int) -> None:
        add_fault(self.model, f"call=iteration effect={effect} count={count}")

    @rule()
    def disarm(self) -> None:
        clear_faults(self.model)

    # ---- sessions ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.sessions) < LANES)
    @rule()
    def create(self) -> None:
        try:
            self.sessions.append(self.model.create_session())
        except NativeError:
            clear_faults(self.model)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session)
    def close(self, index: int) -> None:
        session = self.pick(index)
        try:
            session.close()
        except NativeError:
            clear_faults(self.model)
            session.close()
        self.sessions.remove(session)

    # ---- execution --------------------------------------------------------------------------

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, ids=tokens, sampled=st.booleans(), explicit=st.booleans())
    def prefill(self, index: int, ids: list[int], sampled: bool, explicit: bool) -> None:
        session = self.pick(index)
        start = session.token_count
        positions = range(start, start + len(ids)) if explicit else ()
        if sampled:
            self.attempt(
                lambda: session.prefill_chunk_frame_sampled_with_positions(ids, positions, SAMPLED),
                session,
            )
        else:
            self.attempt(
                lambda: session.prefill_chunk_frame_with_positions(ids, positions), session
            )

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, token=st.integers(256, 511), form=st.integers(0, 4))
    def decode(self, index: int, token: int, form: int) -> None:
        session = self.pick(index)
        forms: list[Callable[[], object]] = [
            lambda: session.decode_step_frame(token),
            lambda: session.decode_step_frame_sampled(token, SAMPLED),
            lambda: session.decode_step_frame_sampled_mtp(token, max_draft_tokens=3),
            lambda: session.decode_step_sampled(token),
            lambda: session.decode_step_sampled_mtp(token, SAMPLED),
        ]
        self.attempt(forms[form], session)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, ids=tokens, kept=st.integers(0, 9), form=st.integers(0, 2))
    def verify(self, index: int, ids: list[int], kept: int, form: int) -> None:
        session = self.pick(index)
        start = session.token_count
        forms: list[Callable[[], object]] = [
            lambda: session.verify_tokens_frame_sampled(ids, SAMPLED, max_draft_tokens=2),
            lambda: session.verify_tokens_sampled_without_mtp(ids),
            lambda: session.verify_tokens(ids),
        ]
        self.attempt(forms[form], session)
        if session.token_count != start + len(ids):
            return
        if kept >= len(ids):
            self.attempt(lambda: session.retire_verify_checkpoint(start, len(ids)), session)
        else:
            self.attempt(lambda: session.trim(start + kept), session)

    @precondition(lambda self: self.sessions)
    @rule(rows=st.lists(tokens, min_size=1, max_size=LANES), sampled=st.integers(0, 7))
    def iterate(self, rows: list[list[int]], sampled: int) -> None:
        sessions = self.sessions[: len(rows)]
        entries = [
            IterationEntry(
                session,
                ids,
                (),
                SAMPLED if len(ids) > 4 else None,
                None,
                bool(sampled >> index & 1),
                Phase.PREFILL,
            )
            for index, (session, ids) in enumerate(zip(sessions, rows, strict=False))
        ]
        self.attempt(lambda: iteration_batch_sampled(entries), *sessions)

    @precondition(lambda self: self.sessions)
    @rule(token=st.integers(256, 511))
    def decode_batch(self, token: int) -> None:
        entries = [DecodeFrameBatchEntry(session, token) for session in self.sessions]
        self.attempt(lambda: decode_step_frame_batch_sampled(entries), *self.sessions)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session)
    def look_again(self, index: int) -> None:
        session = self.pick(index)
        self.attempt(session.sample_current, session)
        self.attempt(lambda: session.copy_output_activation_frame(1), session)

    # ---- positions and state ----------------------------------------------------------------

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, to=st.integers(0, CTX + 2))
    def trim(self, index: int, to: int) -> None:
        session = self.pick(index)
        self.attempt(lambda: session.trim(to), session)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session)
    def reset(self, index: int) -> None:
        session = self.pick(index)
        self.attempt(session.reset, session)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, to=st.integers(-1, CTX + 2))
    def set_position(self, index: int, to: int) -> None:
        session = self.pick(index)
        self.attempt(lambda: session.set_position(to), session)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, other=any_session, count=st.integers(0, 9), drop=st.booleans())
    def share_prefix(self, index: int, other: int, count: int, drop: bool) -> None:
        session, target = self.pick(index), self.pick(other)
        self.attempt(lambda: session.save_prefix(2 * LANES, count), session)
        self.attempt(lambda: target.restore_prefix(2 * LANES, [300] * count), target)
        if drop:
            self.attempt(lambda: target.drop_sequence(2 * LANES), target)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, other=any_session)
    def carry_state(self, index: int, other: int) -> None:
        session, target = self.pick(index), self.pick(other)
        layers = (self.model.options.layer_start, self.model.options.layer_end or 4)

        def export() -> None:
            self.state = session.export_full_state(*layers)

        self.attempt(export, session)
        if self.state is not None:
            self.attempt(lambda: target.import_full_state(*layers, self.state), target)

    @precondition(lambda self: self.sessions)
    @rule(index=any_session, other=any_session, count=st.integers(0, 9))
    def carry_page(self, index: int, other: int, count: int) -> None:
        session, target = self.pick(index), self.pick(other)
        layers = (self.model.options.layer_start, self.model.options.layer_end or 4)
        self.attempt(
            lambda: target.import_kv_page(session.export_kv_page(*layers, 0, count)),
            session,
            target,
        )

    # ---- what must hold ---------------------------------------------------------------------

    @invariant()
    def counts_equal_native_positions(self) -> None:
        for session in self.sessions:
            assert session.token_count == session.position
            assert 0 <= session.token_count <= self.model.facts.ctx_size

    @invariant()
    def every_error_object_is_freed(self) -> None:
        errors, sessions, _ = live_objects(self.library)
        assert errors == self.before[0]
        assert sessions - self.before[1] == len(self.sessions)


STAGE = {
    "layer_end": 2,
    "resident_tensor_names": ("blk",),
    "export_identities": (CUT_A,),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lanes": ("", {"kv_unified": False}),
    "pool": ("", {"kv_unified": True}),
    "recurrent": ("recurrent = true\n", {}),
    "window": ("sliding_window = 8\n", {"swa_full": False}),
    "exporting stage": ("", STAGE),
    "recurrent exporting stage": ("recurrent = true\n", STAGE),
    "optional parts": ("optional_part = true\n", STAGE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_counts_equal_positions_after_any_sequence_of_calls(kind: str, tmp_path: Path) -> None:
    keys, options = KINDS[kind]
    spec = tmp_path / "model.sim"
    spec.write_text("skippy-sim 1\n" + keys)
    machine: Any = type(
        "Machine",
        (NativeCalls,),
        {"spec": spec, "library": Library.load(find_library("sim")), "options": options},
    )
    machine.TestCase.settings = settings(
        max_examples=60,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()
