"""Reading GGUF files as byte ranges, and writing others from them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skippy_sched.errors import SplitError
from skippy_sched.split.gguf import GgufFile, bool_entry, number_entry, text_entry
from tests.gguf_files import Value, a_cuttable_file, gguf_bytes

TENSORS = {"a": b"1234" * 8, "b": b"5678" * 3, "c": b"9" * 4}
KEYS: dict[str, Value] = {
    "text": "words",
    "number": 7,
    "flag": True,
    "share": 0.5,
    "items": [3, 1, 4, 1, 5],
    "names": ["x", "", "zz"],
}


def test_every_key_and_tensor_is_found_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(KEYS, TENSORS))
    with GgufFile(path) as model:
        assert list(model.keys) == list(KEYS)
        assert (model.text("text"), model.number("number"), model.number("share")) == (
            "words",
            7,
            0.5,
        )
        assert model.number("flag") is True
        assert model.number("items") is None
        assert model.text("number") is None
        assert [key.count for key in model.keys.values()] == [None] * 4 + [5, 3]
        assert [(t.name, t.bytes) for t in model.tensors] == [("a", 32), ("b", 32), ("c", 32)]


def test_a_file_written_from_all_parts_is_the_same_file(tmp_path: Path) -> None:
    path, copy = tmp_path / "model.gguf", tmp_path / "copy.gguf"
    path.write_bytes(gguf_bytes(KEYS, TENSORS))
    with GgufFile(path) as model:
        entries = [model.raw(key) for key in model.keys.values()]
        size = model.write(copy, entries, [(t.name, t) for t in model.tensors])
    assert copy.read_bytes() == path.read_bytes()
    assert size == copy.stat().st_size


def test_a_file_written_from_some_parts_holds_these(tmp_path: Path) -> None:
    path, part = tmp_path / "model.gguf", tmp_path / "part.gguf"
    path.write_bytes(gguf_bytes(KEYS, TENSORS))
    with GgufFile(path) as model:
        entries = [
            model.array_slice(model.keys["items"], 1, 3),
            number_entry("n", 9),
            bool_entry("yes", True),
            text_entry("t", "é"),
        ]
        model.write(part, entries, [("renamed", model.tensors[1])])
    expected = gguf_bytes(
        {"items": [1, 4], "n": 9, "yes": True, "t": "é"}, {"renamed": TENSORS["b"]}
    )
    assert part.read_bytes() == expected


@given(cut=st.integers(0, 2000), at=st.integers(0, 2000), byte=st.integers(0, 255))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_or_read_but_never_a_crash(
    tmp_path: Path, cut: int, at: int, byte: int
) -> None:
    whole = bytearray(a_cuttable_file(tmp_path / "whole.gguf").read_bytes())
    whole[at % len(whole)] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole[: cut % (len(whole) + 1)] if cut % 3 else whole)
    with contextlib.suppress(SplitError), GgufFile(path) as model:
        assert all(t.offset + t.bytes <= model.size for t in model.tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no GGUF file"),
        (b"GGML" + bytes(40), "does not begin"),
        (gguf_bytes({}, {}, version=1), "version 1"),
        (gguf_bytes({"general.alignment": 24}, {}), "no power of 2"),
        (gguf_bytes(KEYS, TENSORS)[:100], "damaged.gguf"),
    ],
)
def test_what_is_no_whole_gguf_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(SplitError, match=message):
        GgufFile(path)
    with pytest.raises(SplitError, match="cannot open"):
        GgufFile(tmp_path / "missing")
