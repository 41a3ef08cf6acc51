"""The rules of the C ABI on each engine: frames where the model is whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skippy_sched.native import (
    DecodeFrameBatchEntry,
    InvalidArgument,
    IterationEntry,
    Status,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import ffi

from .conftest import Engine, a_frame, a_session
from .raw_calls import raw_status


@pytest.mark.parametrize("call", ["prefill", "sampled", "decode", "verify", "iteration", "batch"])
def test_a_source_stage_refuses_a_frame_and_moves_nothing(engine: Engine, call: str) -> None:
    session = a_session(engine.open())
    frame = a_frame(payload_bytes=4, payload=bytes(4))
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: session.prefill_chunk_frame([300], frame),
        "sampled": lambda: session.prefill_chunk_frame_sampled([300], None, frame),
        "decode": lambda: session.decode_step_frame(300, frame),
        "verify": lambda: session.verify_tokens_frame([300], frame),
        "iteration": lambda: iteration_batch_sampled(
            [IterationEntry(session, [300], (), None, frame)]
        ),
        "batch": lambda: decode_step_frame_batch_sampled(
            [DecodeFrameBatchEntry(session, 300, None, frame)]
        ),
    }
    with pytest.raises(InvalidArgument):
        calls[call]()
    assert session.token_count == session.position == 6


def test_an_empty_frame_is_no_frame(engine: Engine) -> None:
    session = a_session(engine.open())
    empty = a_frame(payload_bytes=0, payload=b"")
    _, out = session.decode_step_frame(300, empty)
    assert out.is_empty
    assert (out.desc.version, out.desc.token_count, out.desc.part_count) == (2, 1, 0)


def test_capacity_without_a_buffer_is_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    tokens = ffi.new("int32_t[]", [300])
    desc, written = ffi.new("struct skippy_activation_desc *"), ffi.new("size_t *")
    frame = (ffi.NULL, ffi.NULL, desc, ffi.NULL, 64, written)
    call = "skippy_prefill_chunk_frame"
    assert raw_status(model, call, session.raw, tokens, 1, *frame) is Status.INVALID_ARGUMENT
    assert session.position == 6
