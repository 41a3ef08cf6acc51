"""The rules of the C ABI on each engine: stages of a model that is cut, and frames between them.

What a stage refuses of a frame is in test_frame_rules.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from skippy_sched.native import (
    ActivationDesc,
    ActivationFrame,
    ActivationPartDesc,
    DecodeFrameBatchEntry,
    InvalidArgument,
    IterationEntry,
    Model,
    NativeRuntimeError,
    PartialBatchExecution,
    StageSession,
    Status,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import (
    ACTIVATION_PART_OPTIONAL,
    GGML_TYPE_F16,
    GGML_TYPE_I32,
    ffi,
)

from .conftest import Engine, a_stage, add_fault
from .raw_calls import raw_iteration, raw_request, raw_status

PROMPT = [301, 302, 303]


@dataclass(slots=True)
class Edge:
    """Both sides of the cut at layer 2, and a frame that crosses it."""

    first: Model
    last: Model
    frame: ActivationFrame

    def row(self) -> int:
        """Bytes of one token's activations."""
        return int(self.frame.desc.payload_bytes) // len(PROMPT)


@pytest.fixture
def edge(cut_engine: Engine) -> Edge:
    first = a_stage(cut_engine, 0, 2)
    frame = first.create_session().prefill_chunk_frame(PROMPT)
    return Edge(first, a_stage(cut_engine, 2, 4), frame)


def a_part(ggml_type: int, element_bytes: int) -> ActivationPartDesc:
    """An OPTIONAL part with one element a token, which no boundary knows."""
    return ActivationPartDesc(
        identity=bytes([9]) * 32,
        ggml_type=ggml_type,
        rank=1,
        token_axis=0,
        flags=ACTIVATION_PART_OPTIONAL,
        dimensions=(len(PROMPT), 0, 0, 0),
        byte_strides=(element_bytes, 0, 0, 0),
        payload_bytes=element_bytes * len(PROMPT),
    )


def with_optional(
    frame: ActivationFrame, extra: ActivationPartDesc, *, first: bool = False
) -> ActivationFrame:
    """The frame with a part more, behind its own or before it."""
    own = frame.desc.parts()[0]
    extra_bytes = bytes(range(extra.payload_bytes))
    desc = ActivationDesc.from_bytes(frame.desc.to_bytes())
    desc.raw.part_count = 2
    desc.raw.payload_bytes += extra.payload_bytes
    extra.store(desc.raw.parts[1])
    if first:
        desc.raw.parts[0].payload_offset = extra.payload_bytes
        return ActivationFrame(desc, extra_bytes + bytes(frame.payload))
    desc.raw.parts[1].payload_offset = own.payload_bytes
    return ActivationFrame(desc, bytes(frame.payload) + extra_bytes)


# ---- input (6.2) ---------------------------------------------------------------------------------


def test_a_payload_may_lie_anywhere(edge: Edge) -> None:
    """Neither the payload's address nor a part's offset needs to be a multiple of anything."""
    expected = edge.last.create_session().prefill_chunk_frame_sampled(PROMPT, None, edge.frame)[0]
    memory = np.zeros(len(edge.frame.payload) + 1, np.uint8)
    memory[1:] = edge.frame.payload
    shifted = ActivationFrame(edge.frame.desc, memory[1:])
    behind = with_optional(edge.frame, a_part(GGML_TYPE_F16, 2), first=True)
    assert behind.desc.parts()[0].payload_offset % 4 == 2
    for frame in (shifted, behind):
        session = edge.last.create_session()
        assert session.prefill_chunk_frame_sampled(PROMPT, None, frame)[0] == expected


def test_a_descriptor_without_a_payload_is_no_frame(edge: Edge) -> None:
    session = edge.last.create_session()
    tokens, desc = ffi.new("int32_t[]", PROMPT), ffi.new("struct skippy_activation_desc *")
    out, written = ffi.new("char[8]"), ffi.new("size_t *")
    for given in ((edge.frame.desc.raw, ffi.NULL), (ffi.NULL, out)):
        status = raw_status(
            edge.last, "skippy_prefill_chunk_frame", session.raw, tokens, len(PROMPT), *given,
            desc, out, 8, written,
        )  # fmt: skip
        assert status is Status.INVALID_ARGUMENT
    assert session.position == 0


# ---- output (6.3) --------------------------------------------------------------------------------


def test_a_buffer_too_small_names_its_size_and_executes_nothing(edge: Edge) -> None:
    session = edge.first.create_session()
    tokens, desc = ffi.new("int32_t[]", PROMPT), ffi.new("struct skippy_activation_desc *")
    needed, out = len(edge.frame.payload), ffi.new("char[]", len(edge.frame.payload))
    written = ffi.new("size_t *")

    def call(payload: Any, capacity: int) -> Status:
        written[0] = 1
        return raw_status(
            edge.first, "skippy_prefill_chunk_frame", session.raw, tokens, len(PROMPT), ffi.NULL,
            ffi.NULL, desc, payload, capacity, written,
        )  # fmt: skip

    for capacity in (0, needed - 1):
        assert call(out, capacity) is Status.BUFFER_TOO_SMALL
        assert (written[0], desc.version, session.position) == (needed, 0, 0)
    assert call(ffi.NULL, needed) is Status.INVALID_ARGUMENT
    assert session.position == 0
    assert call(out, needed) is Status.OK
    assert (written[0], desc.version, session.position) == (needed, 2, len(PROMPT))


def test_all_sizes_of_a_batch_are_named_at_once(edge: Edge) -> None:
    sessions = [edge.first.create_session() for _ in range(2)]
    ids = [ffi.new("int32_t[]", PROMPT), ffi.new("int32_t[]", PROMPT[:1])]
    requests = ffi.new("struct skippy_iteration_request[2]")
    for row, session, tokens in zip(requests, sessions, ids, strict=True):
        row.session, row.token_ids, row.token_count = session.raw, tokens, len(tokens)
    payload, sizes = ffi.new("char[8]"), ffi.new("size_t[2]")
    status = raw_iteration(
        edge.first,
        requests,
        2,
        descs=ffi.new("struct skippy_activation_desc[2]"),
        payloads=ffi.new("void *[2]", [payload, payload]),
        capacities=ffi.new("size_t[2]"),
        bytes=sizes,
    )
    assert status is Status.BUFFER_TOO_SMALL
    assert list(sizes) == [edge.row() * len(PROMPT), edge.row()]
    assert [session.position for session in sessions] == [0, 0]


def test_optional_parts_travel_on_behind_the_stages_own(cut_engine: Engine, edge: Edge) -> None:
    middle = a_stage(cut_engine, 2, 3).create_session()
    frame = with_optional(edge.frame, a_part(GGML_TYPE_I32, 4))
    out = middle.prefill_chunk_frame(PROMPT, frame)
    assert [part.is_optional for part in out.desc.parts()] == [False, True]
    assert out.part(1).tobytes() == frame.part(1).tobytes()
    end = a_stage(cut_engine, 3, 4).create_session()
    token = end.prefill_chunk_frame_sampled(PROMPT, None, out)[0]
    expected = edge.last.create_session().prefill_chunk_frame_sampled(PROMPT, None, edge.frame)[0]
    assert token == expected


def test_optional_parts_are_refused_in_a_native_batch(edge: Edge) -> None:
    session = edge.last.create_session()
    frame = with_optional(edge.frame, a_part(GGML_TYPE_I32, 4))
    payload = ffi.from_buffer(frame.payload)
    requests, _keep = raw_request(
        session,
        ffi.new("int32_t[]", PROMPT),
        input_desc=ffi.addressof(frame.desc.raw[0]),
        input_payload=payload,
    )
    assert raw_iteration(edge.last, requests, 1) is Status.INVALID_ARGUMENT
    assert session.position == 0


# ---- execution (6.5 to 6.10) ---------------------------------------------------------------------


def test_positions_that_do_not_continue_the_session_are_refused(edge: Edge) -> None:
    session = edge.last.create_session()
    for positions in ([1, 2, 3], [0, 1], [0, 2, 1]):
        with pytest.raises(InvalidArgument):
            iteration_batch_sampled([IterationEntry(session, PROMPT, positions, None, edge.frame)])
        with pytest.raises(InvalidArgument):
            session.prefill_chunk_frame_with_positions(PROMPT, positions, edge.frame)
    assert session.token_count == session.position == 0


@pytest.mark.parametrize("bad", [0, 1])
def test_one_bad_frame_moves_no_session_of_the_batch(edge: Edge, bad: int) -> None:
    sessions = [edge.last.create_session() for _ in range(2)]
    damaged = ActivationDesc.from_bytes(edge.frame.desc.to_bytes())
    damaged.raw.layer_end = 3
    frames = [edge.frame, edge.frame]
    frames[bad] = ActivationFrame(damaged, edge.frame.payload)
    with pytest.raises(InvalidArgument, match=f"request {bad}"):
        iteration_batch_sampled(
            [
                IterationEntry(session, PROMPT, (), None, frame)
                for session, frame in zip(sessions, frames, strict=True)
            ]
        )
    assert [session.position for session in sessions] == [0, 0]


def test_a_verify_window_on_an_exporting_stage_moves_and_says_nothing(edge: Edge) -> None:
    session = edge.first.create_session()
    predicted, draft, frame = session.verify_tokens_frame(PROMPT)
    assert (predicted, draft) == ([], None)
    assert np.array_equal(frame.payload, edge.frame.payload)
    assert session.token_count == session.position == len(PROMPT)
    with pytest.raises(InvalidArgument):
        session.verify_tokens_frame(PROMPT, edge.frame)


def test_a_verify_window_with_frames_says_what_decoding_says(edge: Edge) -> None:
    first, last = edge.first.create_session(), edge.last.create_session()
    alone = [edge.first.create_session(), edge.last.create_session()]
    said = []
    for token in PROMPT:
        frame = alone[0].decode_step_frame(token)[1]
        said.append(alone[1].decode_step_frame(token, frame)[0])
    frame = first.verify_tokens_frame(PROMPT)[2]
    assert last.verify_tokens_frame(PROMPT, frame)[0] == said
    assert last.token_count == last.position == len(PROMPT)


def test_a_decode_batch_takes_frames(edge: Edge) -> None:
    sessions = [edge.first.create_session() for _ in range(2)]
    frames = [
        output.output
        for output in decode_step_frame_batch_sampled(
            [
                DecodeFrameBatchEntry(session, token)
                for session, token in zip(sessions, PROMPT[:2], strict=True)
            ]
        )
    ]
    lasts = [edge.last.create_session() for _ in range(2)]
    outputs = decode_step_frame_batch_sampled(
        [
            DecodeFrameBatchEntry(session, token, None, frame)
            for session, token, frame in zip(lasts, PROMPT[:2], frames, strict=True)
        ]
    )
    single = edge.last.create_session().decode_step_frame(PROMPT[0], frames[0])[0]
    assert outputs[0].predicted_token == single
    assert [session.position for session in lasts] == [1, 1]
    with pytest.raises((InvalidArgument, PartialBatchExecution)):
        decode_step_frame_batch_sampled([DecodeFrameBatchEntry(lasts[0], 300)])
    assert lasts[0].token_count == lasts[0].position == 1


def test_stages_trim_and_reset_as_whole_models_do(edge: Edge) -> None:
    session = edge.last.create_session()
    expected = session.prefill_chunk_frame_sampled(PROMPT, None, edge.frame)[0]
    for back in (lambda: session.trim(0), session.reset):
        back()
        assert session.token_count == session.position == 0
        assert session.prefill_chunk_frame_sampled(PROMPT, None, edge.frame)[0] == expected


def break_row(engine: Engine, model: Model, frame: ActivationFrame, call: str) -> ActivationFrame:
    """A frame whose last row leads to no token: logits that are no numbers, or a fault."""
    if engine.name == "sim":
        add_fault(model, f"call={call} status=RUNTIME_ERROR when=after")
        return frame
    payload = np.array(frame.payload)
    payload.view(np.float32)[:] = np.nan
    return ActivationFrame(frame.desc, payload)


@pytest.mark.parametrize("call", ["prefill", "verify", "iteration"])
def test_a_row_without_an_allowed_token_fails_after_its_session_has_advanced(
    cut_engine: Engine, edge: Edge, call: str
) -> None:
    session = edge.last.create_session()
    frame = break_row(cut_engine, edge.last, edge.frame, call)
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: session.prefill_chunk_frame_sampled(PROMPT, None, frame),
        "verify": lambda: session.verify_tokens_frame(PROMPT, frame),
        "iteration": lambda: iteration_batch_sampled(
            [IterationEntry(session, PROMPT, (), None, frame)]
        ),
    }
    with pytest.raises(NativeRuntimeError):
        calls[call]()
    assert (session.token_count, session.position) == (0, len(PROMPT))
    session.trim(0)
    session.prefill_chunk_frame_sampled(PROMPT, None, edge.frame)
    assert session.token_count == session.position == len(PROMPT)


# ---- copies of exports (6.11) --------------------------------------------------------------------


def copied(session: StageSession, tokens: int) -> bytes:
    return bytes(session.copy_output_activation_frame(tokens).payload)


def test_exports_can_be_copied_only_of_the_last_execution_and_whole(edge: Edge) -> None:
    session = edge.first.create_session()
    with pytest.raises(NativeRuntimeError):
        copied(session, 1)
    frame = session.prefill_chunk_frame(PROMPT)
    assert copied(session, len(PROMPT)) == bytes(frame.payload)
    for tokens in (1, len(PROMPT) + 1):
        with pytest.raises(NativeRuntimeError):
            copied(session, tokens)
    edge.first.create_session().decode_step_frame(300)
    with pytest.raises(NativeRuntimeError):
        copied(session, len(PROMPT))
    assert session.token_count == session.position == len(PROMPT)


# ---- state of a stage (6.17) ---------------------------------------------------------------------


def test_a_stages_state_is_of_its_own_layers(edge: Edge) -> None:
    session = edge.last.create_session()
    token = session.prefill_chunk_frame_sampled(PROMPT, None, edge.frame)[0]
    state = session.export_full_state(2, 4)
    for layers in ((0, 4), (0, 2), (2, 3)):
        with pytest.raises(InvalidArgument):
            session.export_full_state(*layers)
    other = edge.last.create_session()
    other.import_full_state(2, 4, state)
    assert other.token_count == other.position == len(PROMPT)
    source = edge.first.create_session()
    source.prefill_chunk_frame(PROMPT)
    frame = source.decode_step_frame(token)[1]
    assert other.decode_step_frame(token, frame)[0] == session.decode_step_frame(token, frame)[0]
