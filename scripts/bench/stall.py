"""A long prompt among running streams: how long they stand still, and how long it takes.

    python scripts/bench/stall.py --rounds 5 --llama-server PATH --json stall.json

Streams decode; their median inter-token latency sets the target of ours, by the factors of
--targets. Then a long prompt arrives. Worst gap of a stream while the prompt is computed, against
the target; time to the prompt's first token, against that of a server that lets it stop the
others ("unrestricted"). All servers stay up, and rounds go through them in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _client import Answer, Client, loop_factory
from _report import machine, percentile
from _servers import Server, Setting, daemon, llama_server
from rich.console import Console
from rich.table import Table

from skippy_sched.default_model import default_model

#: tokens that each stream has had before the prompt comes: what they are without it
STEADY_TOKENS = 60
#: a target that nothing reaches
UNRESTRICTED_MS = 1e6


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    stream_prompt: int
    stream_tokens: int
    long_prompt: int


@dataclass(frozen=True, slots=True)
class Round:
    """Milliseconds. ``usual`` is the streams' median gap when all run and the prompt has not come;
    ``alone`` each stream's largest gap then, which is the machine's own unrest; ``worst`` the
    largest while the prompt was computed."""

    usual_ms: float
    alone_ms: tuple[float, ...]
    worst_ms: tuple[float, ...]
    gaps_ms: tuple[float, ...]
    ttft_ms: float


async def run_round(server: Server, load: Load, seed: int) -> Round:
    """Raises RuntimeError if a request fails."""
    random = Random(seed)
    async with Client(server.url, timeout_s=600) as client:

        def request(prompt: int, tokens: int) -> bytes:
            body = {
                "model": "any",
                "prompt": random.choices(range(261, 511), k=prompt),
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "cache_prompt": False,
            }
            if "skippy" in server.name:
                del body["cache_prompt"], body["model"]
            return client.request_bytes("POST", "/v1/completions", json.dumps(body).encode())

        answers = [Answer(load.stream_tokens) for _ in range(load.streams)]
        long = Answer(1)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    client.generate(request(load.stream_prompt, load.stream_tokens), answer)
                )
                for answer in answers
            ]
            while min(len(answer.text_at) for answer in answers) < STEADY_TOKENS:
                if any(task.done() for task in tasks):
                    break
                await asyncio.sleep(0.01)
            await client.generate(request(load.long_prompt, 1), long)
            for task in tasks:
                task.cancel()
    for answer in (*answers, long):
        if answer.error or (answer.is_complete and answer is not long):
            why = answer.error_message or "a stream ended before the prompt: raise --stream-tokens"
            raise RuntimeError(f"{server.name}: {answer.error}: {why}")
    all_started = max(answer.text_at[0] for answer in answers)
    usual, alone, worst, gaps = [], [], [], []
    for answer in answers:
        before_it = [
            after - before
            for before, after in pairwise(answer.text_at)
            if before > all_started and after < long.sent_at
        ]
        usual += before_it
        alone.append(max(before_it))
        during = [
            after - before
            for before, after in pairwise([*answer.text_at, long.ended_at])
            if after > long.sent_at and before < long.text_at[0]
        ]
        gaps += during
        worst.append(max(during))
    return Round(
        usual_ms=statistics.median(usual) * 1000,
        alone_ms=tuple(gap * 1000 for gap in alone),
        worst_ms=tuple(gap * 1000 for gap in worst),
        gaps_ms=tuple(gap * 1000 for gap in gaps),
        ttft_ms=(long.text_at[0] - long.sent_at) * 1000,
    )


def summary(name: str, target_ms: float | None, rounds: Sequence[Round]) -> dict[str, object]:
    """Gaps against the target, or against the usual gap where there is no target."""
    worst = sorted(gap for r in rounds for gap in r.worst_ms)
    gaps = sorted(gap for r in rounds for gap in r.gaps_ms)
    return {
        "name": name,
        "target_ms": target_ms,
        "usual_ms": statistics.median(r.usual_ms for r in rounds),
        "alone_p95_ms": percentile(sorted(gap for r in rounds for gap in r.alone_ms), 95),
        "gap_p50_ms": percentile(gaps, 50),
        "gap_p95_ms": percentile(gaps, 95),
        "worst_p50_ms": percentile(worst, 50),
        "worst_p95_ms": percentile(worst, 95),
        "worst_ms": worst[-1],
        "ttft_ms": statistics.median(r.ttft_ms for r in rounds),
        "ttft_least_ms": min(r.ttft_ms for r in rounds),
        "rounds": [asdict(r) for r in rounds],
    }


async def measure(args: argparse.Namespace) -> list[dict[str, object]]:
    say = Console(stderr=True, highlight=False)
    load = Load(args.streams, args.stream_prompt, args.stream_tokens, args.long_prompt)
    model = args.model or default_model()
    setting = Setting(model, args.threads, args.streams + 1, batch_tokens=args.batch_tokens)
    # The prompt must be computed anew in each round.
    off = {"prefix_cache_tokens": 0}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        free = await enter(
            daemon(setting, "skippy-sched", inter_token_target_ms=UNRESTRICTED_MS, **off)
        )
        warm = [await run_round(free, load, seed) for seed in range(2)]
        usual_ms = statistics.median(r.usual_ms for r in warm)
        say.print(f"usual gap: {usual_ms:.1f} ms")
        running: list[tuple[str, float | None, Server]] = [("unrestricted", None, free)]
        for factor in args.targets:
            target_ms = round(factor * usual_ms, 1)
            server = await enter(
                daemon(setting, "skippy-sched", inter_token_target_ms=target_ms, **off)
            )
            running.append((f"target x{factor:g}", target_ms, server))
        if args.llama_server:
            server = await enter(llama_server(args.llama_server, setting))
            running.append(("llama-server", None, server))
        found: dict[str, list[Round]] = {name: [] for name, _, _ in running}
        for number in range(-args.warmup, args.rounds):
            for name, _, server in running:
                one = await run_round(server, load, 1000 + number)
                say.print(
                    f"{number} {name}: usual {one.usual_ms:.0f}, worst {max(one.worst_ms):.0f}, "
                    f"TTFT {one.ttft_ms:.0f} ms"
                )
                if number >= 0:
                    found[name].append(one)
    return [summary(name, target, found[name]) for name, target, _ in running]


def show(rows: list[dict[str, object]]) -> None:
    table = Table("", title="A long prompt among streams, ms")
    base = rows[0]["ttft_ms"]
    columns = (
        "target",
        "usual",
        "worst before",
        "p95",
        "worst p95",
        "worst",
        "/ target",
        "TTFT",
        "x",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        reference = row["target_ms"] or row["usual_ms"]
        table.add_row(
            str(row["name"]),
            f"{row['target_ms'] or 0:.0f}" if row["target_ms"] else "-",
            f"{row['usual_ms']:.0f}",
            f"{row['alone_p95_ms']:.0f}",
            f"{row['gap_p95_ms']:.0f}",
            f"{row['worst_p95_ms']:.0f}",
            f"{row['worst_ms']:.0f}",
            f"{row['worst_p95_ms'] / reference:.2f}, {row['worst_ms'] / reference:.2f}",  # type: ignore[operator]
            f"{row['ttft_ms']:.0f}",
            f"{row['ttft_ms'] / base:.2f}",  # type: ignore[operator]
        )
    say = Console(highlight=False, width=120)
    say.print(f"machine: {machine()}", table)
    say.print("worst before: p95 of the streams' worst gaps before the prompt came")
    say.print("/ target: p95 and largest of the streams' worst gaps; without target / usual gap")


def main() -> int:
    cli = argparse.ArgumentParser(description="How long a long prompt stops running streams.")
    cli.add_argument("--model", type=Path, help="GGUF; default: the default model")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--batch-tokens", type=int, default=512)
    cli.add_argument("--streams", type=int, default=8)
    cli.add_argument("--stream-prompt", type=int, default=32)
    cli.add_argument("--stream-tokens", type=int, default=1500)
    cli.add_argument("--long-prompt", type=int, default=1500)
    cli.add_argument("--targets", type=float, nargs="*", default=[2.0, 4.0])
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--warmup", type=int, default=1, help="rounds before, so that costs are known")
    cli.add_argument("--llama-server", type=Path, metavar="PATH", help="its binary, beside ours")
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, too
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        rows = runner.run(measure(args))
    show(rows)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
