"""What HTTP and SSE cost per token: the daemon against the embedded Engine, both simulated.

    python scripts/bench/http_cost.py --json http.json

The simulated engine computes in no time, so the processor time is that of scheduler, text and, in
the daemon, HTTP. It is the time of all threads of the process; the client is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overhead
from _client import loop_factory
from _report import machine
from _servers import Setting, daemon
from _workload import Planned
from compare import closed, spread
from rich.console import Console
from rich.table import Table

from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

PROMPT_TOKENS = 8


async def embedded(path: Path, streams: int, tokens: int) -> float:
    """Microseconds a token, of tasks that read the engine's streams."""
    params = RequestParams(max_tokens=tokens, ignore_eos=True)

    async def read(engine: Engine) -> None:
        async for _ in engine.generate(list(range(300, 300 + PROMPT_TOKENS)), params):
            pass

    async with Engine.open(overhead.config(path, streams, 0)) as engine:
        began = time.process_time()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(read(engine))
        return (time.process_time() - began) / (streams * tokens) * 1e6


async def served(path: Path, streams: int, tokens: int, seed: int) -> float:
    setting = Setting(path, 1, streams, 8192, max(512, streams))
    async with daemon(setting, library="sim") as server:
        shape = Planned(0.0, PROMPT_TOKENS, tokens)
        return (await closed(server, streams, streams, shape, seed))["cpu_ms_per_token"] * 1000


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = []
    with overhead.sim_model() as path:
        for streams in args.streams:
            engine, http = [], []
            for number in range(args.rounds):
                engine.append(await embedded(path, streams, args.tokens))
                http.append(await served(path, streams, args.tokens, number))
            cost = [b - a for a, b in zip(engine, http, strict=True)]
            rows.append({"streams": streams, "engine_us": engine, "daemon_us": http, "us": cost})
    return {"machine": machine(), "rows": rows}


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--streams", type=int, nargs="+", default=[1, 16, 32])
    cli.add_argument("--tokens", type=int, default=2000, help="of each answer")
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(measure(args))
    table = Table("streams", "embedded", "daemon", "HTTP and SSE", title="CPU µs per token")
    for row in found["rows"]:
        table.add_row(
            str(row["streams"]), *(spread(row[key], 1) for key in ("engine_us", "daemon_us", "us"))
        )
    Console(highlight=False, width=110).print(f"machine: {found['machine']}", table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
