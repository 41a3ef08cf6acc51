"""Requests that share a long prefix: tokens computed and time to finish, cache on against off.

Both caches (a copy per lane, a shared pool) run side by side, rounds interleaved; the figures are
medians of the rounds. Uses the engine directly, so that HTTP plays no part.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skippy_sched import Config, Engine, RequestParams
from skippy_sched.default_model import default_model


def config(options: argparse.Namespace, kv: str, cache: bool) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(options.model or default_model())},
            "engine": {
                "lanes": options.requests,
                "context_tokens": options.prefix + options.tail + options.output + 8,
                "kv": kv,
                "threads": options.threads,
            },
            "scheduler": {"prefix_cache_tokens": 65536 if cache else 0},
        }
    )


async def round_of(options: argparse.Namespace, kv: str, cache: bool) -> tuple[float, int, int]:
    """Seconds until all have ended, prompt tokens computed, prompt tokens taken from the cache."""
    first = 1000  # ordinary word pieces in any vocabulary
    prefix = [first + n * 7 % 997 for n in range(options.prefix)]
    params = RequestParams(max_tokens=options.output, ignore_eos=True)

    async def one(engine: Engine, number: int) -> None:
        tail = [first + 1000 + number * 53 + n for n in range(options.tail)]
        async for event in engine.generate([*prefix, *tail], params):
            if event.usage is not None:
                assert event.usage.completion_tokens == options.output

    async with Engine.open(config(options, kv, cache)) as engine:
        began = time.perf_counter()
        await asyncio.gather(*(one(engine, n) for n in range(options.requests)))
        took = time.perf_counter() - began
        now = engine.statistics()
        return took, now.prefill_tokens, now.cached_tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the default model")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512, help="tokens that all share")
    parser.add_argument("--tail", type=int, default=16, help="tokens of their own")
    parser.add_argument("--output", type=int, default=8, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(kv, cache) for kv in ("per_lane", "shared") for cache in (True, False)]
    taken: dict[tuple[str, bool], list[tuple[float, int, int]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            taken[case].append(asyncio.run(round_of(options, *case)))
    table = Table(
        "KV",
        "cache",
        "s (median)",
        "min..max",
        "computed",
        "cached",
        "faster than off",
        title=f"{options.requests} requests, {options.prefix} shared + {options.tail} own tokens",
    )
    report = []
    for kv, cache in cases:
        seconds = [s for s, _, _ in taken[kv, cache]]
        _, computed, cached = taken[kv, cache][0]
        off = statistics.median(s for s, _, _ in taken[kv, False])
        ratio = off / statistics.median(seconds)
        report.append(
            {"kv": kv, "cache": cache, "seconds": seconds, "computed": computed, "ratio": ratio}
        )
        table.add_row(
            kv,
            "on" if cache else "off",
            f"{statistics.median(seconds):.2f}",
            f"{min(seconds):.2f}..{max(seconds):.2f}",
            str(computed),
            str(cached),
            f"{ratio:.2f}x" if cache else "",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    bound = options.prefix + options.requests * (options.tail + 32)
    worst = max(row["computed"] for row in report if row["cache"])
    Console().print(f"computed with the cache: {worst} tokens; bound: {bound}")
    return 0 if worst <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
