"""Text of a stream: whole characters, and never a part of a stop string."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skippy_sched.scheduler.text import Pieces, TextAssembler


def deltas(pieces: list[bytes], stops: list[str] | None = None) -> list[str]:
    assembler = TextAssembler(Pieces(pieces.__getitem__), stops or ())
    given_out = [assembler.push(token) for token in range(len(pieces))]
    return [*given_out, assembler.flush()]


def test_a_character_over_several_tokens_comes_out_whole() -> None:
    assert deltas([b"\xf0\x9f", b"\x98", b"\x8a", b"!"]) == ["", "", "😊", "!", ""]


def test_an_incomplete_character_at_the_end_is_dropped() -> None:
    assert "".join(deltas([b"ok", b"\xf0\x9f"])) == "ok"


def test_invalid_bytes_become_replacement_characters() -> None:
    assert "".join(deltas([b"\xff", b"a"])) == "\ufffda"


@pytest.mark.parametrize(
    ("pieces", "stops", "text"),
    [
        ([b"The quick br", b"own", b" fox jumps"], ["own fox"], "The quick br"),
        ([b"a<", b"b", b"c"], ["<|end|>"], "a<bc"),
        ([b"a", b"a", b"a", b"b"], ["aab"], "a"),
        ([b"x one two"], ["two", "one"], "x "),
        ([b"stop", b"more"], ["stop"], ""),
        ([b"abstopcd"], ["stop"], "ab"),
        ([b"\xe2\x82", b"\xac1"], ["€"], ""),
    ],
)
def test_nothing_of_a_stop_string_is_given_out(
    pieces: list[bytes], stops: list[str], text: str
) -> None:
    assert "".join(deltas(pieces, stops)) == text


def test_only_what_could_become_a_stop_string_is_held_back() -> None:
    assert deltas([b"a<", b"b", b"c"], ["<|end|>"]) == ["a", "<b", "c", ""]


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(c % (len(data) + 1) for c in cuts)})
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.binary(max_size=40), st.lists(st.integers(0, 40), max_size=8))
def test_the_deltas_join_to_the_whole_text_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    whole = "".join(deltas([data]))
    assert "".join(deltas(cut(data, cuts))) == whole
    assert data.decode(errors="replace").startswith(whole)


@given(
    st.text("ab<", max_size=30),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_streamed_text_is_the_text_before_the_first_match(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    starts = [text.find(stop) for stop in stops if stop in text]
    expected = text[: min(starts)] if starts else text
    pieces = cut(text.encode(), cuts)
    assembler = TextAssembler(Pieces(pieces.__getitem__), stops)
    out = ""
    for token in range(len(pieces)):
        out += assembler.push(token)
        assert expected.startswith(out)
        if assembler.stopped_by is None:
            held = len(b"".join(pieces[: token + 1])) - len(out)
            assert held < max(map(len, stops))
    assert out + assembler.flush() == expected
