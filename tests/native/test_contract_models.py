"""The rules of the C ABI on each engine: tokenizers, and what cannot be opened."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.native import (
    InvalidArgument,
    Library,
    ModelError,
    NativeError,
    Status,
    Unsupported,
    find_library,
)
from skippy_sched.native.cdef import ffi
from tests.gguf_files import attention_bytes, packed

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


def a_changed_model(path: Path, before: bytes, after: bytes) -> Path:
    """A small model, with bytes of its header replaced."""
    content = attention_bytes(layers=1, width=32)
    assert content.count(before) == 1
    path.write_bytes(content.replace(before, after))
    return path


def test_files_that_llama_cpp_would_end_the_process_for_are_model_errors(tmp_path: Path) -> None:
    """A failed assertion while a model is opened is an error of that file."""
    engine = Engine("llama", Library.load(find_library("llama")), tmp_path)
    twice = a_changed_model(tmp_path / "twice.gguf", packed("ab"), packed("aa"))
    with pytest.raises(ModelError, match="GGML_ASSERT"):
        engine.open(twice)


def test_a_tensor_of_more_elements_than_can_be_counted_is_a_model_error(tmp_path: Path) -> None:
    """2**32 times 2**32 elements are none, to who counts them in 64 bits."""
    engine = Engine("llama", Library.load(find_library("llama")), tmp_path)
    name = packed("output.weight")
    before = name + struct.pack("<I2Q", 2, 32, 512)
    after = name + struct.pack("<I2Q", 2, 2**32, 2**32)
    with pytest.raises(ModelError, match=r"output\.weight has more elements"):
        engine.open(a_changed_model(tmp_path / "huge.gguf", before, after))


def test_impossible_options_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument):
        engine.open(device="no such device")
    with pytest.raises(InvalidArgument):
        engine.open(ctx_size=2**30, lanes=2**10)
    with pytest.raises((InvalidArgument, Unsupported)):
        engine.open(layer_start=1, layer_end=2)
