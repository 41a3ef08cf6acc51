"""Load test for any OpenAI-compatible server: closed loop, Poisson arrivals, or a trace.

    python scripts/loadtest.py http://127.0.0.1:8080 --concurrency 32 --requests 320
    python scripts/loadtest.py http://127.0.0.1:8080 --rate 4 --duration 60 --goodput ttft:500

Knows nothing of the server's inside but for one figure read from /metrics if it is there.
In open loop a request is sent at its time whatever the server does; every failed or refused one
stays in the denominator; warm-up requests are in no figure.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from _client import Answer, Client, Closed, loop_factory, read_metrics
from _options import check, parser
from _report import (
    details,
    figures_table,
    latency_table,
    machine,
    summarize,
)
from _wire import MalformedResponse
from _workload import (
    MOONCAKE_BLOCK_TOKENS,
    Planned,
    Prompts,
    TraceError,
    arrivals,
    fit_trace,
    read_trace,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    import argparse

#: twice a second is lively enough; each drawing takes processor time from the server
PROGRESS_PERIOD_S = 0.5

#: fields beyond OpenAI's completions that exact measuring needs; dropped where they are refused
EXTRAS: dict[str, Any] = {"ignore_eos": True, "stream_options": {"include_usage": True}}


class UserError(Exception):
    """What the user must change; printed as one line."""


@dataclass(slots=True)
class Load:
    """Everything that is the same for all requests of a run, and their answers."""

    client: Client
    prompts: Prompts
    model: str
    chat: bool
    stream: bool
    extras: dict[str, Any]
    cancel_fraction: float
    seed: int
    answers: list[Answer]
    ended: int = 0
    #: a complete answer's usual time: bounds the random moment of a close without a stream
    usual_s: float = 1.0

    def request(self, index: int, planned: Planned) -> bytes:
        """The bytes of one request; a pure function of seed and index."""
        pieces = self.prompts.pieces(index, planned)
        prompt = pieces if self.prompts.form == "ids" else " ".join(str(p) for p in pieces)
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            **self.extras,
        }
        if self.stream:
            body["stream"] = True
        else:
            body.pop("stream_options", None)
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        return self.client.request_bytes("POST", path, json.dumps(body).encode())

    async def send(
        self, index: int, planned: Planned, request: bytes, due_at: float | None
    ) -> None:
        """Send one request of the measured part, or close it at its random moment."""
        answer = Answer(planned.output_tokens, planned.prompt_tokens, due_at)
        self.answers.append(answer)
        moment = random.Random(f"{self.seed} close {index}")
        close: dict[str, Any] = {}
        if moment.uniform(0, 1) < self.cancel_fraction:
            if self.stream:
                close["close_after_events"] = moment.randrange(planned.output_tokens)
            else:
                close["close_after_s"] = moment.uniform(0, self.usual_s)
        await self.client.generate(request, answer, stream=self.stream, **close)
        self.ended += 1
        if answer.is_complete:
            self.usual_s = answer.ended_at - answer.sent_at


async def warm_up(load: Load, planned: Planned, count: int) -> None:
    """Send unmeasured requests one by one; the first finds out which extras the server takes."""
    warm = replace(load, prompts=replace(load.prompts, seed=load.seed + 1))
    variants = [EXTRAS, *({name: EXTRAS[name]} for name in EXTRAS), {}]
    if load.extras != EXTRAS:
        variants = [load.extras]
    for index in range(max(1, count)):
        for extras in variants:
            warm.extras = extras
            answer = Answer(planned.output_tokens)
            await warm.client.generate(warm.request(index, planned), answer, stream=load.stream)
            if answer.error not in ("http_400", "http_422"):
                break
        if answer.error:
            raise UserError(f"the warm-up request failed: {answer.error}: {answer.error_message}")
        variants = [warm.extras]
        load.extras = warm.extras
        load.usual_s = answer.ended_at - answer.sent_at


async def closed_loop(load: Load, planned: Planned, args: argparse.Namespace) -> None:
    """Keep ``concurrency`` requests in flight until enough were sent."""
    indexes = iter(range(args.requests)) if args.requests else itertools.count()
    end_at = perf_counter() + (args.duration or float("inf"))

    async def one_user() -> None:
        for index in indexes:
            request = load.request(index, planned)
            if perf_counter() >= end_at:
                return
            await load.send(index, planned, request, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(args.concurrency):
            group.create_task(one_user())


async def open_loop(load: Load, plan: list[Planned]) -> None:
    """Send each request at its time, however many are still unanswered."""
    start = perf_counter()
    async with asyncio.TaskGroup() as group:
        for index, planned in enumerate(plan):
            request = load.request(index, planned)  # before its time, so that it is not late
            due_at = start + planned.at_s
            await asyncio.sleep(max(0.0, due_at - perf_counter()))
            group.create_task(load.send(index, planned, request, due_at))


async def show_progress(load: Load, progress: Progress, total: int | None) -> None:
    task = progress.add_task("requests", total=total, flying=0)
    try:
        while True:
            flying = len(load.answers) - load.ended
            progress.update(task, completed=load.ended, flying=flying, refresh=True)
            await asyncio.sleep(PROGRESS_PERIOD_S)
    finally:
        progress.update(task, completed=load.ended, flying=0, refresh=True)


def plan_requests(args: argparse.Namespace, say: Console) -> list[Planned]:
    """The open loop's requests, or the one shape that a closed loop repeats."""
    shape = Planned(0.0, args.prompt_tokens, args.output_tokens)
    if args.trace:
        try:
            with args.trace.open() as lines:
                trace = read_trace(lines, name=args.trace.name)
        except (OSError, UnicodeDecodeError, TraceError) as error:
            raise UserError(f"--trace {args.trace}: {error}") from error
        plan, shortened = fit_trace(
            trace,
            time_scale=args.time_scale,
            length_scale=args.length_scale,
            context_tokens=args.context_tokens,
            duration_s=args.duration,
            requests_max=args.requests,
        )
        say.print(f"trace: {len(plan):,} of {len(trace):,} requests, {shortened:,} shortened")
        return plan
    if args.rate:
        times = arrivals(args.rate, args.burstiness, random.Random(f"{args.seed} arrivals"))
        if args.duration:
            times = itertools.takewhile(lambda at_s: at_s <= args.duration, times)
        plan = [replace(shape, at_s=at_s) for at_s in itertools.islice(times, args.requests)]
        if not plan:
            raise UserError(f"no arrival within --duration {args.duration}: raise it or --rate")
        return plan
    return [shape]


async def find_model(client: Client) -> str:
    """The first model that the server lists."""
    try:
        response = await client.get("/v1/models")
        return str(json.loads(response.body)["data"][0]["id"])
    except (OSError, Closed, MalformedResponse) as error:
        raise UserError(f"cannot reach the server: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError("the server lists no model at /v1/models: name one by --model") from error


async def metrics_of(client: Client) -> dict[str, float]:
    """The server's metrics, empty if it has none."""
    with suppress(OSError, Closed, MalformedResponse, ValueError):
        response = await client.get("/metrics")
        if response.status == 200:
            return read_metrics(response.body.decode())
    return {}


def decode_batch_mean(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Mean sequences per decode iteration between two readings, where the server tells."""
    names = ("skippy:decode_sequences_total", "skippy:decode_iterations_total")
    if any(name not in after for name in names):
        return None
    sequences, iterations = (after[name] - before.get(name, 0.0) for name in names)
    return sequences / iterations if iterations > 0 else None


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def drive(load: Load, plan: list[Planned], args: argparse.Namespace) -> bool:
    """Run the measured part; True if the user interrupted it."""
    is_open = bool(args.rate or args.trace)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[flying]} in flight"),
        TimeElapsedColumn(),
        console=Console(stderr=True, quiet=args.quiet),
        auto_refresh=False,
    )
    gc.collect()
    gc.freeze()  # what exists by now is never walked again while measuring
    with progress:
        async with asyncio.TaskGroup() as group:
            shown = group.create_task(
                show_progress(load, progress, len(plan) if is_open else args.requests)
            )
            try:
                await (open_loop(load, plan) if is_open else closed_loop(load, plan[0], args))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                return True
            finally:
                shown.cancel()
    return False


async def run(args: argparse.Namespace, say: Console) -> dict[str, Any]:
    """The whole test: plan, warm up, measure, summarize."""
    plan = plan_requests(args, say)
    key = os.environ.get(args.api_key_env) if args.api_key_env else None
    async with Client(args.url, api_key=key, timeout_s=args.timeout) as client:
        low, high = args.token_ids
        prompts = Prompts(
            args.seed,
            args.prompt_form,
            range(low, high),
            args.shared_prefix_tokens,
            max(1, round(MOONCAKE_BLOCK_TOKENS * args.length_scale)),
        )
        load = Load(
            client=client,
            prompts=prompts,
            model=args.model or await find_model(client),
            chat=args.endpoint == "chat",
            stream=not args.no_stream,
            extras=EXTRAS,
            cancel_fraction=args.cancel_fraction,
            seed=args.seed,
            answers=[],
        )
        await warm_up(load, plan[0], args.warmup)
        say.print(f"warm-up: {max(1, args.warmup)} requests sent before, in no figure")
        for name in EXTRAS:
            if name not in load.extras:
                say.print(f"the server refuses {name}: output lengths or counts may deviate")
        before = await metrics_of(client)
        cpu_before, started_at = cpu_s(), perf_counter()
        interrupted = await drive(load, plan, args)
        cpu, wall_s = cpu_s() - cpu_before, perf_counter() - started_at
        after = await metrics_of(client)
    summary = describe(args, load) | summarize(load.answers, args.goodput)
    summary |= {
        "interrupted": interrupted,
        "client_cpu_s": cpu,
        "client_cpu_share": cpu / wall_s,
        "sequences_per_decode_iteration": decode_batch_mean(before, after),
    }
    return summary | (details(load.answers) if args.detailed else {})


def describe(args: argparse.Namespace, load: Load) -> dict[str, Any]:
    """What was run and where."""
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": f"openai-{args.endpoint}",
        "label": args.label,
        "model_id": load.model,
        "num_prompts": len(load.answers),
        "request_rate": args.rate or ("trace" if args.trace else "inf"),
        "burstiness": args.burstiness,
        "max_concurrency": None if args.rate or args.trace else args.concurrency,
        "seed": args.seed,
        "machine": machine(),
        "warmup_requests": max(1, args.warmup),
        "extras": sorted(load.extras),
    }


def main() -> int:
    args = parser().parse_args()
    try:
        check(args)
    except ValueError as error:
        parser().error(str(error))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a socket per request in flight
    say = Console(highlight=False, soft_wrap=True)
    say.print(f"machine: {machine()}\nseed: {args.seed}")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            summary = runner.run(run(args, say))
    except UserError as error:
        Console(stderr=True).print(f"loadtest: error: {error}", soft_wrap=True, markup=False)
        return 1
    if args.json:
        args.json.write_text(json.dumps(summary, indent=1) + "\n")
    for kind, message in summary["error_samples"].items():
        say.print(f"one {kind}: {message[:200]}", markup=False)
    say.print(figures_table(summary), latency_table(summary))
    if summary["interrupted"]:
        say.print("interrupted: the figures are those of the requests until then")
    is_exact = summary["failed"] == summary["output_count_deviations"] == 0
    return 0 if summary["completed"] and (is_exact or not args.strict) else 1


if __name__ == "__main__":
    sys.exit(main())
