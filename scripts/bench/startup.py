"""Start and memory of the daemon and of llama-server: until ready, first token, MiB.

    python scripts/bench/startup.py --rounds 5 --json startup.json

In a round each is started alone, asked for one token, then for answers on all lanes at once, and
ended. The model file is in the page cache; both map it, so PSS is the figure of a process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _client import loop_factory
from _report import machine
from _servers import Server, Setting, daemon, llama_server
from _workload import Planned
from compare import OURS, THEIRS, Figures, closed, spread
from peers import binaries
from rich.console import Console
from rich.table import Table

from skippy_sched.default_model import default_model

TITLES = {
    "ready_s": "process start to ready, s",
    "first_token_s": "process start to the first token, s",
    "rss_start_mib": "RSS after the start, MiB",
    "pss_start_mib": "PSS after the start, MiB",
    "rss_load_mib": "RSS after all lanes answered, MiB",
    "pss_load_mib": "PSS after all lanes answered, MiB",
}


def memory(server: Server, kind: str) -> float:
    found = server.memory_mib(kind)
    assert found is not None, "started here"
    return found


async def round_of(starting: AbstractAsyncContextManager[Server], lanes: int, seed: int) -> Figures:
    began = perf_counter()
    async with starting as server:
        assert server.start_s is not None
        found = {
            "ready_s": server.start_s,
            "rss_start_mib": memory(server, "Rss"),
            "pss_start_mib": memory(server, "Pss"),
        }
        asked_s = perf_counter() - began
        one = await closed(server, 1, 1, Planned(0.0, 16, 1), seed)
        found["first_token_s"] = asked_s + one["median_ttft_ms"] / 1000
        await closed(server, lanes, lanes, Planned(0.0, 32, 16), seed)
        return found | {
            "rss_load_mib": memory(server, "Rss"),
            "pss_load_mib": memory(server, "Pss"),
        }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    built = await asyncio.to_thread(binaries)
    model = args.model or default_model()
    setting = Setting(model, args.threads, args.lanes, args.context_tokens)
    rounds: dict[str, list[Figures]] = {OURS: [], THEIRS: []}
    for number in range(args.rounds):
        rounds[OURS].append(await round_of(daemon(setting), args.lanes, number))
        rounds[THEIRS].append(
            await round_of(llama_server(built.llama_server, setting), args.lanes, number)
        )
    return {"machine": machine(), "lanes": args.lanes, "rounds": rounds}


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("--model", type=Path, help="GGUF; default: the default model")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--lanes", type=int, default=32)
    cli.add_argument("--context-tokens", type=int, default=2048, help="of a lane")
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(measure(args))
    table = Table("", OURS, THEIRS, title="Medians of rounds (least..most)")
    for key, title in TITLES.items():
        digits = 2 if key.endswith("_s") else 0
        cells = [spread([f[key] for f in found["rounds"][who]], digits) for who in (OURS, THEIRS)]
        table.add_row(title, *cells)
    Console(highlight=False, width=110).print(f"machine: {found['machine']}", table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
