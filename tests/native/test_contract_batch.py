"""The rules of the C ABI on each engine: many sessions in one call."""

from __future__ import annotations

from typing import Any

import pytest

from skippy_sched.native import (
    InvalidArgument,
    IterationEntry,
    NativeError,
    NativeRuntimeError,
    Phase,
    Status,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import ffi

from .conftest import Engine, a_session, continuation, tokens_of
from .raw_calls import raw_iteration, raw_request, raw_status

# ---- the iteration batch (6.5, 6.18) -------------------------------------------------------------


def test_raw_iterations_without_their_parts_are_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    ids = ffi.new("int32_t[]", [300])
    requests, _keep = raw_request(session, ids)
    assert raw_iteration(model, ffi.NULL, 1) is Status.INVALID_ARGUMENT
    assert raw_iteration(model, requests, 0) is Status.INVALID_ARGUMENT
    assert raw_iteration(model, requests, 1, count=ffi.NULL) is Status.INVALID_ARGUMENT
    assert raw_iteration(model, requests, 1, capacity=0) is Status.BUFFER_TOO_SMALL
    assert raw_iteration(model, requests, 1, predicted=ffi.NULL) is Status.BUFFER_TOO_SMALL
    assert raw_iteration(model, requests, 1, indexes=ffi.NULL) is Status.BUFFER_TOO_SMALL
    for changes in (
        {"session": ffi.NULL},
        {"token_ids": ffi.NULL},
        {"token_count": 0},
        {"position_count": 1},
        {"positions": ids, "position_count": 0},
        {"positions": ids, "position_count": 2},
    ):
        requests, _keep = raw_request(session, ids, **changes)
        assert raw_iteration(model, requests, 1) is Status.INVALID_ARGUMENT, changes
    assert session.position == 6
    requests, _keep = raw_request(session, ids)
    assert raw_iteration(model, requests, 1) is Status.OK
    assert session.position == 7


def test_a_session_twice_or_of_another_model_is_refused(engine: Engine) -> None:
    model = engine.open()
    one, two = a_session(model), a_session(engine.open())
    for entries in (
        [IterationEntry(one, [300]), IterationEntry(one, [301])],
        [IterationEntry(one, [300]), IterationEntry(two, [301])],
    ):
        with pytest.raises(InvalidArgument):
            iteration_batch_sampled(entries)
    assert one.token_count == one.position == two.position == 6


@pytest.mark.parametrize("positions", [[5], [7], [6, 7], [-1]])
def test_positions_other_than_the_next_ones_are_refused(
    engine: Engine, positions: list[int]
) -> None:
    session = a_session(engine.open())
    with pytest.raises(InvalidArgument):
        iteration_batch_sampled([IterationEntry(session, [300], positions)])
    assert session.token_count == session.position == 6


def test_what_would_abort_a_decode_is_refused_before_it(engine: Engine) -> None:
    """More tokens than a batch or a lane holds, and tokens outside the vocabulary."""
    model = engine.open(ctx_size=256, n_batch=256, n_ubatch=64)
    small = engine.open(ctx_size=256, n_batch=32, n_ubatch=32)
    cases = [
        (a_session(small), tokens_of(small, 33)),
        (a_session(model, 100), tokens_of(model, model.facts.ctx_size - 99)),
        (a_session(model), [300, model.facts.n_vocab]),
        (a_session(model), [300, -1]),
    ]
    for session, tokens in cases:
        before = session.position
        for call in (
            lambda s, t: iteration_batch_sampled([IterationEntry(s, t)]),
            lambda s, t: s.prefill_chunk_frame(t),
            lambda s, t: s.verify_tokens_frame(t),
        ):
            with pytest.raises((InvalidArgument, NativeRuntimeError)):
                call(session, tokens)
            assert session.token_count == session.position == before
        assert len(continuation(session, 2)) == 2


def test_one_bad_row_moves_no_session_of_the_batch(engine: Engine) -> None:
    model = engine.open()
    sessions = [a_session(model) for _ in range(3)]
    entries = [IterationEntry(session, [300]) for session in sessions]
    entries[1].token_ids = [model.facts.n_vocab + 5]
    with pytest.raises(NativeError):
        iteration_batch_sampled(entries)
    assert [session.position for session in sessions] == [6, 6, 6]


def test_samples_are_for_the_rows_that_ask_for_one(engine: Engine) -> None:
    model = engine.open()
    sessions = [a_session(model, 0) for _ in range(4)]
    output = iteration_batch_sampled(
        [
            IterationEntry(session, tokens_of(model, 2 + i), (), None, None, i % 2 == 1)
            for i, session in enumerate(sessions)
        ]
    )
    assert [sample.request_index for sample in output.samples] == [1, 3]
    assert all(0 <= sample.predicted_token < model.facts.n_vocab for sample in output.samples)
    assert [session.position for session in sessions] == [2, 3, 4, 5]


def test_a_full_pool_refuses_a_batch_and_changes_nothing(engine: Engine) -> None:
    model = engine.open(kv_unified=True, ctx_size=128, lanes=2, n_batch=128)
    one, two = model.create_session(), model.create_session()
    while one.position + 64 < model.facts.pool_cells:
        one.prefill_chunk_frame(tokens_of(model, 32))
    filled, left = one.position, model.facts.pool_cells - one.position
    with pytest.raises(NativeRuntimeError):
        iteration_batch_sampled(
            [
                IterationEntry(one, tokens_of(model, left // 2)),
                IterationEntry(two, tokens_of(model, left - left // 2 + 1)),
            ]
        )
    assert [one.token_count, two.token_count] == [one.position, two.position] == [filled, 0]
    iteration_batch_sampled(
        [
            IterationEntry(one, tokens_of(model, left // 2)),
            IterationEntry(two, tokens_of(model, left - left // 2)),
        ]
    )
    assert one.position + two.position == model.facts.pool_cells


def test_a_token_count_beyond_32_bits_is_refused_unread(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    for count in (2**31, 2**63, 2**64 - 1):
        requests, _keep = raw_request(session, ffi.new("int32_t[]", [300]), token_count=count)
        assert raw_iteration(model, requests, 1) is Status.INVALID_ARGUMENT
    assert session.position == 6


# ---- the decode batch (6.7) ----------------------------------------------------------------------


def test_raw_decode_batches_without_their_parts_are_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    handles = ffi.new("struct skippy_session *[1]", [session.raw])
    tokens, predicted = ffi.new("int32_t[]", [300]), ffi.new("int32_t[1]")
    descs = ffi.new("struct skippy_activation_desc[1]")
    payload = ffi.new("char[8]")
    payloads = ffi.new("void *[1]", [payload])
    sizes, written = ffi.new("size_t[1]"), ffi.new("size_t[1]")

    def call(handles: Any, tokens: Any, predicted: Any, capacity: int, count: int) -> Status:
        return raw_status(
            model, "skippy_decode_step_frame_batch_sampled", handles, tokens, ffi.NULL, ffi.NULL,
            ffi.NULL, descs, payloads, sizes, written, predicted, capacity, count,
        )  # fmt: skip

    assert call(ffi.NULL, tokens, predicted, 1, 1) is Status.INVALID_ARGUMENT
    assert call(handles, ffi.NULL, predicted, 1, 1) is Status.INVALID_ARGUMENT
    assert call(handles, tokens, ffi.NULL, 1, 1) is Status.INVALID_ARGUMENT
    assert call(handles, tokens, predicted, 1, 0) is Status.INVALID_ARGUMENT
    assert call(handles, tokens, predicted, 0, 1) is Status.BUFFER_TOO_SMALL
    assert session.position == 6
    assert call(handles, tokens, predicted, 1, 1) is Status.OK
    assert session.position == 7


def test_phases_are_the_hosts_own_matter(engine: Engine) -> None:
    """A one-token prefill tail and a decode of that token are the same native row."""
    model = engine.open()
    said = []
    for phase in Phase:
        with a_session(model) as session:
            output = iteration_batch_sampled([IterationEntry(session, [310], phase=phase)])
            said.append(output.samples)
    assert said[0] == said[1]
