"""The daemon against llama-server and the bare engine loop: same model, threads, requests.

    python scripts/bench/compare.py closed-16 poisson --rounds 5 --json compare.json

Cases: ``closed-N`` keeps N requests in flight; ``poisson`` sends at a share of the capacity that
the slower server showed at 16; ``prefix`` is 16 requests at once with one long prefix; ``stall``
is a long prompt among streams. All stay up; in each round they are measured in turn, one at a
time, and ratios are of the figures of one round. The bare loop (roof) runs closed-N only. A round
in which other processes took much of the processor is measured again, and one in which a server
ended a stream with an error too, with other prompts. Each case begins with a round that does not
count: servers and processor come to their speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import stall
from _client import Client, loop_factory, read_metrics
from _quiet import Neighbours
from _report import machine, summarize
from _servers import LLAMA_FLAGS, Server, Setting, daemon, llama_server
from _workload import Planned, Prompts, arrivals
from loadtest import EXTRAS, Load, UserError, closed_loop, find_model, open_loop, warm_up
from peers import binaries
from rich.console import Console
from rich.table import Table

from skippy_sched.default_model import default_model

OURS, THEIRS, ROOF = "skippy-sched", "llama-server", "bare loop"
CASES = ("closed-1", "closed-4", "closed-16", "closed-32", "poisson", "prefix", "stall")
TOKEN_IDS = range(261, 511)
#: requests of a round, per stream: short answers at few streams need more for a steady figure
WAVES = {1: 4, 4: 3}
#: the share of the capacity at which Poisson arrivals come
LOAD_SHARE = 0.7
#: cores that others may take in a round, and how often it is measured again if they took more
NEIGHBOUR_CORES_MAX = 0.15
TRIES_MAX = 3
#: llama-server ends about one in a hundred streams of random prompts with an error of its own
FAILED_TRIES_MAX = 8

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a case, and whether more of it is better."""

    key: str
    title: str
    is_rate: bool = False


THROUGHPUT = Metric("output_throughput", "output tokens/s", is_rate=True)
METRICS: dict[str, tuple[Metric, ...]] = {
    "closed": (THROUGHPUT, Metric("median_ttft_ms", "TTFT p50, ms")),
    "poisson": (
        Metric("p95_ttft_ms", "TTFT p95, ms"),
        Metric("p99_itl_ms", "ITL p99, ms"),
        Metric("median_itl_ms", "ITL p50, ms"),
    ),
    "prefix": (THROUGHPUT, Metric("p95_ttft_ms", "TTFT p95, ms")),
    "stall": (
        Metric("worst_gap_ms", "worst gap of a stream, ms"),
        Metric("long_ttft_ms", "TTFT of the long prompt, ms"),
    ),
}


def metrics_of(case: str) -> tuple[Metric, ...]:
    return METRICS["closed" if case.startswith("closed-") else case]


def ratios(metric: Metric, ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[float]:
    """Round by round, above 1 where ours is better."""
    pairs = [(a[metric.key], b[metric.key]) for a, b in zip(ours, theirs, strict=True)]
    return [a / b if metric.is_rate else b / a for a, b in pairs]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median and range: ``1.05 (1.01..1.08)``."""
    median = statistics.median(values)
    return f"{median:.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


# --- the bare loop ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roof:
    """A process that waits for orders on its standard input."""

    process: asyncio.subprocess.Process

    async def run(self, streams: int, prompt: int, output: int) -> Figures:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{streams} {prompt} {output}\n".encode())
        line = await self.process.stdout.readline()
        took = json.loads(line)
        ttft_ms = took["prefill_s"] * 1000
        whole_s = took["prefill_s"] + took["decode_s"]
        return {"output_throughput": streams * output / whole_s, "median_ttft_ms": ttft_ms}


@asynccontextmanager
async def roof(binary: Path, setting: Setting) -> AsyncIterator[Roof]:
    sizes = (setting.threads, setting.lanes, setting.context_tokens, setting.batch_tokens)
    process = await asyncio.create_subprocess_exec(
        binary,
        str(setting.model),
        *map(str, sizes),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Roof(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


# --- rounds of the servers ----------------------------------------------------------------------


async def drive(
    server: Server, shape: Planned, seed: int, prefix: int, run: Callable[[Load], Any]
) -> Figures:
    """Warm up, run, and summarize; raises RuntimeError if a request fails."""
    async with Client(server.url, timeout_s=600) as client:
        load = Load(
            client=client,
            prompts=Prompts(seed, "ids", TOKEN_IDS, prefix),
            model=await find_model(client),
            chat=False,
            stream=True,
            extras=EXTRAS,
            cancel_fraction=0.0,
            seed=seed,
            answers=[],
        )
        await warm_up(load, Planned(0.0, 16, 4), 1)
        before_s = server.cpu_s or 0.0
        await run(load)
        summary = summarize(load.answers, {})
        summary["cpu_ms_per_token"] = (
            ((server.cpu_s or 0.0) - before_s) * 1000 / max(1, summary["total_output_tokens"])
        )
    if summary["failed"] or summary["output_count_deviations"]:
        raise RuntimeError(f"{server.name}: {summary['error_samples'] or 'wrong token counts'}")
    return {key: value for key, value in summary.items() if isinstance(value, float | int)}


async def closed(server: Server, streams: int, requests: int, shape: Planned, seed: int) -> Figures:
    loop = argparse.Namespace(requests=requests, duration=None, concurrency=streams)
    return await drive(server, shape, seed, 0, lambda load: closed_loop(load, shape, loop))


async def poisson(server: Server, rate: float, requests: int, shape: Planned, seed: int) -> Figures:
    times = arrivals(rate, 1.0, random.Random(f"{seed} arrivals"))
    plan = [replace(shape, at_s=next(times)) for _ in range(requests)]
    return await drive(server, shape, seed, 0, lambda load: open_loop(load, plan))


async def prefix(server: Server, args: argparse.Namespace, seed: int) -> Figures:
    shape = Planned(0.0, args.prefix_tokens + args.tail_tokens, args.prefix_output)
    loop = argparse.Namespace(requests=16, duration=None, concurrency=16)
    run = drive(
        server, shape, seed, args.prefix_tokens, lambda load: closed_loop(load, shape, loop)
    )
    return await run


async def long_prompt(server: Server, args: argparse.Namespace, seed: int) -> Figures:
    load = stall.Load(8, 32, args.context_tokens - 40, args.long_prompt)
    one = await stall.run_round(server, load, seed)
    return {
        "worst_gap_ms": max(one.worst_ms),
        "long_ttft_ms": one.ttft_ms,
        "usual_gap_ms": one.usual_ms,
    }


async def lag(server: Server) -> dict[float, float]:
    """The daemon's lateness of its event loop so far: samples at most so many seconds late."""
    async with Client(server.url) as client:
        metrics = read_metrics((await client.get("/metrics")).body.decode())
    name = "skippy:loop_lag_seconds_bucket"
    return {
        float(series.partition('le="')[2].partition('"')[0]): value
        for series, value in metrics.items()
        if series.startswith(name + "{")
    }


def lag_p99_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """The bound of the bucket in which the 99th percentile between two readings lies."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values())
    return next(bound for bound, count in counts.items() if count >= 0.99 * total) * 1000


# --- the whole run ------------------------------------------------------------------------------


@dataclass(slots=True)
class Run:
    """What is measured, and what came of it: case, then who, then a list of rounds."""

    args: argparse.Namespace
    servers: dict[str, Server]
    roof: Roof
    rate: float = 0.0
    failures: list[str] = field(default_factory=list)

    async def one(self, case: str, who: str, seed: int) -> Figures:
        args = self.args
        shape = Planned(0.0, args.prompt_tokens, args.output_tokens)
        if case.startswith("closed-"):
            streams = int(case.removeprefix("closed-"))
            if who == ROOF:
                return await self.roof.run(streams, shape.prompt_tokens, shape.output_tokens)
            before = await lag(self.servers[OURS]) if who == OURS else {}
            requests = streams * WAVES.get(streams, 1)
            found = await closed(self.servers[who], streams, requests, shape, seed)
            if who == OURS:
                found["loop_lag_p99_ms"] = lag_p99_ms(before, await lag(self.servers[OURS]))
            return found
        server = self.servers[who]
        if case == "poisson":
            return await poisson(server, self.rate, args.poisson_requests, shape, seed)
        if case == "prefix":
            return await prefix(server, args, seed)
        return await long_prompt(server, args, seed)

    async def quiet_one(self, case: str, who: str, seed: int) -> Figures:
        """The least disturbed of a few tries; the first that is undisturbed ends them."""
        pids = [server.pid for server in self.servers.values() if server.pid is not None]
        tries: list[Figures] = []
        for number in range(FAILED_TRIES_MAX):
            neighbours = Neighbours([*pids, self.roof.process.pid])
            try:
                # prompts of another case, round or try could be in somebody's cache
                figures = await self.one(case, who, seed + 100 * number)
            except (RuntimeError, UserError) as error:
                self.failures.append(f"{case}: {error}")
                continue
            figures["others_cores"] = neighbours.cores()
            tries.append(figures)
            if figures["others_cores"] <= NEIGHBOUR_CORES_MAX or len(tries) == TRIES_MAX:
                break
        if not tries:
            raise RuntimeError(f"failed {FAILED_TRIES_MAX} times: {self.failures[-1]}")
        return min(tries, key=lambda figures: figures["others_cores"])

    async def calibrate(self) -> None:
        """Sets the Poisson rate by what the slower of the servers finishes at 16 streams."""
        for seed in (6, 7):  # the first is a warm-up
            found = [await self.quiet_one("closed-16", who, seed) for who in self.servers]
        self.rate = LOAD_SHARE * min(figures["request_throughput"] for figures in found)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    say = Console(stderr=True, highlight=False)
    built = await asyncio.to_thread(binaries)
    model = args.model or default_model()
    setting = Setting(model, args.threads, args.lanes, args.context_tokens, args.batch_tokens)
    rounds: dict[str, dict[str, list[Figures]]] = {}
    async with AsyncExitStack() as stack:
        servers = {
            OURS: await stack.enter_async_context(daemon(setting)),
            THEIRS: await stack.enter_async_context(llama_server(built.llama_server, setting)),
        }
        run = Run(args, servers, await stack.enter_async_context(roof(built.roof, setting)))
        if "poisson" in args.cases:
            await run.calibrate()
        for case in args.cases:
            names = [*servers, *([ROOF] if case.startswith("closed-") else [])]
            rounds[case] = {who: [] for who in names}
            for number in range(-1, args.rounds):
                turn = number % len(names)
                for who in names[turn:] + names[:turn]:
                    seed = args.seed + 1000 * CASES.index(case) + number
                    figures = await run.quiet_one(case, who, seed)
                    if number >= 0:
                        rounds[case][who].append(figures)
                    told = ", ".join(
                        f"{metric.title} {figures[metric.key]:.1f}" for metric in metrics_of(case)
                    )
                    others = f"others {figures['others_cores']:.2f} cores"
                    say.print(f"{case} {number + 1}/{args.rounds} {who}: {told}; {others}")
        return {
            "machine": machine(),
            "llama_cpp": built.llama_cpp,
            "model": model.name,
            "flags": " ".join(LLAMA_FLAGS),
            "poisson_rate": run.rate,
            "setting": {key: str(value) for key, value in vars(args).items() if key != "json"},
            "failures": run.failures,
            "rounds": rounds,
        }


def table(rounds: dict[str, dict[str, list[Figures]]]) -> Table:
    shown = Table("case", "figure", title="Medians of rounds (least..most); ratios above 1: better")
    for column in (OURS, THEIRS, "ratio", ROOF, "ours / bare loop"):
        shown.add_column(column, justify="right")
    for case, whose in rounds.items():
        for metric in metrics_of(case):
            cells = [spread([f[metric.key] for f in whose[who]], 1) for who in (OURS, THEIRS)]
            cells.append(spread(ratios(metric, whose[OURS], whose[THEIRS])))
            if ROOF in whose and metric.is_rate:
                cells.append(spread([f[metric.key] for f in whose[ROOF]], 1))
                cells.append(spread(ratios(metric, whose[OURS], whose[ROOF])))
            shown.add_row(case, metric.title, *cells)
    return shown


def main() -> int:
    cli = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cli.add_argument("cases", nargs="*", choices=CASES, default=[], metavar="CASE")
    cli.add_argument("--model", type=Path, help="GGUF; default: the default model")
    cli.add_argument("--threads", type=int, default=2)
    cli.add_argument("--lanes", type=int, default=32)
    cli.add_argument("--context-tokens", type=int, default=2048, help="of a lane")
    cli.add_argument("--batch-tokens", type=int, default=512)
    cli.add_argument("--prompt-tokens", type=int, default=128)
    cli.add_argument("--output-tokens", type=int, default=64)
    cli.add_argument("--prefix-tokens", type=int, default=512, help="shared by 16 requests")
    cli.add_argument("--tail-tokens", type=int, default=16, help="of each of them alone")
    cli.add_argument("--prefix-output", type=int, default=16)
    cli.add_argument("--long-prompt", type=int, default=1500)
    cli.add_argument("--poisson-requests", type=int, default=24)
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--seed", type=int, default=1)
    cli.add_argument("--json", type=Path)
    args = cli.parse_args()
    args.cases = args.cases or list(CASES)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the servers, too
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(measure(args))
    say = Console(highlight=False, width=150)
    say.print(
        f"machine: {found['machine']}\nllama.cpp: {found['llama_cpp']}", table(found["rounds"])
    )
    if found["failures"]:
        say.print(f"measured again for errors of a server: {len(found['failures'])}")
        say.print(*sorted(set(found["failures"])), sep="\n")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
