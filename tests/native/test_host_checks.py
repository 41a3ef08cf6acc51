"""What the host refuses before any native call, with a message, whatever was given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skippy_sched.native import (
    HostCheckError,
    InvalidArgument,
    IterationEntry,
    NativeRuntimeError,
    iteration_batch_sampled,
)

from .conftest import Engine, a_frame, a_stage


@pytest.mark.parametrize("payload", [None, "text", [1], np.zeros(8, dtype=np.uint8)[::2]])
def test_a_payload_that_is_no_contiguous_buffer_never_reaches_the_library(
    sim: Engine, payload: Any
) -> None:
    session = sim.open().create_session()
    entry = IterationEntry(session, [300], input=a_frame(4, payload))
    with pytest.raises(HostCheckError, match="contiguous buffer"):
        session.prefill_chunk_frame([300], entry.input)
    with pytest.raises(HostCheckError, match=r"request 0: .* contiguous buffer"):
        iteration_batch_sampled([entry])
    with pytest.raises(HostCheckError, match="contiguous buffer"):
        session.import_full_state(0, 4, payload)
    assert session.position == 0


@pytest.mark.parametrize("number", [2**40, 1.5, "1"])
def test_numbers_that_are_no_32_bit_integers_never_reach_the_library(
    sim: Engine, number: Any
) -> None:
    model = sim.open()
    session = model.create_session()
    session.prefill_chunk_frame([300])
    for call in [
        session.decode_step_sampled,
        session.decode_step_sampled_mtp,
        session.decode_step_frame,
        session.decode_step_frame_sampled_mtp,
        session.logprobs,
        session.drop_sequence,
        model.is_eog,
        model.is_control,
        lambda value: session.export_full_state(0, value),
        lambda value: model.create_session_from_resident_prefix(value, [300]),
    ]:
        with pytest.raises(HostCheckError, match=r"is '?(1099511627776|1\.5|1)'?, but must"):
            call(number)
    assert session.token_count == session.position == 1


def test_impossible_sizes_are_refused_before_room_is_made_for_them(sim: Engine) -> None:
    stage = a_stage(sim, 0, 2)
    session = stage.create_session()
    for capacity in (-1, 2**60):
        with pytest.raises(HostCheckError, match="output_capacity"):
            session.prefill_chunk_frame([300], None, capacity)
    for top_count in (-1, 10**12):
        with pytest.raises(HostCheckError, match="top_count"):
            session.logprobs(300, top_count)
    session.prefill_chunk_frame([300])
    for token_count in (2**40, 2**62):
        with pytest.raises((InvalidArgument, NativeRuntimeError)):
            session.copy_output_activation_frame(token_count)
    with pytest.raises(HostCheckError, match="token_count"):
        session.copy_output_activation_frame(2**80)
