"""Models and their sessions: opening, facts, tokenizer, lanes, and every order of closing."""

from __future__ import annotations

from typing import Any

import pytest

from skippy_sched.native import (
    ClosedError,
    HostCheckError,
    ModelError,
    ModelOptions,
    NativeRuntimeError,
    NgramCache,
    Status,
)

from .conftest import Engine, SimModel, a_stage, add_fault, live_objects


def test_facts_say_what_the_library_knows(sim: Engine, sim_model: SimModel) -> None:
    facts = sim.open(sim_model(vocab=700, n_layer=6), lanes=3, ctx_size=128).facts
    assert facts.known
    assert (facts.n_vocab, facts.n_layer, facts.lane_count) == (700, 6, 3)
    assert (facts.ctx_size, facts.pool_cells) == (128, 384)
    assert facts.is_dense
    assert facts.chat_template


def test_options_with_unknown_names_are_refused_with_the_known_ones(sim: Engine) -> None:
    for field, known in [("cache_type_k", "q8_0"), ("flash_attn", "auto"), ("split_mode", "row")]:
        with pytest.raises(HostCheckError, match=rf"{field} is 'x', but must be one of .*{known}"):
            sim.open(None, **{field: "x"})


def test_bindings_must_match_identities(sim: Engine) -> None:
    with pytest.raises(HostCheckError, match="2 names for 1 identities"):
        sim.open(import_identities=("a",), import_bindings=("x", "y"))


@pytest.mark.parametrize("text", ["", "skippy-sim 1\nnonsense = 3\n", "\x00\x01\x02"])
def test_a_damaged_file_is_a_model_error(sim: Engine, tmp_path: Any, text: str) -> None:
    path = tmp_path / "broken.sim"
    path.write_text(text)
    with pytest.raises(ModelError, match="skippy_model_open: ModelError: ") as caught:
        sim.open(path)
    assert caught.value.status is Status.MODEL_ERROR


def test_a_missing_file_is_a_model_error_naming_it(sim: Engine, tmp_path: Any) -> None:
    with pytest.raises(ModelError, match=r"gone\.sim"):
        sim.open(tmp_path / "gone.sim")


def test_tokens_and_text_survive_each_other(sim: Engine) -> None:
    model = sim.open()
    for text in ["", "plain", "grüße, 世界", "a" * 5000]:
        tokens = model.tokenize(text, add_special=False)
        assert model.detokenize(tokens) == text.encode()
        assert model.tokenize(text.encode(), add_special=False) == tokens


def test_text_that_the_call_cannot_carry_is_refused(sim: Engine) -> None:
    model = sim.open()
    with pytest.raises(HostCheckError, match="NUL byte at byte 2"):
        model.tokenize("ab\0c")
    with pytest.raises(HostCheckError, match="lone surrogate at character 1"):
        model.tokenize("a\ud83d")
    with pytest.raises(HostCheckError, match="32-bit"):
        model.detokenize([2**40])


def test_buffers_of_the_tokenizer_grow_once_to_what_is_asked_for(
    sim: Engine, sim_model: SimModel
) -> None:
    long_piece = ("20" + "61" * 200,)
    model = sim.open(sim_model(token=long_piece))
    assert model.detokenize([260] * 50) == (b" " + b"a" * 200) * 50
    add_fault(model, "call=tokenize effect=grow_buffer")
    assert model.tokenize("abc", add_special=False) == [97, 98, 99]


def test_end_of_generation_is_told_by_token(sim: Engine) -> None:
    model = sim.open()
    assert model.is_eog(model.facts.token_eos)
    assert not model.is_eog(97)


def test_lanes_are_given_lowest_first_and_run_out(sim: Engine) -> None:
    model = sim.open(lanes=3)
    sessions = [model.create_session() for _ in range(3)]
    assert [session.lane for session in sessions] == [0, 1, 2]
    with pytest.raises(NativeRuntimeError, match="lane"):
        model.create_session()
    sessions[1].close()
    assert model.create_session().lane == 1


def test_closing_a_model_frees_its_sessions_first(sim: Engine) -> None:
    before = live_objects(sim.library)
    model = sim.open()
    session = model.create_session()
    model.close()
    assert session.closed
    assert model.sessions == ()
    assert live_objects(sim.library) == before
    model.close()
    session.close()


def test_using_what_is_closed_says_so(sim: Engine) -> None:
    model = sim.open()
    session = model.create_session()
    session.close()
    with pytest.raises(ClosedError, match="session is closed"):
        session.prefill_chunk_frame([1])
    with pytest.raises(ClosedError, match="session is closed"):
        _ = session.position
    model.close()
    for use in (model.create_session, lambda: model.tokenize("x"), lambda: model.is_eog(1)):
        with pytest.raises(ClosedError, match=r"model .* is closed"):
            use()


def test_a_session_that_cannot_be_freed_stays_open_and_can_be_closed_again(sim: Engine) -> None:
    model = sim.open(lanes=1)
    for when in ("before", "after"):
        session = model.create_session()
        add_fault(model, f"call=session_free status=RUNTIME_ERROR when={when}")
        with pytest.raises(NativeRuntimeError):
            session.close()
        assert not session.closed
        session.close()
        assert session.closed
    assert model.create_session().lane == 0


def test_a_model_is_freed_although_freeing_its_sessions_fails(sim: Engine) -> None:
    before = live_objects(sim.library)
    model = sim.open()
    for _ in range(3):
        model.create_session()
    add_fault(model, "call=session_free status=RUNTIME_ERROR")
    with pytest.raises(NativeRuntimeError):
        model.close()
    assert live_objects(sim.library) == before


def test_context_managers_close(sim: Engine) -> None:
    with sim.open() as model:
        with model.create_session() as session:
            assert session.lane == 0
        assert session.closed
    assert model.closed


def test_a_forgotten_model_warns_and_frees_its_lanes(sim: Engine) -> None:
    before = live_objects(sim.library)
    model = sim.open()
    model.create_session()
    sim.opened.clear()
    with pytest.warns(ResourceWarning, match="never closed"):
        model.__del__()
    assert live_objects(sim.library) == before


def test_boundaries_are_those_of_the_stage(sim: Engine) -> None:
    whole = sim.open()
    assert (whole.input_boundary, whole.output_boundary) == (None, None)
    assert whole.terminal_stage
    first, last = a_stage(sim, 0, 2), a_stage(sim, 2, 4)
    assert first.input_boundary is None
    assert first.output_boundary == last.input_boundary
    assert not first.terminal_stage
    assert last.terminal_stage
    assert first.output_boundary is not None
    assert first.output_boundary.bytes_per_token == 4 * first.facts.n_embd


@pytest.mark.parametrize(
    ("spec", "options", "batched"),
    [
        ({}, {"kv_unified": True}, True),
        ({}, {"kv_unified": False}, False),
        ({}, {"kv_unified": False, "batched_exports": True}, True),
        ({}, {"kv_unified": True, "batched_exports": False}, False),
        ({"recurrent": True}, {"kv_unified": True}, False),
        ({"recurrent": True}, {"batched_exports": True}, False),
    ],
)
def test_exports_batch_only_from_dense_memory_that_is_not_split_by_sequence(
    sim: Engine,
    sim_model: SimModel,
    spec: dict[str, Any],
    options: dict[str, Any],
    batched: bool,
) -> None:
    sim.path = sim_model(**spec)
    assert a_stage(sim, 0, 2, **options).batched_activation_exports is batched


def test_the_simulated_engine_is_batch_invariant(sim: Engine) -> None:
    assert sim.open().batch_invariant() is None


def test_default_options_open_a_model(sim: Engine) -> None:
    assert ModelOptions().n_batch == 2048
    assert ModelOptions().n_ubatch == 512
    assert sim.open(ctx_size=64).facts.ctx_size == 64


def test_the_ngram_cache_drafts_what_it_has_seen(sim: Engine) -> None:
    with NgramCache(sim.library, 1, 3) as cache:
        cache.reset([1, 2, 3, 4, 5])
        cache.append([1, 2, 3])
        assert cache.draft([], 2) == [4, 5]
        assert cache.draft([4], 1) == [5]
        assert cache.draft([], 0) == []
    with pytest.raises(ClosedError):
        cache.append([1])
    cache.close()
    with pytest.raises(HostCheckError, match="ngram_max is 70000"):
        NgramCache(sim.library, 1, 70000)
