"""The rules of the C ABI on each engine: tokenizers, and what cannot be opened."""

from __future__ import annotations

from typing import Any

import pytest

from skippy_sched.native import (
    InvalidArgument,
    ModelError,
    NativeError,
    Status,
    Unsupported,
)
from skippy_sched.native.cdef import ffi

from .conftest import Engine
from .raw_calls import raw_status


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
        path.write_bytes(source.read(engine.path.stat().st_size // 2))
    with pytest.raises(ModelError):
        engine.open(path)


def test_impossible_options_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument):
        engine.open(device="no such device")
    with pytest.raises(InvalidArgument):
        engine.open(ctx_size=2**30, lanes=2**10)
    with pytest.raises((InvalidArgument, Unsupported)):
        engine.open(layer_start=1, layer_end=2)
