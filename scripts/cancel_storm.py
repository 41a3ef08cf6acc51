"""Rounds of many streams of which half are closed at random moments; what must hold after each.

    python scripts/cancel_storm.py http://127.0.0.1:8080 --pid PID

Checks that the server comes to rest (nothing running or waiting, every lane free, read from
/metrics), that every stream left alone ends with exactly the tokens it asked for, and, given the
server's process id, that its memory stays flat. Exit code 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from _client import Answer, Client, Closed, loop_factory, read_metrics
from _report import machine
from _wire import MalformedResponse
from _workload import Planned, Prompts
from rich.console import Console
from rich.live import Live
from rich.table import Table

#: between two looks at /metrics while the server comes to rest
LOOK_PERIOD_S = 0.02


@dataclass(frozen=True, slots=True)
class Round:
    """What one round showed; ``settle_s`` None: not at rest in time."""

    closed: int
    exact: int
    wrong: list[str]
    duration_s: float
    settle_s: float | None
    at_rest: str
    rss_bytes: int | None


def closing_moments(
    args: argparse.Namespace, number: int, round_s: float | None
) -> list[dict[str, Any]]:
    """For each stream when to close it: half of them by events or by time, the rest never.

    Closes by events hit running requests; those by time also hit queued ones and prefills, and
    close in the middle a stream that got that far before. Half of the tokens is the latest
    moment, since a token need not bring text and an answer must not end before its close.
    """
    middle = max(1, args.output_tokens // 2)
    generator = random.Random(f"{args.seed} round {number}")
    victims = generator.sample(range(args.streams), args.streams // 2)
    moments: list[dict[str, Any]] = [{} for _ in range(args.streams)]
    for order, stream in enumerate(victims):
        if order % 2 and round_s is not None:
            moments[stream]["close_after_s"] = generator.uniform(0, round_s)
            moments[stream]["close_after_events"] = middle
        else:
            moments[stream]["close_after_events"] = generator.randrange(middle)
    return moments


def faults(answer: Answer) -> str | None:
    """Why a stream that was left alone is not exact, None if it is."""
    if answer.error is not None:
        return f"{answer.error}: {answer.error_message[:120]}"
    if answer.completion_tokens != answer.expected_tokens:
        return f"{answer.completion_tokens} tokens instead of {answer.expected_tokens}"
    if answer.finish_reason != "length":
        return f"finish reason {answer.finish_reason!r} instead of 'length'"
    return None


def busy(metrics: dict[str, float]) -> str | None:
    """What is not at rest, None if all is."""
    for name in ("skippy:num_requests_running", "skippy:num_requests_waiting"):
        if name not in metrics:
            return f"/metrics has no {name}"
        if metrics[name]:
            return f"{name} is {metrics[name]:g}"
    free, lanes = metrics.get("skippy:lanes_free"), metrics.get("skippy:lanes")
    if free is None or lanes is None:
        return "/metrics has no skippy:lanes_free or no skippy:lanes"
    return f"{free:g} of {lanes:g} lanes free" if free != lanes else None


async def settle(client: Client, limit_s: float) -> tuple[float | None, str]:
    """Wait until the server is at rest: seconds it took, None if it did not; and what was seen."""
    start = perf_counter()
    while True:
        try:
            response = await client.get("/metrics")
            state = busy(read_metrics(response.body.decode()))
        except (OSError, Closed, MalformedResponse) as error:
            return None, f"/metrics cannot be read: {error}"
        elapsed_s = perf_counter() - start
        if state is None:
            return elapsed_s, "at rest"
        if elapsed_s > limit_s:
            return None, state
        await asyncio.sleep(LOOK_PERIOD_S)


def rss_bytes(pid: int | None) -> int | None:
    """The resident memory of a process."""
    if pid is None:
        return None
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return None


async def play_round(
    client: Client, args: argparse.Namespace, model: str, number: int, round_s: float | None
) -> Round:
    """Start all streams at once, close half of them, wait for the rest and for calm."""
    prompts = Prompts(args.seed, "ids", range(261, 511))
    planned = Planned(0.0, args.prompt_tokens, args.output_tokens)
    moments = closing_moments(args, number, round_s)
    answers = [Answer(args.output_tokens, args.prompt_tokens) for _ in moments]
    start = perf_counter()
    async with asyncio.TaskGroup() as group:
        for stream, (answer, moment) in enumerate(zip(answers, moments, strict=True)):
            body = {
                "model": model,
                "prompt": prompts.pieces(number * args.streams + stream, planned),
                "max_tokens": args.output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            request = client.request_bytes("POST", "/v1/completions", json.dumps(body).encode())
            group.create_task(client.generate(request, answer, **moment))
    duration_s = perf_counter() - start
    settle_s, at_rest = await settle(client, args.settle)
    kept = [answer for answer in answers if not answer.is_cancelled]
    wrong = [fault for answer in kept if (fault := faults(answer))]
    closed = len(answers) - len(kept)
    exact = len(kept) - len(wrong)
    return Round(closed, exact, wrong, duration_s, settle_s, at_rest, rss_bytes(args.pid))


def growth(sizes: list[int]) -> float | None:
    """Memory of the last quarter of rounds over that of the second quarter; None if too few.

    The first quarter is left out: pools and caches fill there.
    """
    quarter = len(sizes) // 4
    if quarter == 0:
        return None
    early = statistics.median(sizes[quarter : 2 * quarter])
    return statistics.median(sizes[-quarter:]) / early - 1


async def storm(args: argparse.Namespace, say: Console) -> list[str]:
    """All rounds; returns what did not hold."""
    table = Table("round", "closed", "exact", "seconds", "at rest after", "server RSS")
    broken: list[str] = []
    sizes: list[int] = []
    round_s: float | None = None
    async with Client(args.url, timeout_s=args.timeout) as client:
        model = json.loads((await client.get("/v1/models")).body)["data"][0]["id"]
        with Live(table, console=say, auto_refresh=False) as live:
            for number in range(1, args.rounds + 1):
                played = await play_round(client, args, model, number, round_s)
                round_s = played.duration_s
                broken += [f"round {number}: {fault}" for fault in played.wrong]
                if played.closed < args.streams // 2:
                    broken.append(
                        f"round {number}: only {played.closed} of {args.streams // 2} streams "
                        "were open at the moment of their close; raise --output-tokens"
                    )
                if played.settle_s is None:
                    broken.append(f"round {number}: not at rest: {played.at_rest}")
                if played.rss_bytes is not None:
                    sizes.append(played.rss_bytes)
                table.add_row(
                    str(number),
                    str(played.closed),
                    f"{played.exact} of {args.streams - played.closed}",
                    f"{played.duration_s:.2f}",
                    played.at_rest if played.settle_s is None else f"{played.settle_s:.3f} s",
                    f"{sizes[-1] / 2**20:.1f} MiB" if played.rss_bytes is not None else "-",
                )
                live.refresh()
    if (grown := growth(sizes)) is not None:
        say.print(f"memory, last quarter of rounds over the second: {grown:+.1%}")
        if grown > args.rss_growth_max / 100:
            broken.append(f"memory grew by {grown:.1%}, the limit is {args.rss_growth_max:g} %")
    return broken


def main() -> int:
    cli = argparse.ArgumentParser(description="Close half of many streams at random moments.")
    cli.add_argument("url", help="http://HOST:PORT")
    cli.add_argument("--pid", type=int, help="the server's process, to read its memory")
    cli.add_argument("--streams", type=int, default=64)
    cli.add_argument("--rounds", type=int, default=20)
    cli.add_argument("--prompt-tokens", type=int, default=32)
    cli.add_argument("--output-tokens", type=int, default=64)
    cli.add_argument("--seed", type=int, help="default: a random one, printed")
    cli.add_argument("--settle", type=float, default=5.0, help="seconds to come to rest")
    cli.add_argument("--timeout", type=float, default=300.0, help="seconds per stream")
    cli.add_argument("--rss-growth-max", type=float, default=5.0, help="percent")
    args = cli.parse_args()
    if args.seed is None:
        args.seed = secrets.randbelow(2**32)
    say = Console(highlight=False, soft_wrap=True)
    say.print(f"machine: {machine()}\nseed: {args.seed}")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            broken = runner.run(storm(args, say))
    except (OSError, Closed, MalformedResponse, ValueError, LookupError) as error:
        Console(stderr=True).print(f"cancel_storm: error: {error}", markup=False)
        return 1
    for line in broken[:20]:
        say.print(line, markup=False)
    say.print(f"{len(broken)} things did not hold" if broken else "all held")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
