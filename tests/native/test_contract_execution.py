"""The rules of the C ABI on each engine: prefill, decode and verify of one session."""

from __future__ import annotations

from typing import Any

import pytest

from skippy_sched.native import (
    DecodeFrameBatchEntry,
    InvalidArgument,
    IterationEntry,
    SamplingConfig,
    Status,
    decode_step_frame_batch_sampled,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import ffi

from .conftest import SAMPLED, Engine, a_session, continuation, tokens_of
from .raw_calls import raw_status

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
