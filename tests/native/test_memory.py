"""Recurrent memory, checkpoints, shared pools, drafts: what only some models have."""

from __future__ import annotations

import contextlib

import pytest

from skippy_sched.native import (
    BufferTooSmall,
    InvalidArgument,
    IterationEntry,
    NativeMtpDraft,
    NativeRuntimeError,
    StageSession,
    Unsupported,
    iteration_batch_sampled,
)
from skippy_sched.native.cdef import MAX_VERIFY_CHECKPOINTS, ffi

from .conftest import Engine, SimModel, a_stage, add_fault

PROMPT = [301, 302, 303, 304]


def a_draft(**values: object) -> NativeMtpDraft | None:
    given = {"version": 1, "available": True, "token_count": 3, "token_ids": list(range(8))}
    raw = ffi.new("struct skippy_native_mtp_draft *", given | {"proposal_compute_us": 5} | values)
    return NativeMtpDraft.of(raw)


def test_a_draft_is_none_unless_available_of_version_1_and_not_empty() -> None:
    assert a_draft() == NativeMtpDraft((0, 1, 2), 5)
    assert a_draft(available=False) is None
    assert a_draft(version=2) is None
    assert a_draft(token_count=0) is None
    assert a_draft(token_count=-1) is None


def test_a_draft_is_clamped_to_what_its_structure_holds() -> None:
    assert a_draft(token_count=12) == NativeMtpDraft(tuple(range(8)), 5)


def test_drafts_are_asked_for_within_the_bound(
    sim: Engine, sim_model: SimModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sim.open(sim_model(mtp_heads=8)).create_session()
    asked: list[int] = []
    inner = session.lib

    class Watched:
        def __getattr__(self, name: str) -> object:
            call = getattr(inner, name)

            def watched(*arguments: object) -> object:
                asked.append(arguments[-3])  # type: ignore[arg-type]
                return call(*arguments)

            return watched

    monkeypatch.setattr(session, "lib", Watched())
    for wish in (0, 8, 9, 10**6, -1):
        session.decode_step_frame_sampled_mtp(300, max_draft_tokens=wish)
        session.verify_tokens_sampled_mtp([300], max_draft_tokens=wish)
        session.decode_step_sampled_mtp(300, max_draft_tokens=wish)
    assert asked == [0] * 3 + [8] * 9 + [0] * 3


def test_native_drafts_are_what_decoding_then_says(sim: Engine, sim_model: SimModel) -> None:
    session = sim.open(sim_model(mtp_heads=3)).create_session()
    token, draft, _ = session.decode_step_frame_sampled_mtp(300, max_draft_tokens=8)
    assert draft is not None
    assert len(draft.token_ids) == 3
    predicted, after = session.verify_tokens_sampled_mtp([token, *draft.token_ids], None, 2)
    assert tuple(predicted[:3]) == draft.token_ids
    assert after is not None
    assert len(after.token_ids) == 2


def test_a_wrong_draft_is_found_and_leaves_no_draft(sim: Engine, sim_model: SimModel) -> None:
    session = sim.open(sim_model(mtp_heads=3, mtp_wrong_every=1)).create_session()
    token, draft = session.decode_step_sampled_mtp(300, max_draft_tokens=3)
    assert draft is not None
    assert (
        session.verify_tokens_sampled_without_mtp([token, *draft.token_ids])[0]
        != (draft.token_ids[0])
    )


def last_said(session: StageSession, tokens: list[int]) -> int:
    """What follows these tokens, run one by one."""
    said = [session.decode_step_frame(token)[0] for token in tokens]
    return said[-1]


def test_recurrent_windows_are_retired_exactly_or_trimmed(recurrent_engine: Engine) -> None:
    model = recurrent_engine.open()
    session, other = model.create_session(), model.create_session()
    for each in (session, other):
        each.prefill_chunk_frame(PROMPT)
    session.verify_tokens_frame([310, 311, 312])
    for start, count in ((4, 2), (3, 3), (0, 0)):
        with pytest.raises(InvalidArgument):
            session.retire_verify_checkpoint(start, count)
    session.trim(5)
    assert session.decode_step_frame(320)[0] == last_said(other, [310, 320])
    session.verify_tokens_frame([311])
    session.retire_verify_checkpoint(6, 1)
    with pytest.raises(InvalidArgument):
        session.retire_verify_checkpoint(6, 1)
    assert session.token_count == session.position == 7


def test_only_so_many_checkpoints_are_held(recurrent_engine: Engine) -> None:
    session = recurrent_engine.open(ctx_size=256).create_session()
    for _ in range(MAX_VERIFY_CHECKPOINTS):
        session.verify_tokens_frame([300])
    with pytest.raises(Unsupported):
        session.verify_tokens_frame([300])
    assert session.token_count == session.position == MAX_VERIFY_CHECKPOINTS


def test_recurrent_memory_has_state_but_no_prefixes_pages_or_cells(
    recurrent_engine: Engine,
) -> None:
    model = recurrent_engine.open()
    layers = (0, model.facts.n_layer)
    session = model.create_session()
    session.prefill_chunk_frame(PROMPT)
    for call in (
        lambda: session.save_prefix(8, 2),
        session.memory_used_cells,
        lambda: session.export_kv_page(*layers, 0, 2),
    ):
        with pytest.raises(Unsupported):
            call()
    state = session.export_recurrent_state()
    assert len(state) > 0
    other = model.create_session()
    other.import_recurrent_state(state)
    assert other.token_count == other.position
    assert other.decode_step_frame(310)[0] == session.decode_step_frame(310)[0]


def test_a_recurrent_state_cannot_go_back_to_where_no_checkpoint_is(
    recurrent_engine: Engine,
) -> None:
    """It says so, or knows how to; the position is true either way, and a reset mends all."""
    session = recurrent_engine.open().create_session()
    session.prefill_chunk_frame(PROMPT)
    expected = session.decode_step_frame(310)[0]
    with contextlib.suppress(NativeRuntimeError):
        session.trim(2)
        assert session.position == 2
    session.reset()
    session.prefill_chunk_frame(PROMPT)
    assert session.decode_step_frame(310)[0] == expected
    assert session.token_count == session.position == 5


def test_an_exporting_batch_that_cannot_be_is_refused_natively_not_serialised(
    sim: Engine, sim_model: SimModel
) -> None:
    """When the host's choice was wrong, the library's refusal is final."""
    for spec, options in ((sim_model(recurrent=True), {}), (sim_model(), {"kv_unified": False})):
        sim.path = spec
        stage = a_stage(sim, 0, 2, **options)
        sessions = [stage.create_session() for _ in range(2)]
        for session in sessions:
            session.runs_alone = False
        with pytest.raises(InvalidArgument):
            iteration_batch_sampled([IterationEntry(session, PROMPT) for session in sessions])
        assert [session.position for session in sessions] == [0, 0]


def test_a_trim_that_fails_half_way_demands_a_reset(sim: Engine) -> None:
    model = sim.open()
    session = model.create_session()
    session.prefill_chunk_frame(PROMPT)
    add_fault(model, "call=trim status=RUNTIME_ERROR when=middle")
    with pytest.raises(NativeRuntimeError):
        session.trim(2)
    for call in (
        lambda: session.trim(2),
        lambda: session.decode_step_frame(300),
        lambda: iteration_batch_sampled([IterationEntry(session, [300])]),
    ):
        with pytest.raises(NativeRuntimeError, match="reset"):
            call()
    assert session.token_count == session.position == 4
    session.reset()
    session.prefill_chunk_frame(PROMPT)
    assert session.token_count == session.position == 4


def test_a_state_that_never_fits_is_an_error_with_the_librarys_words(sim: Engine) -> None:
    model = sim.open()
    session = model.create_session()
    session.prefill_chunk_frame(PROMPT)
    add_fault(model, "call=export_state effect=grow_buffer count=0")
    add_fault(model, "call=export_kv effect=grow_buffer count=0")
    with pytest.raises(BufferTooSmall, match="buffer"):
        session.export_full_state(0, 4)
    with pytest.raises(BufferTooSmall, match="buffer"):
        session.export_kv_page(0, 4, 0, 4)
    assert session.token_count == session.position == 4


def test_forwarded_optional_parts_are_part_of_the_prediction(
    sim: Engine, sim_model: SimModel
) -> None:
    sim.path = sim_model(optional_part=True)
    frame = a_stage(sim, 0, 2).create_session().prefill_chunk_frame(PROMPT)
    session = a_stage(sim, 2, 3).create_session()
    capacity = session.output_capacity(len(PROMPT), frame)
    forwarded = session.prefill_chunk_frame(PROMPT, frame)
    assert capacity == len(forwarded.payload)
    assert forwarded.part(1).tolist() == frame.part(1).tolist()
