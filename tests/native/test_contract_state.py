"""The rules of the C ABI on each engine: states and KV pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skippy_sched.native import (
    HostCheckError,
    InvalidArgument,
    KvPage,
    NativeError,
    NativeRuntimeError,
    Status,
    Unsupported,
)
from skippy_sched.native.cdef import ffi

from .conftest import Engine, a_session, continuation
from .raw_calls import raw_status


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


def test_kv_pages_out_of_range_or_damaged_are_refused(engine: Engine) -> None:
    model = engine.open()
    layers = (0, model.facts.n_layer)
    session = a_session(model)
    for start, count in ((0, 0), (0, 7), (6, 1), (2**63, 1), (1, 2**64 - 1)):
        with pytest.raises(InvalidArgument):
            session.export_kv_page(*layers, start, count)
    for wrong in ((0, layers[1] - 1), (1, layers[1])):
        with pytest.raises(InvalidArgument):
            session.export_kv_page(*wrong, 0, 6)
    page = session.export_kv_page(*layers, 0, 6)
    other = model.create_session()
    desc = page.desc
    for change in (
        {"version": 99},
        {"codec": 9},
        {"layer_end": layers[1] + 1},
        {"token_start": 1},
        {"token_count": 5},
        {"payload_bytes": desc.payload_bytes - 1},
    ):
        changed = KvPage(replace(desc, **change), page.payload)
        with pytest.raises((InvalidArgument, NativeRuntimeError, HostCheckError)):
            other.import_kv_page(changed)
        assert other.token_count == other.position == 0, change
    for at in (0, len(page.payload) // 2, len(page.payload) - 1):
        damaged = np.array(page.payload)
        damaged[at] ^= 1
        with pytest.raises(NativeError):
            other.import_kv_page(KvPage(desc, damaged))
        assert other.token_count == other.position == 0
    other.import_kv_page(page)
    assert other.token_count == other.position == 6


def test_a_kv_page_without_a_buffer_names_its_size(engine: Engine) -> None:
    model = engine.open()
    session = a_session(model)
    size = len(session.export_kv_page(0, model.facts.n_layer, 0, 6).payload)
    desc, needed = ffi.new("struct skippy_kv_page_desc *"), ffi.new("size_t *")
    status = raw_status(
        model, "skippy_export_kv_page", session.raw, 0, model.facts.n_layer, 0, 6, desc, ffi.NULL,
        0, needed,
    )  # fmt: skip
    assert status is Status.BUFFER_TOO_SMALL
    assert needed[0] == desc.payload_bytes == size


@pytest.mark.parametrize("kind", ["state", "full_state", "recurrent_state"])
def test_payloads_that_are_none_are_refused(engine: Engine, kind: str) -> None:
    model = engine.open()
    session = a_session(model)
    layers = () if kind == "recurrent_state" else (0, model.facts.n_layer)
    full = bytes(session.export_full_state(0, model.facts.n_layer))
    for payload in (b"", b"\x00" * 200, full[:50], full[:40] + b"\xff" * len(full)):
        with pytest.raises(NativeError):
            getattr(session, f"import_{kind}")(*layers, payload)
    assert session.token_count == session.position == 6
    assert len(continuation(session, 2)) == 2


def test_payloads_given_to_imports_may_be_any_buffer(engine: Engine) -> None:
    model = engine.open()
    layers = (0, model.facts.n_layer)
    state = a_session(model).export_full_state(*layers)
    assert isinstance(state, np.ndarray)
    for payload in (state.tobytes(), bytearray(state.tobytes()), state):
        with model.create_session() as session:
            session.import_full_state(*layers, payload)
            assert session.position == 6
