"""What every engine owes the host: the rules and failure rows of the C ABI, on each engine.

Raw calls are used where the Python side cannot even ask the wrong question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from skippy_sched.native import (
    DecodeFrameBatchEntry,
    InvalidArgument,
    IterationEntry,
    Model,
    ModelError,
    NativeError,
    NativeRuntimeError,
    Phase,
    SamplingConfig,
    StageSession,
    Status,
    Unsupported,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import ffi

from .conftest import Engine, a_frame, tokens_of

SAMPLED = SamplingConfig(enabled=True, temperature=0.9, top_k=40, seed=11)
FIRST_PREFIX = 8  # twice the four lanes


def a_session(model: Model, tokens: int = 6) -> StageSession:
    session = model.create_session()
    if tokens:
        session.prefill_chunk_frame(tokens_of(model, tokens))
    return session


def continuation(session: StageSession, count: int = 5, first: int = 310) -> list[int]:
    """Greedy tokens from here on."""
    token = first
    said = []
    for _ in range(count):
        token, _ = session.decode_step_frame(token)
        said.append(token)
    return said


def raw_status(model: Model, call: str, *arguments: Any) -> Status:
    """The status of a raw call; its error object is there exactly when it failed, and says why."""
    slot = model.library.error_slot()
    status = Status(getattr(model.lib, call)(*arguments, slot.out))
    assert bool(slot.out[0]) == (status is not Status.OK)
    if status is not Status.OK:
        assert slot.out[0].status == status
        assert ffi.string(slot.out[0].message)
    slot.discard()
    return status


def raw_request(of: StageSession, tokens: Any, **changes: Any) -> tuple[Any, list[Any]]:
    """A one-row request array for a raw iteration, and what it points into."""
    requests = ffi.new("struct skippy_iteration_request[1]")
    row = requests[0]
    row.session, row.token_ids, row.token_count = of.raw, tokens, len(tokens)
    row.sample_last = True
    for name, value in changes.items():
        setattr(row, name, value)
    return requests, [tokens, changes]


def raw_iteration(model: Model, requests: Any, rows: int, **changes: Any) -> Status:
    payload = ffi.new("char[8]")
    out = {
        "descs": ffi.new("struct skippy_activation_desc[1]"),
        "payloads": ffi.new("void *[1]", [payload]),
        "capacities": ffi.new("size_t[1]"),
        "bytes": ffi.new("size_t[1]"),
        "indexes": ffi.new("size_t[1]"),
        "predicted": ffi.new("int32_t[1]"),
        "capacity": 1,
        "count": ffi.new("size_t *"),
    } | changes
    return raw_status(model, "skippy_iteration_batch_sampled", requests, rows, *out.values())


# ---- positions, counts, results ------------------------------------------------------------------


def test_every_form_of_prefill_and_decode_leads_to_the_same_tokens(engine: Engine) -> None:
    model = engine.open()
    prompt = tokens_of(model, 6)
    said = []
    for run in (
        lambda s: s.prefill_chunk(prompt),
        lambda s: s.prefill_chunk_frame(prompt),
        lambda s: s.prefill_chunk_frame_with_positions(prompt, range(6)),
        lambda s: s.prefill_chunk_frame_sampled(prompt),
        lambda s: s.prefill_chunk_frame_sampled_with_positions(prompt, range(6)),
        lambda s: [s.decode_step_sampled(token) for token in prompt],
        lambda s: [s.decode_step_sampled_mtp(token) for token in prompt],
        lambda s: [s.decode_step_frame_sampled_mtp(token) for token in prompt],
        lambda s: s.verify_tokens_frame(prompt),
        lambda s: s.verify_tokens(prompt),
        lambda s: iteration_batch_sampled([IterationEntry(s, prompt, range(6))]),
        lambda s: [
            decode_step_frame_batch_sampled([DecodeFrameBatchEntry(s, token)]) for token in prompt
        ],
    ):
        with model.create_session() as session:
            run(session)
            assert session.token_count == session.position == 6
            said.append(continuation(session, 3))
            assert session.token_count == session.position == 9
    assert all(tokens == said[0] for tokens in said)


def test_sampled_rows_repeat_with_their_seed_however_they_are_computed(engine: Engine) -> None:
    model = engine.open()
    prompt = tokens_of(model, 6)
    said: list[list[int]] = []
    for chunks in ([prompt], [prompt[:2], prompt[2:]]):
        with model.create_session() as session:
            for chunk in chunks[:-1]:
                session.prefill_chunk_frame(chunk)
            tokens = [session.prefill_chunk_frame_sampled(chunks[-1], SAMPLED)[0]]
            for _ in range(4):
                tokens.append(session.decode_step_frame_sampled(tokens[-1], SAMPLED)[0])
            said.append(tokens)
    assert said[0] == said[1]


def test_logit_bias_and_ignored_end_of_generation_are_obeyed(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    forced = SamplingConfig(enabled=True, temperature=0, logit_bias=((42, 1000.0),))
    assert session.decode_step_frame_sampled(300, forced)[0] == 42
    eos = model.facts.token_eos
    both = SamplingConfig(enabled=True, temperature=0, logit_bias=((eos, 20.0),), ignore_eos=True)
    assert session.decode_step_frame_sampled(300, both)[0] != eos


def test_lanes_do_not_see_each_other(engine: Engine) -> None:
    model = engine.open()
    with a_session(model) as session:
        alone = continuation(session)
    noise = model.create_session()
    session = a_session(model)
    said, token = [], 310
    for step in range(5):
        output = iteration_batch_sampled(
            [
                IterationEntry(noise, tokens_of(model, 3 + step), sample_last=False),
                IterationEntry(session, [token]),
            ]
        )
        ((index, token),) = output.samples
        assert index == 1
        said.append(token)
    if model.batch_invariant() is None:
        assert said == alone
    assert session.position == 11


# ---- frames on a full model (6.2, 6.3) -----------------------------------------------------------


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


# ---- prefill and decode (6.8, 6.9) ---------------------------------------------------------------


def test_prefill_without_tokens_is_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    for call in (
        lambda: session.prefill_chunk_frame([]),
        lambda: session.prefill_chunk_frame_sampled([]),
        lambda: session.prefill_chunk([]),
    ):
        with pytest.raises(InvalidArgument):
            call()
    desc, payload, written = (
        ffi.new("struct skippy_activation_desc *"),
        ffi.new("char[8]"),
        ffi.new("size_t *"),
    )
    frame = (ffi.NULL, ffi.NULL, desc, payload, 0, written)
    status = raw_status(model, "skippy_prefill_chunk_frame", session.raw, ffi.NULL, 1, *frame)
    assert status is Status.INVALID_ARGUMENT
    assert session.token_count == session.position == 6


def test_a_decode_whose_prediction_is_not_wanted_still_moves(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    desc, payload, written = (
        ffi.new("struct skippy_activation_desc *"),
        ffi.new("char[8]"),
        ffi.new("size_t *"),
    )
    frame = (ffi.NULL, ffi.NULL, desc, payload, 0, written)
    status = raw_status(
        model, "skippy_decode_step_frame_sampled", session.raw, 300, ffi.NULL, *frame, ffi.NULL
    )
    assert status is Status.OK
    assert session.position == 7


def test_without_draft_heads_there_is_no_draft_and_no_error(engine: Engine) -> None:
    session = a_session(engine.open())
    assert session.decode_step_frame_sampled_mtp(300, max_draft_tokens=8)[1] is None
    assert session.decode_step_sampled_mtp(300, max_draft_tokens=8)[1] is None
    assert session.verify_tokens_sampled_mtp([300, 301], max_draft_tokens=8)[1] is None
    assert session.token_count == session.position == 10


# ---- verify (6.10, 6.14) -------------------------------------------------------------------------


def test_verify_says_what_decoding_says_and_can_be_taken_back(engine: Engine) -> None:
    model = engine.open()
    with a_session(model) as session:
        said = continuation(session, 4)
    session = a_session(model)
    proposed = [310, *said[:2], (said[2] + 1) % 300]
    predicted, draft, frame = session.verify_tokens_frame(proposed)
    assert predicted[:3] == said[:3]
    assert len(predicted) == 4
    assert draft is None
    assert frame.is_empty
    assert session.token_count == session.position == 10
    session.trim(9)
    assert session.token_count == session.position == 9
    assert session.decode_step_frame(said[2])[0] == said[3]


def test_a_window_accepted_whole_is_retired(engine: Engine) -> None:
    model = engine.open()
    with a_session(model) as session:
        said = continuation(session, 5)
    session = a_session(model)
    assert session.verify_tokens_sampled_without_mtp([310, *said[:3]]) == said[:4]
    session.retire_verify_checkpoint(6, 4)
    assert session.token_count == session.position == 10
    assert session.decode_step_frame(said[3])[0] == said[4]


def test_a_sampled_verify_stops_at_its_first_mismatch_but_moves_over_all(engine: Engine) -> None:
    session = a_session(engine.open())
    first = session.decode_step_frame_sampled(310, SAMPLED)[0]
    session.trim(6)
    wrong = 300 if first != 300 else 301
    predicted = session.verify_tokens_sampled_without_mtp([310, wrong, wrong, wrong], SAMPLED)
    assert predicted == [first]
    assert session.token_count == session.position == 10


def test_verify_of_nothing_makes_no_call_and_framed_verify_refuses_it(engine: Engine) -> None:
    session = a_session(engine.open())
    assert session.verify_tokens([]) == []
    assert session.verify_tokens_sampled_mtp([]) == ([], None)
    assert session.verify_tokens_sampled_without_mtp([]) == []
    with pytest.raises(ValueError, match="at least one token"):
        session.verify_tokens_frame([])
    assert session.position == 6


def test_raw_verify_without_room_for_its_answer_executes_nothing(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    tokens, out = ffi.new("int32_t[]", [300, 301]), ffi.new("int32_t[2]")
    desc, payload = ffi.new("struct skippy_activation_desc *"), ffi.new("char[8]")
    written, count = ffi.new("size_t *"), ffi.new("size_t *")

    def call(tokens_count: int, out: Any, capacity: int, count: Any) -> Status:
        return raw_status(
            model, "skippy_verify_tokens_frame_sampled", session.raw, tokens, tokens_count,
            ffi.NULL, ffi.NULL, ffi.NULL, desc, payload, 0, written, out, capacity, count, 0,
            ffi.NULL,
        )  # fmt: skip

    assert call(0, out, 2, count) is Status.INVALID_ARGUMENT
    assert call(2, out, 2, ffi.NULL) is Status.INVALID_ARGUMENT
    assert call(2, out, 1, count) is Status.BUFFER_TOO_SMALL
    assert call(2, ffi.NULL, 2, count) is Status.BUFFER_TOO_SMALL
    assert session.position == 6
    assert call(2, out, 2, count) is Status.OK
    assert (session.position, count[0]) == (8, 2)


# ---- copy, sample current, signals (6.11, 6.12, 7) -----------------------------------------------


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


# ---- state (6.17) --------------------------------------------------------------------------------


def test_a_full_state_carries_a_session_elsewhere(engine: Engine) -> None:
    model = engine.open()
    layers = (0, model.facts.n_layer)
    session = a_session(model)
    state = session.export_full_state(*layers)
    expected = continuation(session, 3)
    other = model.create_session()
    other.import_full_state(*layers, state)
    assert other.token_count == other.position == 6
    assert continuation(other, 3) == expected


def test_state_of_another_layer_range_is_refused(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    layers = model.facts.n_layer
    state = session.export_full_state(0, layers)
    for start, end in ((0, layers - 1), (1, layers), (0, layers + 1)):
        with pytest.raises(InvalidArgument):
            session.export_full_state(start, end)
        with pytest.raises(InvalidArgument):
            session.import_full_state(start, end, state)
        with pytest.raises(InvalidArgument):
            session.export_state(start, end)
    assert session.token_count == session.position == 6


def test_a_partial_state_is_exported_and_taken_back(engine: Engine) -> None:
    """What is neither recurrent nor windowed may well be nothing; the position never falls."""
    model = engine.open()
    layers = (0, model.facts.n_layer)
    session = a_session(model)
    state = session.export_state(*layers)
    expected = continuation(session, 2)
    session.trim(6)
    try:
        session.import_state(*layers, state)
    except (InvalidArgument, NativeRuntimeError, Unsupported):
        assert len(state) == 0
    assert session.token_count == session.position == 6
    assert continuation(session, 2) == expected


def test_a_damaged_state_is_refused(engine: Engine) -> None:
    model = engine.open()
    state = a_session(model).export_full_state(0, model.facts.n_layer)
    other = model.create_session()
    with pytest.raises(NativeError):
        other.import_full_state(0, model.facts.n_layer, state[: len(state) // 2])
    assert other.token_count == 0
    other.reset()
    assert other.position == 0


def test_a_buffer_too_small_for_a_state_names_the_size(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    size = len(session.export_full_state(0, model.facts.n_layer))
    needed, small = ffi.new("size_t *"), ffi.new("char[1]")
    for buffer, capacity in ((ffi.NULL, 0), (small, 1)):
        status = raw_status(
            model, "skippy_export_full_state", session.raw, 0, model.facts.n_layer, buffer,
            capacity, needed,
        )  # fmt: skip
        assert status is Status.BUFFER_TOO_SMALL
        assert needed[0] == size


def test_models_without_recurrent_memory_have_no_recurrent_state(engine: Engine) -> None:
    session = a_session(engine.open())
    assert len(session.export_recurrent_state()) == 0
    with pytest.raises(Unsupported):
        session.import_recurrent_state(b"\x01")
    assert session.token_count == session.position == 6


def test_kv_pages_carry_rows_or_are_unsupported(engine: Engine) -> None:
    model = engine.open()
    layers = (0, model.facts.n_layer)
    session = a_session(model)
    try:
        page = session.export_kv_page(*layers, 0, 6)
    except Unsupported:
        return
    assert (page.desc.token_start, page.desc.token_count) == (0, 6)
    assert page.desc.payload_bytes == len(page.payload)
    expected = continuation(session, 3)
    other = model.create_session()
    other.import_kv_page(page)
    assert other.token_count == other.position == 6
    assert continuation(other, 3) == expected


# ---- tokenizer, opening (4.3, 6.19) --------------------------------------------------------------


def test_tokenizer_buffers_name_their_size(engine: Engine) -> None:
    model = engine.open()
    tokens = model.tokenize("one two three", add_special=False)
    needed = ffi.new("size_t *")
    small = ffi.new("int32_t[1]")
    status = raw_status(
        model, "skippy_tokenize", model.raw, b"one two three", False, small, 1, needed
    )
    assert (status, needed[0]) == (Status.BUFFER_TOO_SMALL, len(tokens))
    ids, byte = ffi.new("int32_t[]", tokens), ffi.new("char[1]")
    status = raw_status(model, "skippy_detokenize", model.raw, ids, len(tokens), byte, 1, needed)
    assert (status, needed[0]) == (Status.BUFFER_TOO_SMALL, 13)
    assert model.detokenize(tokens) == b"one two three"


def test_tokens_outside_the_vocabulary_have_no_text(engine: Engine) -> None:
    model = engine.open()
    for token in (-1, model.facts.n_vocab):
        with pytest.raises(NativeError):
            model.detokenize([token])


@pytest.mark.parametrize("content", [b"", b"\x00" * 4096, bytes(range(256)) * 64])
def test_files_that_are_no_model_are_model_errors(
    engine: Engine, tmp_path: Any, content: bytes
) -> None:
    path = tmp_path / "noise.bin"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        engine.open(path)
    with pytest.raises(ModelError):
        engine.open(tmp_path / "missing.bin")


def test_a_truncated_model_is_a_model_error(engine: Engine, tmp_path: Any) -> None:
    if engine.name == "sim":
        pytest.skip("a specification cut short is another specification")
    path = tmp_path / "cut.gguf"
    with engine.path.open("rb") as source:
        path.write_bytes(source.read(1 << 20))
    with pytest.raises(ModelError):
        engine.open(path)


def test_impossible_options_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument):
        engine.open(device="no such device")
    with pytest.raises(InvalidArgument):
        engine.open(ctx_size=2**30, lanes=2**10)
    with pytest.raises((InvalidArgument, Unsupported)):
        engine.open(layer_start=1, layer_end=2)


def test_phases_are_the_hosts_own_matter(engine: Engine) -> None:
    """A one-token prefill tail and a decode of that token are the same native row."""
    model = engine.open()
    said = []
    for phase in Phase:
        with a_session(model) as session:
            output = iteration_batch_sampled([IterationEntry(session, [310], phase=phase)])
            said.append(output.samples)
    assert said[0] == said[1]


def test_payloads_given_to_imports_may_be_any_buffer(engine: Engine) -> None:
    model = engine.open()
    layers = (0, model.facts.n_layer)
    state = a_session(model).export_full_state(*layers)
    assert isinstance(state, np.ndarray)
    for payload in (state.tobytes(), bytearray(state.tobytes()), state):
        with model.create_session() as session:
            session.import_full_state(*layers, payload)
            assert session.position == 6
