"""Stages: frames go from one to the next in one native call each, and give the whole's tokens."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from skippy_sched.native import (
    ActivationFrame,
    BufferTooSmall,
    DecodeFrameBatchEntry,
    HostCheckError,
    InvalidArgument,
    IterationEntry,
    Model,
    NativeRuntimeError,
    PartialBatchExecution,
    Phase,
    StageSession,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)

from .conftest import Engine, SimModel, a_stage, add_fault, tokens_of

PROMPT = [301, 302, 303, 304, 305]


def greedy_tokens(model: Model, prompt: list[int], count: int) -> list[int]:
    """What the whole model says, one session alone."""
    with model.create_session() as session:
        token, _ = session.prefill_chunk_frame_sampled(prompt)
        tokens = [token]
        while len(tokens) < count:
            token, _ = session.decode_step_frame(tokens[-1])
            tokens.append(token)
    return tokens


def count_calls(session: StageSession, name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The output capacity of each native call of this name."""
    capacities: list[int] = []
    inner = session.lib

    class Counting:
        def __getattr__(self, symbol: str) -> Any:
            call = getattr(inner, symbol)
            if symbol != name:
                return call

            def counted(*arguments: Any) -> Any:
                capacities.append(next(a for a in reversed(arguments) if isinstance(a, int)))
                return call(*arguments)

            return counted

    monkeypatch.setattr(session, "lib", Counting())
    return capacities


@pytest.mark.parametrize("cuts", [(2,), (2, 3)])
def test_a_pipeline_of_single_calls_says_what_the_whole_model_says(
    cut_engine: Engine, cuts: tuple[int, ...]
) -> None:
    edges = [0, *cuts, 4]
    stages = [a_stage(cut_engine, a, b) for a, b in pairwise(edges)]
    sessions = [stage.create_session() for stage in stages]
    expected = greedy_tokens(cut_engine.open(), PROMPT, 6)
    frame: ActivationFrame | None = None
    for session in sessions:
        token, frame = session.prefill_chunk_frame_sampled(PROMPT, None, frame)
    tokens = [token]
    while len(tokens) < 6:
        frame = None
        for session in sessions:
            token, frame = session.decode_step_frame(tokens[-1], frame)
        tokens.append(token)
    assert tokens == expected
    assert {session.token_count for session in sessions} == {len(PROMPT) + 5}


def test_a_pipeline_of_batches_says_what_the_whole_model_says(cut_engine: Engine) -> None:
    prompts = [tokens_of(cut_engine.open(), count, first=270 + count) for count in (3, 1, 7)]
    expected = [greedy_tokens(cut_engine.open(), prompt, 4) for prompt in prompts]
    stages = [a_stage(cut_engine, 0, 2), a_stage(cut_engine, 2, 4)]
    columns = [[stage.create_session() for stage in stages] for _ in prompts]
    said: list[list[int]] = [[] for _ in prompts]
    for step in range(4):
        fed = prompts if step == 0 else [tokens[-1:] for tokens in said]
        frames: list[ActivationFrame | None] = [None] * len(prompts)
        for stage in range(2):
            output = iteration_batch_sampled(
                [
                    IterationEntry(column[stage], tokens, (), None, frame)
                    for column, tokens, frame in zip(columns, fed, frames, strict=True)
                ]
            )
            frames = list(output.request_outputs)
        for index, token in output.samples:
            said[index].append(token)
    assert said == expected


def test_output_capacity_is_predicted_so_that_one_native_call_suffices(
    cut_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = a_stage(cut_engine, 0, 2).create_session()
    capacities = count_calls(session, "skippy_prefill_chunk_frame", monkeypatch)
    frame = session.prefill_chunk_frame(PROMPT)
    assert capacities == [len(PROMPT) * 4 * session.model.facts.n_embd]
    assert frame.desc.payload_bytes == len(frame.payload) == capacities[0]
    assert frame.part(0).shape == (len(PROMPT), session.model.facts.n_embd)


def test_a_short_prediction_is_answered_by_one_larger_call(
    cut_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = a_stage(cut_engine, 0, 2).create_session()
    capacities = count_calls(session, "skippy_prefill_chunk_frame", monkeypatch)
    frame = session.prefill_chunk_frame(PROMPT, output_capacity=0)
    assert capacities == [0, frame.desc.payload_bytes]
    assert session.token_count == session.position == len(PROMPT)


def test_parts_beyond_the_boundary_make_the_buffer_grow(sim: Engine, sim_model: SimModel) -> None:
    sim.path = sim_model(optional_part=True)
    frame = a_stage(sim, 0, 2).create_session().prefill_chunk_frame(PROMPT)
    assert [part.is_optional for part in frame.desc.parts()] == [False, True]
    assert frame.part(1).tolist() == [0, 1, 2, 3, 4]


def test_one_optional_part_makes_the_whole_batch_run_one_at_a_time(
    sim: Engine, sim_model: SimModel
) -> None:
    sim.path = sim_model(optional_part=True)
    first, last = a_stage(sim, 0, 2), a_stage(sim, 2, 4)
    columns = [(first.create_session(), last.create_session()) for _ in range(2)]
    frames = [source.prefill_chunk_frame(PROMPT) for source, _ in columns]
    add_fault(last, "call=iteration status=RUNTIME_ERROR")
    output = iteration_batch_sampled(
        [
            IterationEntry(target, PROMPT, (), None, frame, True, Phase.PREFILL)
            for (_, target), frame in zip(columns, frames, strict=True)
        ]
    )
    assert [sample.request_index for sample in output.samples] == [0, 1]
    assert [target.position for _, target in columns] == [len(PROMPT)] * 2


@pytest.mark.parametrize("entries", [1, 3])
def test_batched_exports_come_in_request_order_and_share_no_bytes(
    cut_engine: Engine, entries: int
) -> None:
    stage = a_stage(cut_engine, 0, 2)
    prompts = [tokens_of(stage, 2 + index, first=270 + index) for index in range(entries)]
    alone = []
    for prompt in prompts:
        with stage.create_session() as session:
            alone.append(session.prefill_chunk_frame(prompt))
    sessions = [stage.create_session() for _ in prompts]
    output = iteration_batch_sampled(
        [IterationEntry(s, p) for s, p in zip(sessions, prompts, strict=True)]
    )
    assert output.samples == []
    exact = stage.batch_invariant() is None
    for frame, expected in zip(output.request_outputs, alone, strict=True):
        assert frame.desc == expected.desc
        close = np.array_equal if exact else partial(np.allclose, rtol=0, atol=1e-2)
        assert close(frame.part(0), expected.part(0))
    kept = [frame.payload.copy() for frame in output.request_outputs]
    iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    for frame, payload in zip(output.request_outputs, kept, strict=True):
        assert np.array_equal(frame.payload, payload)


def test_rows_of_a_batch_that_are_too_small_grow_together(sim: Engine) -> None:
    stage = a_stage(sim, 0, 2)
    sessions = [stage.create_session() for _ in range(3)]
    add_fault(stage, "call=iteration effect=grow_buffer count=2")
    output = iteration_batch_sampled([IterationEntry(session, PROMPT) for session in sessions])
    sizes = {len(frame.payload) for frame in output.request_outputs}
    assert sizes == {len(PROMPT) * 4 * stage.facts.n_embd}
    assert [session.token_count for session in sessions] == [len(PROMPT)] * 3


@pytest.mark.parametrize("effect", ["grow_buffer", "grow_buffer_without_growth"])
@pytest.mark.parametrize("call", ["iteration", "decode", "decode batch", "prefill", "verify"])
def test_a_size_that_never_suffices_ends_in_an_error_and_moves_nothing(
    sim: Engine, effect: str, call: str
) -> None:
    model = sim.open()
    session = model.create_session()
    add_fault(model, f"call={call.split()[0]} effect={effect} count=0")
    calls: dict[str, Any] = {
        "iteration": lambda: iteration_batch_sampled([IterationEntry(session, [1])]),
        "decode": lambda: session.decode_step_frame(1),
        "decode batch": lambda: decode_step_frame_batch_sampled(
            [DecodeFrameBatchEntry(session, 1)]
        ),
        "prefill": lambda: session.prefill_chunk_frame([1]),
        "verify": lambda: session.verify_tokens_frame([1]),
    }
    with pytest.raises(BufferTooSmall, match="buffer"):
        calls[call]()
    assert session.token_count == session.position == 0


def test_a_damaged_row_is_refused_by_the_next_stage_and_moves_nothing(sim: Engine) -> None:
    frame = a_stage(sim, 0, 2).create_session().prefill_chunk_frame(PROMPT)
    frame.payload[len(frame.payload) // 2] ^= 1
    session = a_stage(sim, 2, 4).create_session()
    with pytest.raises(NativeRuntimeError, match="row"):
        session.prefill_chunk_frame_sampled(PROMPT, None, frame)
    assert session.token_count == session.position == 0


def test_a_payload_of_the_wrong_length_never_reaches_the_library(cut_engine: Engine) -> None:
    frame = a_stage(cut_engine, 0, 2).create_session().prefill_chunk_frame(PROMPT)
    short = ActivationFrame(frame.desc, frame.payload[:-1])
    session = a_stage(cut_engine, 2, 4).create_session()
    with pytest.raises(HostCheckError, match="payload length"):
        session.prefill_chunk_frame(PROMPT, short)
    with pytest.raises(HostCheckError, match="request 0: activation payload length"):
        iteration_batch_sampled([IterationEntry(session, PROMPT, (), None, short)])
    with pytest.raises(HostCheckError, match="payload length"):
        decode_step_frame_batch_sampled([DecodeFrameBatchEntry(session, 1, None, short)])
    assert session.token_count == session.position == 0


def test_the_last_exports_can_be_copied_again(cut_engine: Engine) -> None:
    session = a_stage(cut_engine, 0, 2).create_session()
    frame = session.prefill_chunk_frame(PROMPT)
    for capacity in (None, 0):
        copy = session.copy_output_activation_frame(len(PROMPT), capacity)
        assert np.array_equal(copy.payload, frame.payload)
    assert session.token_count == session.position == len(PROMPT)
    with pytest.raises(HostCheckError, match="at least one token"):
        session.copy_output_activation_frame(0)
    with pytest.raises(NativeRuntimeError):
        session.copy_output_activation_frame(len(PROMPT) + 1)


def test_a_terminal_stage_gives_empty_frames_that_say_who_made_them(cut_engine: Engine) -> None:
    model = cut_engine.open()
    sessions = [model.create_session() for _ in range(2)]
    output = iteration_batch_sampled([IterationEntry(session, PROMPT) for session in sessions])
    _, single = model.create_session().prefill_chunk_frame_sampled(PROMPT)
    iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    for frame in output.request_outputs:
        assert frame.is_empty
        assert frame.desc == single.desc
        assert frame.desc.token_count == len(PROMPT)
        assert len(frame.payload) == 0


def test_exporting_stages_predict_nothing_and_sample_nothing(cut_engine: Engine) -> None:
    session = a_stage(cut_engine, 0, 2).create_session()
    assert session.prefill_chunk_frame_sampled(PROMPT)[0] == -1
    assert session.decode_step_frame(300)[0] == -1
    outputs = decode_step_frame_batch_sampled([DecodeFrameBatchEntry(session, 300)])
    assert [output.predicted_token for output in outputs] == [-1]
    assert not outputs[0].output.is_empty
    assert session.token_count == session.position == len(PROMPT) + 2


def test_exports_that_do_not_fit_one_microbatch_fail_after_the_session_moved(sim: Engine) -> None:
    stage = a_stage(sim, 0, 2, n_batch=64, n_ubatch=4)
    session = stage.create_session()
    with pytest.raises(NativeRuntimeError):
        session.prefill_chunk_frame(PROMPT)
    assert (session.token_count, session.position) == (0, len(PROMPT))
    session.trim(session.token_count)
    assert session.position == 0
    with pytest.raises(InvalidArgument):
        iteration_batch_sampled([IterationEntry(session, PROMPT)])
    assert session.token_count == session.position == 0


@pytest.mark.parametrize("failing", range(4))
@pytest.mark.parametrize("when", ["before", "after"])
def test_partial_execution_keeps_the_results_before_the_failure(
    sim: Engine, sim_model: SimModel, failing: int, when: str
) -> None:
    sim.path = sim_model(recurrent=True)
    stage = a_stage(sim, 0, 2)
    sessions = [stage.create_session() for _ in range(4)]
    for session in sessions:
        session.prefill_chunk_frame(PROMPT)
    add_fault(stage, f"call=decode nth={failing + 1} status=RUNTIME_ERROR when={when}")
    entries = [IterationEntry(session, [300 + index]) for index, session in enumerate(sessions)]
    with pytest.raises(PartialBatchExecution) as caught:
        iteration_batch_sampled(entries)
    assert caught.value.executed == failing
    assert isinstance(caught.value.cause, NativeRuntimeError)
    assert len(caught.value.outputs.request_outputs) == failing
    assert all(not frame.is_empty for frame in caught.value.outputs.request_outputs)
    moved = [session.token_count - len(PROMPT) for session in sessions]
    assert moved == [1] * failing + [0] * (4 - failing)
    ambiguous = sessions[failing].position - sessions[failing].token_count
    assert ambiguous == (1 if when == "after" else 0)
    assert [s.position for s in sessions[failing + 1 :]] == [len(PROMPT)] * (3 - failing)


def test_partial_execution_of_a_decode_batch_keeps_its_results(
    sim: Engine, sim_model: SimModel
) -> None:
    sim.path = sim_model(recurrent=True)
    stage = a_stage(sim, 0, 2)
    sessions = [stage.create_session() for _ in range(3)]
    add_fault(stage, "call=decode nth=3 status=MODEL_ERROR")
    with pytest.raises(PartialBatchExecution, match=r"executed 2 request\(s\)") as caught:
        decode_step_frame_batch_sampled([DecodeFrameBatchEntry(s, 300) for s in sessions])
    assert [output.predicted_token for output in caught.value.outputs] == [-1, -1]
    assert [session.position for session in sessions] == [1, 1, 0]


def test_a_refused_serial_decode_is_a_partial_execution_of_none(
    sim: Engine, sim_model: SimModel
) -> None:
    """The check is part of running the entry, so the batch says how far it came."""
    sim.path = sim_model(recurrent=True)
    session = a_stage(sim, 0, 2).create_session()
    with pytest.raises(PartialBatchExecution) as caught:
        iteration_batch_sampled([IterationEntry(session, [300])])
    assert caught.value.executed == 0
    assert isinstance(caught.value.cause, HostCheckError)
    assert session.position == 0


def test_serial_prefills_honour_positions_and_sampling_choice(
    sim: Engine, sim_model: SimModel
) -> None:
    sim.path = sim_model(recurrent=True)
    first, last = a_stage(sim, 0, 2), a_stage(sim, 2, 4)
    source, target = first.create_session(), last.create_session()
    whole = greedy_tokens(sim.open(), PROMPT, 1)
    for sample_last, tokens, start in ((False, PROMPT[:3], 0), (True, PROMPT[3:], 3)):
        positions = list(range(start, start + len(tokens)))
        entry = IterationEntry(source, tokens, positions, None, None, sample_last, Phase.PREFILL)
        frame = iteration_batch_sampled([entry]).request_outputs[0]
        entry.session, entry.input = target, frame
        output = iteration_batch_sampled([entry])
    assert [sample.predicted_token for sample in output.samples] == whole
