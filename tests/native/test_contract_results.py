"""The rules of the C ABI on each engine: what can be asked after an execution."""

from __future__ import annotations

import pytest

from skippy_sched.native import (
    InvalidArgument,
    NativeError,
    Status,
)
from skippy_sched.native.cdef import ffi

from .conftest import SAMPLED, Engine, a_session, continuation
from .raw_calls import raw_status


def test_copying_the_exports_of_a_terminal_stage_gives_an_empty_frame(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    assert session.copy_output_activation_frame(6).is_empty
    desc, payload, written = (
        ffi.new("struct skippy_activation_desc *"),
        ffi.new("char[8]"),
        ffi.new("size_t *"),
    )
    call = "skippy_session_copy_output_activation_frame"
    refused = raw_status(model, call, session.raw, 0, desc, payload, 8, written)
    assert refused is Status.INVALID_ARGUMENT
    assert raw_status(model, call, ffi.NULL, 1, desc, payload, 8, written) is not Status.OK
    assert session.position == 6


def test_sample_current_draws_from_the_last_row_and_moves_nothing(engine: Engine) -> None:
    session = a_session(engine.open())
    token, _ = session.decode_step_frame(310)
    assert session.sample_current() == token
    assert session.sample_current() == token
    assert session.token_count == session.position == 7


def test_sample_current_without_a_row_is_an_error(engine: Engine) -> None:
    with pytest.raises(NativeError):
        engine.open().create_session().sample_current()


def test_signals_tell_how_sure_the_model_was(engine: Engine) -> None:
    session = a_session(engine.open())
    token, _ = session.decode_step_frame(310)
    signal = session.last_token_signal()
    assert signal.top_token == token
    assert signal.entropy >= 0
    assert 0 >= signal.top_logprob >= signal.second_logprob
    assert signal.margin == pytest.approx(signal.top_logprob - signal.second_logprob, abs=1e-5)
    window = session.signal_window(4)
    assert window.token_count <= 4
    assert window.max_entropy >= window.mean_entropy
    with pytest.raises(ValueError, match="window_tokens is 0"):
        session.signal_window(0)


def test_there_is_no_signal_before_the_first_row(engine: Engine) -> None:
    with pytest.raises(InvalidArgument):
        engine.open().create_session().last_token_signal()


def test_chat_sampling_is_set_and_cleared(engine: Engine) -> None:
    session = a_session(engine.open())
    before = continuation(session, 1)
    session.trim(6)
    session.configure_chat_sampling(SAMPLED, "{}", 6)
    session.configure_chat_sampling(None, "not json", 6)
    session.configure_chat_sampling(None, None)
    assert continuation(session, 1) == before
