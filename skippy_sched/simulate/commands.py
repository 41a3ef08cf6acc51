"""The commands simulate, replay and calibrate: their flags, and what they print.

Imports what a command needs only when it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from skippy_sched.config import Config
    from skippy_sched.scheduler.core import Scheduler
    from skippy_sched.simulate.calibrate import Calibration
    from skippy_sched.simulate.driver import Step
    from skippy_sched.simulate.report import Report
    from skippy_sched.simulate.traces import Arrival

T = TypeVar("T")

#: flag -> (section, key) of the configuration
FLAGS = {
    "lanes": ("engine", "lanes"),
    "context_tokens": ("engine", "context_tokens"),
    "batch_tokens": ("engine", "batch_tokens"),
    "inter_token_target_ms": ("scheduler", "inter_token_target_ms"),
    "waiting_requests_max": ("scheduler", "waiting_requests_max"),
    "journal": ("scheduler", "journal"),
}
#: Microseconds: fixed, per token, per sequence, per cached token; a 135M model on two cores.
DEFAULT_COSTS = (6500.0, 4500.0, 900.0, 12.0)
#: Iterations between two redraws of the progress bar.
REDRAW_EVERY = 500


def add_parsers(commands: Any) -> None:
    """``commands`` is what ``ArgumentParser.add_subparsers`` returned."""
    _add_simulate(commands)
    replay = commands.add_parser("replay", help="check a journal decision by decision")
    replay.add_argument("journal", type=Path, metavar="FILE", help="written by scheduler.journal")
    replay.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    replay.set_defaults(run=_replay)
    calibrate = commands.add_parser("calibrate", help="fit the simulator's costs to a journal")
    calibrate.add_argument("journal", type=Path, metavar="FILE", help="of a real run")
    calibrate.add_argument(
        "--json", type=Path, metavar="FILE", help="save them, for simulate --calibrate"
    )
    calibrate.set_defaults(run=_calibrate)


def _add_simulate(commands: Any) -> None:
    parser = commands.add_parser("simulate", help="what if: run a trace in virtual time")
    parser.add_argument(
        "trace", type=Path, nargs="?", metavar="TRACE", help="CSV, JSONL or journal of arrivals"
    )
    add = parser.add_argument
    add("-c", "--config", type=Path, metavar="FILE", help="TOML configuration")
    add("--lanes", type=int, metavar="N", help="requests that run at once")
    add("--context-tokens", type=int, metavar="N", help="tokens that one request may hold")
    add("--batch-tokens", type=int, metavar="N", help="tokens of one native batch")
    add("--inter-token-target-ms", type=float, metavar="MS", help="gap that prompts may cause")
    add("--waiting-requests-max", type=int, metavar="N", help="requests that may wait")
    add("--time-scale", type=_positive, default=1.0, metavar="X", help="2: half the traffic")
    add("--limit", type=int, metavar="N", help="only the first N requests of the trace")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and synthetic traffic")

    group = parser.add_argument_group("synthetic traffic, in place of a trace")
    add = group.add_argument
    add("--requests", type=int, default=10_000, metavar="N", help="how many (10,000)")
    add("--rate", type=_positive, metavar="R", help="requests per second")
    add("--burstiness", type=_positive, default=1.0, metavar="B", help="below 1: in bursts")
    add("--prompt-tokens", type=_lengths, default="100-500", metavar="A-B", help="most lengths")
    add("--output-tokens", type=_lengths, default="20-60", metavar="A-B", help="most lengths")
    add("--tenants", type=_tenants, default={}, metavar="A:1,B:3", help="shares of the requests")
    add("--prefixes", type=int, default=0, metavar="N", help="prompts begin in N ways")

    group = parser.add_argument_group("the engine's speed")
    add = group.add_argument
    add("--calibrate", type=Path, metavar="RUN", help="as in this journal or saved calibration")
    add(
        "--costs",
        type=_costs,
        metavar="F,T,S,C",
        help="microseconds per iteration, token, sequence, cached token (6500,4500,900,12)",
    )

    group = parser.add_argument_group("results")
    add = group.add_argument
    add("--goodput", type=_goodput, nargs="+", default=[], metavar="NAME:MS", help="ttft:500 ...")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--plot", type=Path, metavar="FILE", help="draw queue and TTFT over time: .png or .html")
    add("--journal", metavar="FILE", help="record the run for replay")
    parser.set_defaults(run=_simulate)


# --- flags ------------------------------------------------------------------------------------


def _flag(parse: Callable[[str], T]) -> Callable[[str], T]:
    """A ValueError's own words as argparse shows them."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


@_flag
def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(f"{text} is not above 0")
    return number


@_flag
def _lengths(text: str) -> Any:
    from skippy_sched.simulate.workload import Lengths

    return Lengths.parse(text)


@_flag
def _tenants(text: str) -> dict[str, float]:
    tenants = {}
    for item in text.split(","):
        name, _, share = item.rpartition(":")
        if not name or not float(share) > 0:
            raise ValueError(f"{item!r}: expected NAME:SHARE with a share above 0")
        tenants[name] = float(share)
    return tenants


@_flag
def _costs(text: str) -> tuple[float, ...]:
    costs = tuple(float(cost) for cost in text.split(","))
    if len(costs) != len(DEFAULT_COSTS) or min(costs) < 0:
        raise ValueError(f"{text}: expected {len(DEFAULT_COSTS)} numbers of at least 0")
    return costs


@_flag
def _goodput(text: str) -> str:
    from skippy_sched.simulate.report import parse_goodput

    parse_goodput([text])
    return text


# --- simulate ---------------------------------------------------------------------------------


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from skippy_sched.simulate import plot
    from skippy_sched.simulate.report import tables

    config = _load(options)
    if options.plot is not None:
        plot.check(options.plot)
    report, clipped = _run(options, config)
    summary: dict[str, Any] = {**report.summary(), "clipped": clipped, "seed": options.seed}
    Console().print(tables(summary))
    if options.json is not None:
        _write_json(options.json, {**summary, "timeline": report.timeline.rows()})
    if options.plot is not None:
        rows = report.timeline.rows(plot.POINTS_MAX)
        plot.draw(options.plot, rows, str(options.trace or "synthetic traffic"))
    return 0


def _load(options: argparse.Namespace) -> Config:
    from skippy_sched.config_file import load_config

    flags = {
        f"--{name.replace('_', '-')}": (place, value)
        for name, place in FLAGS.items()
        if (value := getattr(options, name, None)) is not None
    }
    return load_config(options.config, flags=flags)


def _run(options: argparse.Namespace, config: Config) -> tuple[Report, int]:
    from skippy_sched.simulate.calibrate import Calibration, calibrate
    from skippy_sched.simulate.driver import open_engine, run
    from skippy_sched.simulate.prompts import Prompts
    from skippy_sched.simulate.report import Report, parse_goodput
    from skippy_sched.simulate.traces import Fitting

    calibration = Calibration(*(options.costs or DEFAULT_COSTS))
    if options.calibrate is not None:
        calibration = calibrate(options.calibrate)
    arrivals, expected = _arrivals(options)
    overhead_s = calibration.overhead_us / 1e6
    with open_engine(config, calibration.costs, overhead_s=overhead_s) as engine:
        fitting = Fitting(engine.context_tokens, options.time_scale, options.limit)
        report = Report(parse_goodput(options.goodput), engine.model.facts.pool_cells)
        with _progress(report, expected) as observer:
            run(engine, fitting(arrivals), Prompts(options.seed), observer)
    return report, fitting.clipped


def _arrivals(options: argparse.Namespace) -> tuple[Iterator[Arrival], int | None]:
    """And how many, if that is known."""
    from itertools import islice

    from skippy_sched.scheduler.journal import is_journal
    from skippy_sched.simulate.replay import recorded_arrivals
    from skippy_sched.simulate.traces import TraceError, read_trace
    from skippy_sched.simulate.workload import Workload

    if options.trace is not None:
        if is_journal(options.trace):
            recorded = recorded_arrivals(options.trace)
            return iter(recorded), len(recorded)
        return read_trace(options.trace), options.limit
    if options.rate is None:
        raise TraceError("nothing to simulate: name a trace file, or give --rate")
    workload = Workload(
        options.rate,
        options.prompt_tokens,
        options.output_tokens,
        options.burstiness,
        options.tenants,
        options.prefixes,
        options.seed,
    )
    return islice(workload.arrivals(), options.requests), options.requests


class _Watched:
    """A report that redraws a progress bar now and then."""

    def __init__(self, report: Report, redraw: Callable[[int], None]) -> None:
        self._report = report
        self._redraw = redraw
        self._left = REDRAW_EVERY

    def refused(self, arrival: Arrival) -> None:
        self._report.refused(arrival)

    def step(self, step: Step, scheduler: Scheduler) -> None:
        self._report.step(step, scheduler)
        self._left -= 1
        if not self._left:
            self._left = REDRAW_EVERY
            self._redraw(sum(self._report.status.values()) + self._report.refusals)


@contextmanager
def _progress(report: Report, expected: int | None) -> Iterator[Report | _Watched]:
    if not sys.stderr.isatty():
        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=expected)
        yield _Watched(report, lambda done: bar.update(task, completed=done))


# --- replay, calibrate ------------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> int:
    from rich.console import Console

    from skippy_sched.simulate.replay import Replay
    from skippy_sched.simulate.report import Report, tables

    report = Report()
    replay = Replay(options.journal, report)
    replay.run()
    report.pool_cells = replay.facts.pool_cells
    summary = report.summary()
    if options.json is not None:
        _write_json(options.json, {**summary, "records": dict(replay.counts)})
    Console().print(tables(summary))
    counts = replay.counts
    sys.stdout.write(
        f"{counts['plan']:,} plans are the same as recorded, for {counts['submit']:,} requests\n"
    )
    if replay.cut_off:
        sys.stderr.write(
            f"{options.journal} was cut off within a record: what came after that is not in it\n"
        )
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from skippy_sched.simulate.calibrate import measure

    calibration, _ = measure(options.journal)
    sys.stdout.write(shown(calibration))
    if options.json is not None:
        _write_json(options.json, calibration.to_json())
    return 0


def shown(calibration: Calibration) -> str:
    """A few lines for people."""
    return (
        f"fixed {calibration.fixed_us:,.0f} us, token {calibration.token_us:,.1f} us, "
        f"sequence {calibration.sequence_us:,.1f} us, "
        f"attended token {calibration.attended_token_us:.4f} us, "
        f"host {calibration.overhead_us:,.0f} us\n"
        f"fitted to {calibration.iterations:,} iterations; off by {calibration.median_error:.1%} "
        f"in the median, {calibration.p95_error:.1%} at p95\n"
    )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    from skippy_sched.simulate.traces import TraceError

    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}") from error
