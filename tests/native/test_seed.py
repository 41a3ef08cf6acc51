"""The tests that came with the layer this one is a port of, with the same right values."""

from __future__ import annotations

import pytest

from skippy_sched.native import (
    HostCheckError,
    InvalidArgument,
    IterationEntry,
    NativeAnswerError,
    NativeError,
    PartialBatchExecution,
    Phase,
    StageSession,
    Status,
    collect_iteration_samples,
    iteration_batch_sampled,
)
from skippy_sched.native.activation import input_pointers
from skippy_sched.native.cdef import address_of, ffi
from skippy_sched.native.serial import (
    emits_sample,
    requires_one_at_a_time,
    validate_serial_decode,
)

from .conftest import Engine, a_frame, a_null_session


def a_decode(session: StageSession, **changes: object) -> IterationEntry:
    return IterationEntry(**({"session": session, "token_ids": [7]} | changes))  # type: ignore[arg-type]


def test_input_frame_whose_payload_length_differs_from_its_descriptor_is_refused() -> None:
    with pytest.raises(
        HostCheckError,
        match="activation payload length 1 does not match descriptor payload_bytes 2",
    ):
        input_pointers(a_frame(payload_bytes=2, payload=b"\x01"))


def test_input_frame_of_the_right_length_is_passed_without_a_copy() -> None:
    frame = a_frame(payload_bytes=1, payload=b"\x01")
    desc, payload = input_pointers(frame)
    assert desc.payload_bytes == 1
    assert address_of(payload) == address_of(ffi.from_buffer(frame.payload))


def test_serial_decode_accepts_an_established_session_without_positions(sim: Engine) -> None:
    session = a_null_session(sim.open(), token_count=4)
    validate_serial_decode(a_decode(session))


@pytest.mark.parametrize("positions", [[], [0]])
def test_serial_decode_accepts_a_frame_at_the_origin(sim: Engine, positions: list[int]) -> None:
    """A downstream stage of a recurrent model starts with a decode of position 0."""
    session = a_null_session(sim.open(), token_count=0)
    validate_serial_decode(a_decode(session, positions=positions, input=a_frame()))


@pytest.mark.parametrize(
    ("token_count", "token_ids", "positions", "sample_last"),
    [(0, [7], [], True), (4, [7, 8], [], True), (4, [7], [3], True), (4, [7], [], False)],
)
def test_serial_decode_refuses_other_shapes(
    sim: Engine, token_count: int, token_ids: list[int], positions: list[int], sample_last: bool
) -> None:
    session = a_null_session(sim.open(), token_count=token_count)
    entry = IterationEntry(session, token_ids, positions, sample_last=sample_last)
    with pytest.raises(HostCheckError):
        validate_serial_decode(entry)


def test_one_token_prefill_tail_is_not_a_decode(sim: Engine) -> None:
    """The phase is stated: the tail runs as a prefill, without a sample."""
    model = sim.open()
    session = model.create_session()
    session.prefill_chunk_frame([1, 2, 3, 4])
    tail = IterationEntry(session, [7], [4], sample_last=False, phase=Phase.PREFILL)
    assert tail.phase is Phase.PREFILL
    output = iteration_batch_sampled([tail])
    assert output.samples == []
    assert session.token_count == session.position == 5


def test_intermediate_stage_emits_no_sample_when_run_alone(sim: Engine) -> None:
    session = a_null_session(sim.open(), token_count=4, terminal_stage=False)
    assert not emits_sample(a_decode(session))


def test_sparse_samples_keep_their_request_indexes() -> None:
    samples = collect_iteration_samples(3, 2, [0, 2, 0], [41, 99, 0])
    assert samples == [(0, 41), (2, 99)]
    assert samples[1].request_index == 2
    assert samples[1].predicted_token == 99


@pytest.mark.parametrize(
    ("count", "indexes", "tokens"),
    [(2, [1, 1], [41, 99]), (1, [3], [41]), (4, [0, 1, 2, 0], [1, 2, 3, 4])],
)
def test_duplicate_out_of_range_and_surplus_samples_are_refused(
    count: int, indexes: list[int], tokens: list[int]
) -> None:
    with pytest.raises(NativeAnswerError):
        collect_iteration_samples(3, count, indexes, tokens)


def test_native_invalid_argument_is_passed_on_without_a_serial_retry(sim: Engine) -> None:
    model = sim.open()
    sessions = [a_null_session(model, terminal_stage=False) for _ in range(2)]
    with pytest.raises(InvalidArgument, match="InvalidArgument") as caught:
        iteration_batch_sampled([a_decode(session) for session in sessions])
    assert not isinstance(caught.value, PartialBatchExecution)
    assert [session.token_count for session in sessions] == [0, 0]


def test_exporting_stages_that_cannot_batch_exports_run_one_at_a_time(sim: Engine) -> None:
    model = sim.open()
    dense = a_null_session(model, terminal_stage=False, batched_activation_exports=True)
    recurrent = a_null_session(model, terminal_stage=False, batched_activation_exports=False)
    assert not requires_one_at_a_time(a_decode(dense))
    assert requires_one_at_a_time(a_decode(recurrent))


def test_terminal_stages_batch_whatever_their_memory(sim: Engine) -> None:
    session = a_null_session(sim.open(), terminal_stage=True, batched_activation_exports=False)
    assert not requires_one_at_a_time(a_decode(session))


def test_optional_parts_always_run_one_at_a_time(sim: Engine) -> None:
    session = a_null_session(sim.open(), terminal_stage=False)
    assert requires_one_at_a_time(a_decode(session, input=a_frame(optional=True)))


def test_partial_execution_tells_how_many_requests_ran() -> None:
    cause = NativeError("call", Status.RUNTIME_ERROR, "native failed")
    error = PartialBatchExecution(2, cause, [])
    assert error.executed == 2
    assert error.cause is cause
    assert error.__cause__ is cause
    assert "executed 2 request(s)" in str(error)
