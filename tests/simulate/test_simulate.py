"""Runs in virtual time: what comes out is what the costs say, and the same every time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.cli import main
from skippy_sched.config import Config
from skippy_sched.errors import StartupError
from skippy_sched.native import Model
from skippy_sched.scheduler.loading import open_model
from skippy_sched.simulate.driver import SimClock, open_engine, run
from skippy_sched.simulate.prompts import Prompts
from skippy_sched.simulate.report import Report, parse_goodput
from skippy_sched.simulate.traces import Arrival

MILLISECOND = {"cost_fixed_us": 1000.0}


def a_config(scheduler: dict[str, Any] | None = None, **engine: Any) -> Config:
    engine = {"library": "sim", "lanes": 4, "context_tokens": 256, "batch_tokens": 64, **engine}
    return Config.model_validate({"engine": engine, "scheduler": scheduler or {}})


def simulated(
    arrivals: Sequence[Arrival], config: Config | None = None, goodput: Sequence[str] = ()
) -> dict[str, Any]:
    report = Report(parse_goodput(goodput))
    with open_engine(config or a_config(), MILLISECOND) as engine:
        run(engine, iter(arrivals), Prompts(), report)
        engine.scheduler.state.check()
    return report.summary()


def test_a_lone_request_takes_a_prefill_and_an_iteration_per_token() -> None:
    summary = simulated([Arrival(0.0, 64, 11)])
    assert summary["mean_ttft_ms"] == pytest.approx(1.0)
    assert summary["mean_itl_ms"] == pytest.approx(1.0)
    assert summary["mean_e2el_ms"] == pytest.approx(11.0)
    assert summary["total_output_tokens"] == 11


def test_time_without_requests_is_jumped_over_and_counts_as_idle() -> None:
    summary = simulated([Arrival(0.0, 10, 5), Arrival(86_400.0, 10, 5)])
    assert summary["duration"] == pytest.approx(86_400, rel=1e-3)
    assert summary["busy_share"] < 1e-5
    assert summary["max_ttft_ms"] == pytest.approx(1.0, abs=0.01)


def test_what_finds_no_room_in_the_queue_is_refused_and_not_good() -> None:
    config = a_config({"waiting_requests_max": 2}, lanes=1)
    summary = simulated([Arrival(0.0, 10, 5)] * 6, config, ["ttft:1000"])
    assert summary["refused"] == 4
    assert summary["completed"] == 2
    assert summary["good_share"] == pytest.approx(2 / 6)


def test_goodput_needs_every_limit_kept() -> None:
    arrivals = [Arrival(0.0, 64, 21)] * 2
    one_lane = a_config(lanes=1)
    assert simulated(arrivals, one_lane, ["ttft:2", "tpot:2"])["good_share"] == 0.5
    assert simulated(arrivals, one_lane, ["ttft:100", "tpot:0.5"])["good_share"] == 0.0


def test_shared_blocks_are_computed_once() -> None:
    config = a_config(context_tokens=1024)
    arrivals = [Arrival(float(n), 550, 3, blocks=(1, 10 + n)) for n in range(3)]
    assert simulated(arrivals, config)["cached_tokens"] == 2 * 512


def test_a_clock_that_runs_by_itself_is_refused(sim_model: Callable[..., Path]) -> None:
    config = a_config()
    path = str(sim_model(clock="real"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    model: Model = open_model(config)
    with model, pytest.raises(StartupError, match="clock = virtual"):
        SimClock(model)


SYNTHETIC = ["simulate", "--rate", "200", "--requests", "60", "--costs", "1000,10,10,0.1"]


def figures(path: Path, *arguments: str) -> dict[str, Any]:
    assert main([*SYNTHETIC, "--json", str(path), *arguments]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_the_command_prints_tables_and_repeats_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = figures(tmp_path / "a.json", "--tenants", "a:1,b:3", "--goodput", "ttft:500")
    again = figures(tmp_path / "b.json", "--tenants", "a:1,b:3", "--goodput", "ttft:500")
    assert first == again
    assert first["completed"] == 60
    assert set(first["tenants"]) == {"a", "b"}
    shown = capsys.readouterr().out
    assert "first token (TTFT)" in shown
    assert "good requests/s" in shown


def test_a_trace_from_a_file_is_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,3\n1,9000,3\n2,10,3\n")
    out = tmp_path / "out.json"
    assert main(["simulate", str(trace), "--limit", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["completed"], found["clipped"]) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], "give --rate"),
        (["simulate", "missing.csv"], "missing.csv"),
        (["simulate", "--rate", "1", "--plot", "x.pdf"], ".png or .html"),
        (["simulate", "--rate", "1", "--lanes", "0"], "--lanes"),
        (["replay", "missing"], "missing"),
        (["calibrate", "missing"], "missing"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_plot_has_all_its_parts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.html"
    figures(tmp_path / "a.json", "--plot", str(path))
    assert "<svg" in path.read_text()
