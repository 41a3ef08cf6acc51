"""Trace files as they are published, and what is said about broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from skippy_sched.simulate.traces import Arrival, Fitting, TraceError, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,0
"""
MOONCAKE = """{"timestamp": 27000, "input_length": 700, "output_length": 5, "hash_ids": [0, 14]}
{"timestamp": 28500, "input_length": 20, "output_length": 9, "hash_ids": [3]}
"""
OWN = """arrival_s,prompt_tokens,output_tokens,tenant,priority,prefix
1.5,10,20,red,2,chat
2.5,30,40,,,
"""


def a_trace(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure_times_count_from_the_first_and_an_empty_answer_is_one_token(tmp_path: Path) -> None:
    arrivals = list(read_trace(a_trace(tmp_path, AZURE)))
    assert arrivals == [Arrival(0.0, 374, 44), Arrival(0.5, 396, 1)]


def test_mooncake_blocks_are_kept(tmp_path: Path) -> None:
    first, second = read_trace(a_trace(tmp_path, MOONCAKE))
    assert first == Arrival(0.0, 700, 5, blocks=(0, 14))
    assert second.at_s == 1.5


def test_own_columns_may_be_left_empty(tmp_path: Path) -> None:
    arrivals = list(read_trace(a_trace(tmp_path, OWN)))
    assert arrivals == [
        Arrival(0.0, 10, 20, tenant="red", priority=2, prefix="chat"),
        Arrival(1.0, 30, 40),
    ]


def test_own_json_lines_read_like_the_csv(tmp_path: Path) -> None:
    text = '{"arrival_s": 0, "prompt_tokens": 10, "output_tokens": 20, "priority": 2}\n'
    assert list(read_trace(a_trace(tmp_path, text))) == [Arrival(0.0, 10, 20, priority=2)]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "known format"),
        ("a,b,c\n1,2,3\n", 1, "known format"),
        (AZURE + "2023-11-16 18:15:48.0,many,1\n", 4, "many"),
        (AZURE + "2023-11-16 18:15:46.0,1,1\n", 4, "sort the file"),
        (AZURE + "2023-11-16 18:15:48.0,1\n", 4, "NoneType"),
        (MOONCAKE + '{"timestamp": 29000, "input_length": 1}\n', 3, "output_length"),
        (MOONCAKE + "{oops\n", 3, "not JSON"),
        (OWN + "3.5,-1,2,,,\n", 4, "negative"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = a_trace(tmp_path, text)
    with pytest.raises(TraceError, match=words) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        list(read_trace(tmp_path / "nothing"))


def test_what_exceeds_the_context_is_clipped_and_counted() -> None:
    fitting = Fitting(100, time_scale=2.0)
    arrivals = [Arrival(1.0, 40, 60), Arrival(2.0, 90, 30), Arrival(3.0, 500, 200)]
    fitted = [(a.at_s, a.prompt_tokens, a.output_tokens) for a in fitting(arrivals)]
    assert fitted == [(2.0, 40, 60), (4.0, 70, 30), (6.0, 50, 50)]
    assert fitting.clipped == 2
