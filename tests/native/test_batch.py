"""The batch calls on whole models: results, counts, reuse, and faults of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skippy_sched.native import (
    ClosedError,
    CountOverflow,
    DecodeFrameBatchEntry,
    DecodeRows,
    HostCheckError,
    InvalidArgument,
    IterationBatch,
    IterationEntry,
    Model,
    NativeAnswerError,
    NativeError,
    NativeRuntimeError,
    Phase,
    SamplingConfig,
    StageSession,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)

from .conftest import Engine, add_fault, as_array, live_objects, tokens_of


def sessions_of(model: Model, count: int, prompt: int = 3) -> list[StageSession]:
    """Sessions with different prompts of so many tokens."""
    sessions = [model.create_session() for _ in range(count)]
    for index, session in enumerate(sessions):
        if prompt:
            session.prefill_chunk_frame(tokens_of(model, prompt, first=270 + index))
    return sessions


def counts(sessions: list[StageSession]) -> list[tuple[int, int]]:
    return [(session.token_count, session.position) for session in sessions]


def test_no_entries_make_no_native_call(sim: Engine) -> None:
    model = sim.open()
    add_fault(model, "call=any effect=abort")
    assert iteration_batch_sampled([]).samples == []
    assert model.batch.run([]).request_outputs == []
    assert decode_step_frame_batch_sampled([]) == []


def test_prefill_chunks_and_decodes_mix_in_one_call_with_sparse_samples(sim: Engine) -> None:
    model = sim.open()
    sessions = sessions_of(model, 3)
    alone = sessions_of(sim.open(), 3)
    add_fault(model, "call=iteration nth=2 status=RUNTIME_ERROR")
    prompt = tokens_of(model, 9)
    output = iteration_batch_sampled(
        [
            IterationEntry(sessions[0], [300]),
            IterationEntry(sessions[1], prompt, sample_last=False, phase=Phase.PREFILL),
            IterationEntry(sessions[2], as_array([301, 302])),
        ]
    )
    assert output.samples == [
        (0, alone[0].decode_step_frame(300)[0]),
        (2, alone[2].prefill_chunk_frame_sampled([301, 302])[0]),
    ]
    assert counts(sessions) == [(4, 4), (12, 12), (5, 5)]


def test_the_same_arrays_serve_batches_of_any_shape(sim: Engine) -> None:
    """Nothing of one call is left over in the next: sizes, positions, sampling, long rows."""
    model = sim.open(lanes=100, n_batch=512)
    batch = IterationBatch(sim.library)
    expected: dict[StageSession, int] = {}
    sampled = SamplingConfig(enabled=True, temperature=1, seed=5)
    shapes: list[list[int]] = [[1], [3, 1], [1] * 100, [64, 1, 64], [1, 2], [1] * 70]
    sessions = sessions_of(model, 100, prompt=0)
    for shape in shapes:
        entries = []
        for session, length in zip(sessions, shape, strict=False):
            start = session.token_count
            explicit = range(start, start + length) if length == 2 else ()
            entries.append(
                IterationEntry(
                    session,
                    tokens_of(model, length),
                    explicit,
                    sampled if length == 3 else None,
                    sample_last=length != 64,
                )
            )
            expected[session] = start + length
        output = batch.run(entries)
        assert len(output.samples) == sum(length != 64 for length in shape)
        assert len(output.request_outputs) == len(shape)
    assert all(s.token_count == s.position == n for s, n in expected.items())


def test_batched_rows_say_what_they_say_alone(sim: Engine) -> None:
    model, other = sim.open(lanes=8), sim.open(lanes=8)
    sampling = [None, SamplingConfig(enabled=True, temperature=0.8, seed=3)]
    together, alone = sessions_of(model, 8), sessions_of(other, 8)
    tokens = [300 + index for index in range(8)]
    for _ in range(5):
        output = iteration_batch_sampled(
            [
                IterationEntry(session, [token], (), sampling[index % 2])
                for index, (session, token) in enumerate(zip(together, tokens, strict=True))
            ]
        )
        singles = [
            session.decode_step_frame_sampled(token, sampling[index % 2])[0]
            for index, (session, token) in enumerate(zip(alone, tokens, strict=True))
        ]
        tokens = [sample.predicted_token for sample in output.samples]
        assert tokens == singles


def test_the_decode_batch_says_what_the_iteration_batch_says(sim: Engine) -> None:
    model, other = sim.open(), sim.open()
    output = iteration_batch_sampled([IterationEntry(s, [300]) for s in sessions_of(model, 4)])
    sessions = sessions_of(other, 4)
    decoded = decode_step_frame_batch_sampled([DecodeFrameBatchEntry(s, 300) for s in sessions])
    assert [d.predicted_token for d in decoded] == [s.predicted_token for s in output.samples]
    assert all(d.output.is_empty for d in decoded)
    assert counts(sessions) == [(4, 4)] * 4


@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_a_failed_batch_moves_no_count_and_positions_tell_the_truth(sim: Engine, when: str) -> None:
    model = sim.open()
    sessions = sessions_of(model, 4)
    add_fault(model, f"call=iteration status=RUNTIME_ERROR when={when}")
    with pytest.raises(NativeRuntimeError, match="iteration"):
        iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    moved = {"before": 0, "middle": 2, "after": 4}[when]
    assert counts(sessions) == [(3, 4)] * moved + [(3, 3)] * (4 - moved)
    for session in sessions:
        session.trim(session.token_count)
    iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    assert counts(sessions) == [(4, 4)] * 4


@pytest.mark.parametrize("effect", ["wrong_count", "duplicate_index", "index_out_of_range"])
def test_impossible_samples_are_refused_and_move_no_count(sim: Engine, effect: str) -> None:
    model = sim.open()
    sessions = sessions_of(model, 3)
    add_fault(model, f"call=iteration effect={effect}")
    with pytest.raises(NativeAnswerError):
        iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    assert counts(sessions) == [(3, 4)] * 3


def test_missing_samples_and_a_wrong_position_can_be_seen(sim: Engine) -> None:
    """What this layer does not refuse, it shows: fewer samples, positions off."""
    model = sim.open()
    sessions = sessions_of(model, 3)
    add_fault(model, "call=iteration effect=fewer_samples index=1")
    add_fault(model, "call=iteration nth=1 effect=position_off_by_one index=2")
    output = iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    assert [sample.request_index for sample in output.samples] == [0, 2]
    iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
    assert [session.position - session.token_count for session in sessions] == [0, 0, 1]


def test_all_counts_are_checked_before_the_call(sim: Engine) -> None:
    """A count at its limit stops the whole batch: no session moves, here or natively."""
    sessions = sessions_of(sim.open(), 2)
    sessions[1].token_count = 2**64 - 1
    for call in (
        lambda: iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions]),
        lambda: decode_step_frame_batch_sampled(
            [DecodeFrameBatchEntry(session, 300) for session in sessions]
        ),
        lambda: sessions[1].decode_step_frame(300),
        lambda: sessions[1].prefill_chunk_frame([300]),
        lambda: sessions[1].verify_tokens_frame([300]),
    ):
        with pytest.raises(CountOverflow):
            call()
    assert [session.position for session in sessions] == [3, 3]
    assert sessions[0].token_count == 3


def test_the_guilty_row_is_named(sim: Engine) -> None:
    model = sim.open()
    sessions = sessions_of(model, 2)
    bad = SamplingConfig(enabled=True, penalty_last_n=-5)
    with pytest.raises(HostCheckError, match=r"request 1: sampling\.penalty_last_n"):
        iteration_batch_sampled(
            [IterationEntry(sessions[0], [1]), IterationEntry(sessions[1], [1], (), bad)]
        )
    sessions[1].close()
    with pytest.raises(ClosedError, match="request 1"):
        iteration_batch_sampled([IterationEntry(session, [1]) for session in sessions])
    with pytest.raises(ClosedError, match="request 1"):
        decode_step_frame_batch_sampled([DecodeFrameBatchEntry(s, 1) for s in sessions])
    assert sessions[0].position == 3


@pytest.mark.parametrize(
    "tokens",
    [
        [2**31],
        [1, 2**31],
        [-(2**31) - 1],
        np.array([2**40]),
        np.array([1, 2**40]),
        ["x"],
        ["5"],
        [1, None],
        [1.5],
        [1, 2.5],
        [[1, 2]],
        np.array([1.5, 2.5]),
        np.array([[1, 2], [3, 4]], dtype=np.int32),
    ],
)
def test_tokens_that_are_no_32_bit_integers_never_reach_the_library(
    sim: Engine, tokens: Any
) -> None:
    session = sim.open().create_session()
    with pytest.raises(HostCheckError, match="32-bit"):
        iteration_batch_sampled([IterationEntry(session, tokens)])
    with pytest.raises(HostCheckError, match="32-bit"):
        session.prefill_chunk_frame(tokens)
    assert session.position == 0


def test_a_row_without_tokens_is_left_to_the_library_to_refuse(sim: Engine) -> None:
    session, other = sessions_of(sim.open(), 2)
    with pytest.raises(InvalidArgument, match="token_count is 0"):
        iteration_batch_sampled([IterationEntry(session, []), IterationEntry(other, [1, 2])])
    assert counts([session, other]) == [(3, 3)] * 2


def test_the_reusable_batch_of_a_model_is_one(sim: Engine) -> None:
    model = sim.open()
    assert model.batch is model.batch


def test_errors_are_freed_also_when_there_is_none(sim: Engine) -> None:
    model = sim.open()
    sessions = sessions_of(model, 2)
    before = live_objects(sim.library)
    for rule in (
        "call=iteration status=RUNTIME_ERROR",
        "call=iteration effect=no_error_object",
        "call=iteration effect=grow_buffer count=3",
        "call=iteration effect=grow_buffer_without_growth",
    ):
        add_fault(model, rule)
        try:
            iteration_batch_sampled([IterationEntry(session, [300]) for session in sessions])
        except NativeError as error:
            assert str(error).startswith("skippy_iteration_batch_sampled: ")  # noqa: PT017
    assert live_objects(sim.library) == before


def test_an_error_without_an_object_still_says_its_status(sim: Engine) -> None:
    model = sim.open()
    add_fault(model, "call=decode effect=no_error_object")
    with pytest.raises(NativeRuntimeError, match="RuntimeError: the library gave no message"):
        model.create_session().decode_step_frame(1)


def test_kept_decode_rows_say_what_ordinary_entries_say(sim: Engine) -> None:
    model, other = sim.open(), sim.open()
    kept, plain = sessions_of(model, 3), sessions_of(other, 3)
    rows = DecodeRows(kept, [None] * 3)
    chunk = tokens_of(model, 5)
    for tokens in ([261, 262, 263], [264, 265, 266]):
        late, late_plain = model.create_session(), other.create_session()
        got = model.batch.run_with_decodes(
            rows, tokens, [IterationEntry(late, chunk, sample_last=False, phase=Phase.PREFILL)]
        )
        entries = [IterationEntry(s, [t]) for s, t in zip(plain, tokens, strict=True)]
        entries.append(IterationEntry(late_plain, chunk, sample_last=False, phase=Phase.PREFILL))
        expected = iteration_batch_sampled(entries).samples
        assert got == [sample.predicted_token for sample in expected] + [-1]
        assert counts([*kept, late]) == counts([*plain, late_plain])
        late.close()
        late_plain.close()


def test_kept_decode_rows_refuse_a_session_that_was_closed_since(sim: Engine) -> None:
    model = sim.open()
    sessions = sessions_of(model, 3)
    rows = DecodeRows(sessions, [None] * 3)
    model.batch.run_with_decodes(rows, [261, 262, 263], [])
    sessions[1].close()
    add_fault(model, "call=iteration effect=abort")
    with pytest.raises(ClosedError, match="request 1"):
        model.batch.run_with_decodes(rows, [264, 265, 266], [])
    assert counts([sessions[0], sessions[2]]) == [(4, 4), (4, 4)]
