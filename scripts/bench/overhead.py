"""What the scheduler costs by itself: microseconds an iteration on a simulated engine at no cost.

    python scripts/bench/overhead.py --json overhead.json

Two setups: ``core`` is planner, runner and reconcile in one thread; ``engine`` is the whole
Engine with its worker thread, and a consuming task per stream. ``native`` is the prepared native
call alone, which both contain. Times are processor time of all threads, because other
processes on the machine do not add to it; wall time stands beside it. Knows no HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _report import machine

from skippy_sched.config import Config
from skippy_sched.native import DecodeRows, Model
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.loading import open_model
from skippy_sched.scheduler.observe import IterationRecord, RequestRecord
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.simulate.driver import VirtualEngine

PROMPT = list(range(300, 308))
#: what issue-sized targets allow: microseconds per iteration and per running sequence
FIXED_US_MAX, SEQUENCE_US_MAX = 100.0, 3.0


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds an iteration: the least and the median round, and the least of the wall."""

    setup: str
    running: int
    waiting: int
    cpu_us_min: float
    cpu_us_median: float
    wall_us_min: float


class Stopwatch:
    """Processor and wall time of rounds of iterations."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.cpu_us: list[float] = []
        self.wall_us: list[float] = []
        self._since: tuple[float, float] | None = None

    def mark(self) -> None:
        """A round of ``iterations`` has just ended, or the first begins."""
        now = time.process_time(), time.perf_counter()
        if self._since is not None:
            self.cpu_us.append((now[0] - self._since[0]) / self.iterations * 1e6)
            self.wall_us.append((now[1] - self._since[1]) / self.iterations * 1e6)
        self._since = now

    def figure(self, setup: str, running: int, waiting: int) -> Figure:
        cpu = self.cpu_us
        return Figure(setup, running, waiting, min(cpu), statistics.median(cpu), min(self.wall_us))


def config(path: Path, running: int, waiting: int) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(path)},
            "engine": {
                "library": "sim",
                "lanes": running,
                "context_tokens": 8192,
                "batch_tokens": max(512, running),
            },
            "scheduler": {"waiting_requests_max": running + waiting + 1},
        }
    )


@contextmanager
def sim_model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "free.sim"
        path.write_text("skippy-sim 1\nclock = virtual\nwords_only = true\nn_ctx_train = 8192\n")
        yield path


def params() -> RequestParams:
    return RequestParams(max_tokens=8192 - len(PROMPT), ignore_eos=True)


def repeat(watch: Stopwatch, rounds: int, iterate: Callable[[], object]) -> None:
    gc.collect()
    gc.freeze()
    watch.mark()
    for _ in range(rounds):
        for _ in range(watch.iterations):
            iterate()
        watch.mark()
    gc.unfreeze()


def native(path: Path, running: int, rounds: int, iterations: int) -> Figure:
    """The library's own time: the same call again and again, without anything around it."""
    model: Model = open_model(config(path, running, 0))
    sessions = [model.create_session() for _ in range(running)]
    decodes = DecodeRows(sessions, [None] * running)
    tokens = [300] * running
    watch = Stopwatch(iterations)
    repeat(watch, rounds, lambda: model.batch.run_with_decodes(decodes, tokens, ()))
    model.close()
    return watch.figure("native", running, 0)


def core(path: Path, running: int, waiting: int, rounds: int, iterations: int) -> Figure:
    settings = config(path, running, waiting)
    with open_model(settings) as model:
        engine = VirtualEngine(settings, model)
        for _ in range(running + waiting):
            engine.scheduler.submit(engine.intake.request(list(PROMPT), params(), None, 0.0))
        while len(engine.scheduler.state.decoding) < running:
            engine.step()
        watch = Stopwatch(iterations)
        repeat(watch, rounds, engine.step)
        return watch.figure("core", running, waiting)


class Marks:
    """Observes an engine; tells the stopwatch when a round's iterations are over."""

    def __init__(self, watch: Stopwatch, running: int, rounds: int) -> None:
        self.done = asyncio.Event()
        self._watch = watch
        self._running = running
        self._left = (rounds + 1) * watch.iterations

    def on_iteration(self, record: IterationRecord) -> None:
        if record.decode_requests < self._running or self._left < 0:
            return
        if self._left % self._watch.iterations == 0:
            self._watch.mark()
        if self._left == 0:
            self.done.set()
        self._left -= 1

    def on_request_end(self, record: RequestRecord) -> None:
        pass


@asynccontextmanager
async def consumed(engine: Engine, streams: int) -> AsyncIterator[None]:
    """So many requests, each with a task that reads it."""

    async def read() -> None:
        async with await engine.submit(PROMPT, params()) as stream:
            async for _ in stream:
                pass

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(read()) for _ in range(streams)]
        yield
        for task in started:
            task.cancel()


async def whole(path: Path, running: int, waiting: int, rounds: int, iterations: int) -> Figure:
    watch = Stopwatch(iterations)
    marks = Marks(watch, running, rounds)
    async with (
        Engine.open(config(path, running, waiting), observer=marks) as engine,
        consumed(engine, running + waiting),
    ):
        await marks.done.wait()
    # The first round warms up.
    del watch.cpu_us[0], watch.wall_us[0]
    return watch.figure("engine", running, waiting)


def fit(figures: list[Figure]) -> tuple[float, float]:
    """Fixed and per running sequence, of those without waiting requests; errors are relative."""
    rows = [(f.running, f.cpu_us_min) for f in figures if not f.waiting]
    matrix = np.array([[1 / us, running / us] for running, us in rows])
    solved, *_ = np.linalg.lstsq(matrix, np.ones(len(rows)), rcond=None)
    return float(solved[0]), float(solved[1])


def show(figures: list[Figure]) -> None:
    say = Console(highlight=False)
    table = Table("setup", title="Scheduler overhead, µs an iteration")
    for column in ("running", "waiting", "CPU least", "CPU median", "wall least", "CPU / seq."):
        table.add_column(column, justify="right")
    for f in figures:
        table.add_row(
            f.setup,
            str(f.running),
            f"{f.waiting:,}",
            f"{f.cpu_us_min:.0f}",
            f"{f.cpu_us_median:.0f}",
            f"{f.wall_us_min:.0f}",
            f"{f.cpu_us_min / f.running:.2f}",
        )
    say.print(f"machine: {machine()}", table)
    for setup in dict.fromkeys(f.setup for f in figures):
        fixed, per = fit([f for f in figures if f.setup == setup])
        say.print(f"{setup}: {fixed:.0f} µs + {per:.2f} µs per running sequence")


def main() -> int:
    cli = argparse.ArgumentParser(description="The scheduler's own cost per iteration.")
    cli.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    cli.add_argument("--waiting", type=int, nargs="+", default=[0, 10_000])
    cli.add_argument("--rounds", type=int, default=7)
    cli.add_argument("--iterations", type=int, default=200, help="per round")
    cli.add_argument("--setup", nargs="+", default=["native", "core", "engine"])
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    figures: list[Figure] = []
    with sim_model() as path:
        for setup in args.setup:
            for running in args.running:
                for waiting in args.waiting:
                    if setup == "native" and waiting:
                        continue
                    size = args.rounds, args.iterations
                    if setup == "native":
                        figures.append(native(path, running, *size))
                    elif setup == "core":
                        figures.append(core(path, running, waiting, *size))
                    else:
                        figures.append(uvloop.run(whole(path, running, waiting, *size)))
    show(figures)
    if args.json:
        fits = {
            setup: dict(
                zip(
                    ("fixed_us", "per_sequence_us"),
                    fit([f for f in figures if f.setup == setup]),
                    strict=True,
                )
            )
            for setup in args.setup
        }
        found = {"machine": machine(), "figures": [asdict(f) for f in figures], "fits": fits}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
