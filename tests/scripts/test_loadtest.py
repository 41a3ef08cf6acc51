"""The load test's pure parts: traces, arrivals, prompts, figures, options."""

from __future__ import annotations

import itertools
import random
import statistics
from typing import Any

import numpy as np
import pytest
from _client import Answer
from _options import check, parser
from _report import details, is_good, latencies, parse_goodput, percentile, summarize
from _workload import (
    Planned,
    Prompts,
    TraceError,
    arrivals,
    fit_trace,
    read_trace,
)
from hypothesis import given
from hypothesis import strategies as st


def an_answer(
    *, sent_at: float = 0.0, text_at: tuple[float, ...] = (1.0, 2.0, 4.0), **changes: Any
) -> Answer:
    fields: dict[str, Any] = {"ended_at": text_at[-1] if text_at else sent_at}
    fields |= {"completion_tokens": len(text_at), "prompt_tokens": 5} | changes
    return Answer(3, 5, sent_at=sent_at, text_at=list(text_at), **fields)


# what is sent, and when


def test_arrivals_repeat_with_their_seed_and_come_at_their_rate() -> None:
    def times(seed: int) -> list[float]:
        return list(itertools.islice(arrivals(20.0, 1.0, random.Random(seed)), 20_000))

    assert times(1) == times(1) != times(2)
    assert times(1) == sorted(times(1))
    assert pytest.approx(1000, rel=0.05) == times(1)[-1]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_sets_the_spread_of_the_gaps_and_not_their_mean(burstiness: float) -> None:
    times = list(itertools.islice(arrivals(5.0, burstiness, random.Random(3)), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    variation = statistics.pstdev(gaps) / statistics.fmean(gaps)
    assert pytest.approx(0.2, rel=0.05) == statistics.fmean(gaps)
    assert pytest.approx(burstiness**-0.5, rel=0.05) == variation


def test_an_azure_trace_is_read_with_times_from_zero() -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n",
        "2023-11-16 23:59:59.5000000,374,44\n",
        "2023-11-17 00:00:01.7500009,396,109\n",
    ]
    assert [Planned(0.0, 374, 44), Planned(2.25, 396, 109)] == read_trace(lines)


def test_a_mooncake_trace_is_read_with_its_prefix_blocks() -> None:
    lines = [
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n',
        '{"timestamp": 1000, "input_length": 500, "output_length": 9, "hash_ids": [0]}\n',
    ]
    assert [Planned(0.0, 500, 9, (0,)), Planned(2.0, 600, 5, (0, 7))] == read_trace(lines)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "x:1: expected the header"),
        (["a,b\n"], "x:1: expected the header"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n"], "holds no requests"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens\n", "2023-11-16 00:00:00,1\n"], "x:2: "),
        (['{"timestamp": 1, "input_length": 2, "output_length": 3}\n', '{"timest\n'], "x:2: "),
        (['{"timestamp": 1}\n'], "x:1: "),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(lines: list[str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(lines, name="x")


def fitted(trace: list[Planned], **changes: Any) -> tuple[list[Planned], int]:
    limits: dict[str, Any] = {"time_scale": 1.0, "length_scale": 1.0, "context_tokens": None}
    return fit_trace(trace, **(limits | {"duration_s": None, "requests_max": None} | changes))


def test_a_trace_is_scaled_in_time_and_length_and_cut() -> None:
    trace = [Planned(float(second), 100, 10, (second,)) for second in range(10)]
    halved, shortened = fitted(trace, time_scale=0.5, length_scale=0.5, duration_s=1.0)
    assert [Planned(0.0, 50, 5, (0,)), Planned(0.5, 50, 5, (1,)), Planned(1.0, 50, 5, (2,))] == (
        halved
    )
    assert shortened == 0
    assert trace[:4] == fitted(trace, requests_max=4)[0]


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(2, 3000))
def test_a_shortened_request_fits_its_context_and_keeps_both_parts(
    prompt_tokens: int, output_tokens: int, context_tokens: int
) -> None:
    [one], _ = fitted([Planned(0.0, prompt_tokens, output_tokens)], context_tokens=context_tokens)
    assert one.prompt_tokens + one.output_tokens <= context_tokens
    assert one.prompt_tokens >= 1
    assert one.output_tokens >= 1


def test_prompts_have_their_exact_length_and_share_only_the_asked_prefix() -> None:
    prompts = Prompts(1, "ids", range(261, 511), shared_prefix_tokens=30)
    one, two = (prompts.pieces(index, Planned(0.0, 80, 1)) for index in (0, 1))
    assert (len(one), len(two)) == (80, 80)
    assert one[:30] == two[:30]
    assert one[30:40] != two[30:40]
    assert one == prompts.pieces(0, Planned(5.0, 80, 9))
    assert set(one) <= set(range(261, 511))


def test_equal_blocks_give_an_equal_prefix_and_nothing_more() -> None:
    prompts = Prompts(1, "words", range(261, 511), block_tokens=20)
    one = prompts.pieces(0, Planned(0.0, 50, 1, (4, 5, 6)))
    two = prompts.pieces(1, Planned(0.0, 70, 1, (4, 5, 9)))
    assert (len(one), len(two)) == (50, 70)
    assert one[:40] == two[:40]
    assert one[40:50] != two[40:50]


# the figures


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_equal_numpys(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent))
    assert pytest.approx(expected, rel=1e-9, abs=1e-6) == percentile(sorted(values), percent)


def test_intervals_are_taken_between_their_events() -> None:
    one = latencies(an_answer(sent_at=0.5, ended_at=4.5))
    assert (one.ttft, one.tpot, one.e2el, one.itl) == (0.5, 1.5, 4.0, (1.0, 2.0))


def test_an_answer_of_one_token_has_no_time_per_later_token() -> None:
    one = latencies(an_answer(text_at=(1.0,)))
    assert (one.ttft, one.tpot, one.itl) == (1.0, None, ())


def test_refused_requests_lower_the_goodput_and_closed_ones_are_in_no_figure() -> None:
    answers = [
        an_answer(),
        an_answer(text_at=(3.0, 4.0, 10.0)),
        an_answer(text_at=(), error="http_429", ended_at=0.1),
        an_answer(text_at=(0.1, 0.2), is_cancelled=True),
    ]
    summary = summarize(answers, parse_goodput(["ttft:2000"]))
    assert (summary["completed"], summary["failed"], summary["cancelled"]) == (2, 1, 1)
    assert pytest.approx(1 / 3) == summary["good_share"]
    assert pytest.approx(0.1) == summary["request_goodput"]
    assert summary["errors_by_kind"] == {"http_429": 1}
    assert summary["total_output_tokens"] == 6
    assert pytest.approx(2000) == summary["mean_ttft_ms"]
    assert summary["max_concurrent_requests"] == 4


def test_an_answer_with_another_count_than_asked_is_counted() -> None:
    answers = [an_answer(), an_answer(completion_tokens=2), an_answer(completion_tokens=None)]
    summary = summarize(answers, {})
    assert (summary["output_count_deviations"], summary["output_count_unknown"]) == (1, 1)
    assert summary["total_output_tokens"] == 8


def test_the_summary_has_the_names_that_vllms_benchmark_uses() -> None:
    summary = summarize([an_answer()], {})
    names = {f"{kind}_{metric}_ms" for kind in ("mean", "median", "std", "p99")
             for metric in ("ttft", "tpot", "itl", "e2el")}  # fmt: skip
    names |= {"completed", "failed", "duration", "request_throughput", "request_goodput"}
    names |= {"output_throughput", "total_input_tokens", "total_output_tokens"}
    assert set() == names - summary.keys()
    assert {"input_lens", "output_lens", "ttfts", "itls", "errors"} == details([]).keys()


def test_a_run_without_answers_still_has_a_summary() -> None:
    summary = summarize([], parse_goodput(["ttft:1"]))
    assert (summary["completed"], summary["duration"], summary["good_share"]) == (0, 0, None)


def test_goodput_limits_are_milliseconds_of_known_metrics() -> None:
    assert parse_goodput(["ttft:500", "tpot:50"]) == {"ttft": 0.5, "tpot": 0.05}
    assert is_good(latencies(an_answer()), {"ttft": 1.0})
    assert not is_good(latencies(an_answer()), {"ttft": 1.0, "e2el": 3.9})
    for wrong in ("ttft", "ttft:x", "ttft:0", "itl:5"):
        with pytest.raises(ValueError, match="expected ttft:MS"):
            parse_goodput([wrong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "1"], "needs --duration"),
        (["--rate", "1", "--trace", "f"], "give one of them"),
        (["--shared-prefix-tokens", "200"], "is not within 0 and"),
        (["--endpoint", "chat", "--prompt-form", "ids"], "takes text only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(parser().parse_args(["http://h:1", *options]))
