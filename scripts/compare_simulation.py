"""Compares what the simulator predicts with what an engine really does.

    python scripts/compare_simulation.py --requests 40

Runs two short loads on the real engine and records them; fits the simulator's costs to the first,
simulates the arrivals of the second, and prints what was measured and what was predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console

from skippy_sched.config import Config
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.simulate.calibrate import measure
from skippy_sched.simulate.commands import shown
from skippy_sched.simulate.driver import open_engine, run
from skippy_sched.simulate.prompts import Prompts
from skippy_sched.simulate.replay import recorded_arrivals
from skippy_sched.simulate.report import Report, latency_table
from skippy_sched.simulate.workload import Lengths, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skippy_sched.simulate.traces import Arrival

#: Ids that are ordinary text in every vocabulary of this size or more.
FIRST_TOKEN, TOKENS = 1000, 20_000


async def one(engine: Engine, arrival: Arrival, prompt: list[int], start: float) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(start + arrival.at_s - loop.time())
    params = RequestParams(max_tokens=arrival.output_tokens, ignore_eos=True)
    async with await engine.submit(prompt, params) as stream:
        async for _ in stream:
            pass


async def real_run(config: Config, arrivals: Sequence[Arrival], seed: int) -> None:
    """Serve the arrivals; the engine records what happens."""
    prompts = Prompts(seed)
    async with Engine.open(config, seed=seed) as engine, asyncio.TaskGroup() as tasks:
        start = asyncio.get_running_loop().time()
        for arrival in arrivals:
            tokens = [
                FIRST_TOKEN + (token * 79 + place) % TOKENS
                for place, token in enumerate(prompts.tokens(arrival))
            ]
            tasks.create_task(one(engine, arrival, tokens, start))


def simulated(config: Config, journal: Path, costs: dict[str, float], overhead_s: float) -> Report:
    report = Report()
    with open_engine(config, costs, overhead_s=overhead_s) as engine:
        run(engine, iter(recorded_arrivals(journal)), Prompts(), report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="GGUF file; without it the default model")
    parser.add_argument("--library", default="llama", help='"llama" or a libskippy\'s path')
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--requests", type=int, default=40, help="of each of the two runs")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second")
    parser.add_argument("--prompt-tokens", type=Lengths.parse, default="50-150")
    parser.add_argument("--output-tokens", type=Lengths.parse, default="10-40")
    parser.add_argument("--seed", type=int, default=0, help="of the load; the second run's is +1")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    model = options.model
    if model is None:
        from skippy_sched.default_model import default_model

        model = str(default_model())
    engine = {"library": options.library, "lanes": options.lanes}
    with TemporaryDirectory() as folder:
        journals = [Path(folder) / "calibration", Path(folder) / "measured"]
        for seed, journal in enumerate(journals, start=options.seed):
            workload = Workload(
                options.rate, options.prompt_tokens, options.output_tokens, seed=seed
            )
            config = Config.model_validate(
                {
                    "model": {"path": model},
                    "engine": engine,
                    "scheduler": {"journal": str(journal)},
                }
            )
            arrivals = list(islice(workload.arrivals(), options.requests))
            asyncio.run(real_run(config, arrivals, seed))
        calibration, _ = measure(journals[0])
        _, measured = measure(journals[1])
        plain = Config.model_validate({"engine": {**engine, "library": "sim"}})
        overhead_s = calibration.overhead_us / 1e6
        predicted = simulated(plain, journals[1], calibration.costs, overhead_s)
    runs: dict[str, dict[str, Any]] = {
        "measured": measured.summary(),
        "predicted": predicted.summary(),
    }
    sys.stdout.write(shown(calibration))
    console = Console()
    console.print(latency_table(runs))
    for name in ("ttft", "itl", "e2el"):
        for percentile in ("p50", "p95"):
            key = f"{percentile}_{name}_ms"
            ratio = runs["predicted"][key] / runs["measured"][key]
            sys.stdout.write(f"{key}: predicted {ratio - 1:+.1%} of measured\n")
    if options.json is not None:
        figures = {"calibration": calibration.to_json(), **runs}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
