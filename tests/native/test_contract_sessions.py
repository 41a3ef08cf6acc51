"""The rules of the C ABI on each engine: trim, reset, positions, lanes and prefixes."""

from __future__ import annotations

from typing import Any

import pytest

from skippy_sched.native import (
    InvalidArgument,
    NativeRuntimeError,
    Status,
    Unsupported,
)
from skippy_sched.native.cdef import ffi

from .conftest import FIRST_PREFIX, Engine, a_session, continuation, tokens_of
from .raw_calls import raw_iteration, raw_status

# ---- trim, reset, positions, lanes (6.13, 6.15) --------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 5, 6])
def test_a_trimmed_session_goes_on_as_if_never_longer(engine: Engine, kept: int) -> None:
    model = engine.open()
    prompt = tokens_of(model, 6)
    with model.create_session() as fresh:
        if kept:
            fresh.prefill_chunk_frame(prompt[:kept])
        expected = continuation(fresh, 3)
    session = a_session(model)
    session.trim(kept)
    assert session.token_count == session.position == kept
    assert continuation(session, 3) == expected


def test_trimming_beyond_the_position_is_refused(engine: Engine) -> None:
    session = a_session(engine.open())
    for beyond in (7, 2**31, 2**64 - 1):
        with pytest.raises(InvalidArgument):
            session.trim(beyond)
    assert session.token_count == session.position == 6


def test_a_reset_session_is_new(engine: Engine) -> None:
    model = engine.open()
    with model.create_session() as fresh:
        expected = continuation(fresh, 3)
    session = a_session(model)
    session.reset()
    assert session.token_count == session.position == 0
    assert continuation(session, 3) == expected


def test_negative_positions_are_refused(engine: Engine) -> None:
    session = a_session(engine.open())
    with pytest.raises(InvalidArgument):
        session.set_position(-1)
    assert session.token_count == session.position == 6
    session.set_position(6)
    session.set_position(4)
    assert session.token_count == session.position == 4


def test_lanes_run_out_and_come_back(engine: Engine) -> None:
    model = engine.open(lanes=2)
    sessions = [model.create_session() for _ in range(2)]
    assert [session.lane for session in sessions] == [0, 1]
    assert {session.batch_size for session in sessions} == {model.facts.n_batch}
    with pytest.raises(NativeRuntimeError, match="lane"):
        model.create_session()
    sessions[0].close()
    with a_session(model) as again:
        assert again.lane == 0


def test_null_handles_are_refused_not_followed(engine: Engine) -> None:
    model = engine.open()
    out = ffi.new("size_t *")
    cases: list[tuple[Any, ...]] = [
        ("skippy_session_reset", ffi.NULL),
        ("skippy_trim_session", ffi.NULL, 0),
        ("skippy_retire_verify_checkpoint", ffi.NULL, 0, 0),
        ("skippy_session_set_position", ffi.NULL, 0),
        ("skippy_session_sample_current", ffi.NULL, ffi.NULL, ffi.new("int32_t *")),
        ("skippy_session_save_prefix", ffi.NULL, 8, 0),
        ("skippy_session_drop_sequence", ffi.NULL, 8),
        ("skippy_session_memory_used_cells", ffi.NULL, ffi.new("uint64_t *")),
        ("skippy_export_full_state", ffi.NULL, 0, 1, ffi.NULL, 0, out),
        ("skippy_session_create", ffi.NULL, ffi.new("struct skippy_session **")),
        ("skippy_tokenize", ffi.NULL, b"x", False, ffi.new("int32_t[4]"), 4, out),
        ("skippy_verify_tokens", ffi.NULL, ffi.new("int32_t[1]"), 1, ffi.NULL, 0, out),
    ]
    for call, *arguments in cases:
        assert raw_status(model, call, *arguments) is Status.INVALID_ARGUMENT, call
    assert model.lib.skippy_session_position(ffi.NULL) == -1
    assert model.lib.skippy_session_sequence_id(ffi.NULL) == -1
    assert model.lib.skippy_session_batch_size(ffi.NULL) == 0


def test_a_freed_handle_is_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    freed = session.raw
    session.close()
    ids = ffi.new("int32_t[]", [300])
    requests = ffi.new("struct skippy_iteration_request[1]")
    requests[0].session, requests[0].token_ids, requests[0].token_count = freed, ids, 1
    assert raw_iteration(model, requests, 1) is Status.INVALID_ARGUMENT
    for call, *arguments in (
        ("skippy_session_reset", freed),
        ("skippy_trim_session", freed, 0),
        ("skippy_session_sample_current", freed, ffi.NULL, ffi.new("int32_t *")),
        ("skippy_session_free", freed),
    ):
        assert raw_status(model, call, *arguments) is Status.INVALID_ARGUMENT, call
    assert model.lib.skippy_session_position(freed) == -1


# ---- prefixes (6.16) -----------------------------------------------------------------------------


@pytest.mark.parametrize("kv_unified", [False, True])
def test_a_saved_prefix_is_shared_with_other_sessions(engine: Engine, kv_unified: bool) -> None:
    model = engine.open(kv_unified=kv_unified)
    prompt = tokens_of(model, 6)
    session = a_session(model)
    session.save_prefix(FIRST_PREFIX, 4)
    session.trim(4)
    expected = continuation(session, 3)
    session.close()
    other = a_session(model, 2)
    other.restore_prefix(FIRST_PREFIX, prompt[:4])
    assert other.token_count == other.position == 4
    assert continuation(other, 3) == expected
    with model.create_session_from_resident_prefix(FIRST_PREFIX, prompt[:4]) as resident:
        assert resident.token_count == resident.position == 4
        assert continuation(resident, 3) == expected
    other.drop_sequence(FIRST_PREFIX)
    with pytest.raises(InvalidArgument):
        other.restore_prefix(FIRST_PREFIX, prompt[:4])


def test_prefixes_out_of_range_are_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    prompt = tokens_of(model, 6)
    for call in (
        lambda: session.save_prefix(FIRST_PREFIX - 1, 4),
        lambda: session.save_prefix(-1, 4),
        lambda: session.save_prefix(FIRST_PREFIX, 7),
        lambda: session.drop_sequence(FIRST_PREFIX - 1),
        lambda: session.restore_prefix(FIRST_PREFIX + 3, prompt[:4]),
        lambda: model.create_session_from_resident_prefix(FIRST_PREFIX + 3, prompt[:4]),
    ):
        with pytest.raises(InvalidArgument):
            call()
    session.save_prefix(FIRST_PREFIX, 4)
    with pytest.raises(InvalidArgument):
        session.restore_prefix(FIRST_PREFIX, prompt)
    assert session.token_count == session.position == 6
    assert len(model.sessions) == 1


def test_used_cells_are_counted(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    try:
        used = session.memory_used_cells()
        session.trim(2)
        assert session.memory_used_cells() <= used
    except Unsupported:
        assert session.position == 6
