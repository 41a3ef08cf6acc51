"""Streams with n-gram drafts against the same without, on a prompt that repeats itself.

    python scripts/bench/speculation.py --rounds 5 --json speculation.json

The best case for drafts: greedy, and the answer goes on as the prompt does. A round is one engine
with all streams at once; cases take turns, so that what disturbs the machine disturbs all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skippy_sched.config import Config
from skippy_sched.default_model import default_model
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

LINE = "{}. The quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens a second while all streams decode; counts and texts of the whole round."""

    speed: float
    drafted: int
    accepted: int
    texts: tuple[tuple[int, ...], ...]


def config(options: argparse.Namespace, streams: int, method: str) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(options.model or default_model())},
            "engine": {"lanes": streams, "context_tokens": 1024, "threads": options.threads},
            "speculation": {
                "method": method,
                "draft_tokens": options.draft,
                "requests_max": streams,
            },
        }
    )


async def round_of(options: argparse.Namespace, streams: int, method: str) -> Round:
    params = RequestParams(max_tokens=options.output, ignore_eos=True)
    came: list[tuple[float, int]] = []  # when, and how many tokens of a stream
    began: list[float] = []
    texts: list[tuple[int, ...]] = [()] * streams

    async def one(engine: Engine, number: int) -> None:
        prompt = "".join(LINE.format(number + 1) for _ in range(options.lines))
        async for event in engine.generate(prompt, params):
            now = time.perf_counter()
            if not texts[number]:
                began.append(now)
            came.append((now, len(event.token_ids)))
            texts[number] += event.token_ids

    async with Engine.open(config(options, streams, method)) as engine:
        await asyncio.gather(*(one(engine, number) for number in range(streams)))
        now = engine.statistics()
    start, end = max(began), max(at for at, _ in came)
    tokens = sum(count for at, count in came if at > start)
    return Round(tokens / (end - start), now.drafted_tokens, now.accepted_tokens, tuple(texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the default model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--draft", type=int, default=4, help="tokens guessed at once")
    parser.add_argument("--lines", type=int, default=8, help="equal lines of the prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens to generate")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [(streams, method) for streams in options.streams for method in ("off", "ngram")]
    rounds: dict[tuple[int, str], list[Round]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            rounds[case].append(asyncio.run(round_of(options, *case)))
    table = Table(
        "streams", "off", "ngram", "ratio", "min..max", "accepted", "same text", title="tokens/s"
    )
    report = []
    for streams in options.streams:
        off, on = rounds[streams, "off"], rounds[streams, "ngram"]
        speeds = {
            method: [one.speed for one in rounds[streams, method]] for method in ("off", "ngram")
        }
        ratios = [b / a for a, b in zip(speeds["off"], speeds["ngram"], strict=True)]
        accepted = on[0].accepted / max(1, on[0].drafted)
        same = all(a.texts == b.texts for a, b in zip(off, on, strict=True))
        report.append(
            {
                "streams": streams,
                "tokens_per_s": speeds,
                "ratios": ratios,
                "drafted": on[0].drafted,
                "accepted": on[0].accepted,
                "same_text": same,
            }
        )
        table.add_row(
            str(streams),
            f"{statistics.median(speeds['off']):.1f}",
            f"{statistics.median(speeds['ngram']):.1f}",
            f"{statistics.median(ratios):.2f}x",
            f"{min(ratios):.2f}..{max(ratios):.2f}",
            f"{accepted:.0%} of {on[0].drafted}",
            "yes" if same else "no",
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
