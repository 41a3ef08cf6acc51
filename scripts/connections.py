"""Many connections at a daemon of its own: idle ones, short ones, ones that do not read.

    python scripts/connections.py --seconds 60

Starts skippy-sched on the simulated engine, on this machine only, and lets a few streams run:
first alone, then beside thousands of idle event streams, hundreds of connects and disconnects a
second, and clients that do not read. Checks that these streams keep the gaps between their
tokens, that whoever does not read is cut, and that at the end nothing is left: files, tasks,
lanes, memory. Exit code 1 if any of it does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from _client import Answer, Client, loop_factory, read_metrics
from _report import machine
from cancel_storm import rss_bytes
from rich.console import Console

#: An iteration takes so long, as it would with a model of some size.
ITERATION_S = 0.01
#: The daemon's patience with clients that do not read.
WRITE_TIMEOUT_S = 2.0
#: Connections opened at once, so that the listener's queue is no bottleneck.
OPENED_AT_ONCE = 100
CONFIG = """
[model]
path = "{model}"
name = "sim"
[engine]
library = "sim"
lanes = {lanes}
context_tokens = 65536
[scheduler]
waiting_requests_max = {waiting}
waiting_tokens_max = 10000000
[server]
port = 0
connections_max = {connections}
write_timeout_s = {write_timeout_s}
[log]
level = "warning"
"""


@contextmanager
def daemon(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """A daemon of our own: its address and its process."""
    with tempfile.TemporaryDirectory() as folder:
        model, config = Path(folder, "model.sim"), Path(folder, "config.toml")
        model.write_text(f"skippy-sim 1\nclock = real\ncost_fixed_us = {ITERATION_S * 1e6:.0f}\n")
        port = free_port()
        config.write_text(
            CONFIG.format(
                model=model,
                lanes=args.streams + args.slow,
                waiting=args.idle + 1000,
                connections=args.idle + 2000,
                write_timeout_s=WRITE_TIMEOUT_S,
            ).replace("port = 0", f"port = {port}")
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "skippy_sched", "serve", "-c", str(config)],
            stderr=subprocess.DEVNULL if not args.log else None,
        )
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def body(**fields: Any) -> bytes:
    asked = {"prompt": [65], "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    return json.dumps(asked).encode()


class Idle(asyncio.Protocol):
    """Reads what comes and forgets it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self.bytes += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False


class Load:
    """All that goes on beside the watched streams."""

    def __init__(self, client: Client, port: int, args: argparse.Namespace) -> None:
        self._client = client
        self._address = ("127.0.0.1", port)
        self._args = args
        self.idle: list[tuple[asyncio.Transport, Idle]] = []
        self._slow: list[socket.socket] = []
        self.churned = 0
        self.failed: list[str] = []

    async def open_idle(self) -> None:
        """Event streams that wait in the queue, behind everybody else."""
        request = self._client.request_bytes(
            "POST", "/v1/completions", body(max_tokens=60_000, priority=-1)
        )
        loop = asyncio.get_running_loop()
        while len(self.idle) < self._args.idle:
            missing = min(OPENED_AT_ONCE, self._args.idle - len(self.idle))
            made = await asyncio.gather(
                *(loop.create_connection(Idle, *self._address) for _ in range(missing))
            )
            for transport, protocol in made:
                transport.write(request)
                self.idle.append((transport, protocol))

    async def open_slow(self) -> None:
        """Streams with a lot to tell, to clients that do not listen."""
        request = self._client.request_bytes(
            "POST",
            "/v1/chat/completions",
            json.dumps(
                {
                    "messages": [{"role": "user", "content": "x"}],
                    "stream": True,
                    "max_tokens": 60_000,
                    "ignore_eos": True,
                    "logprobs": True,
                    "top_logprobs": 20,
                    "priority": 1,
                }
            ).encode(),
        )
        loop = asyncio.get_running_loop()
        for _ in range(self._args.slow):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, self._address)
            await loop.sock_sendall(client, request)
            self._slow.append(client)

    async def churn(self, seconds: float) -> None:
        """Connects and disconnects at a fixed rate, however the daemon fares: by turns without a
        word, with half a request, with a whole one that is not waited for, and with an answer."""
        begun = perf_counter()
        request = self._client.request_bytes("POST", "/v1/completions", body(max_tokens=50))
        health = self._client.request_bytes("GET", "/health")
        words = (b"", request[:40], request, health)
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(seconds * self._args.rate)):
                wait_s = begun + number / self._args.rate - perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(self._come_and_go(words[number % len(words)], health))

    async def _come_and_go(self, word: bytes, health: bytes) -> None:
        try:
            async with asyncio.timeout(30):
                reader, writer = await asyncio.open_connection(*self._address)
                writer.write(word)
                if word is health and not (await reader.readline()).startswith(b"HTTP/1.1 200"):
                    self.failed.append("/health was not 200")
                writer.transport.abort()
            self.churned += 1
        except (OSError, TimeoutError) as error:
            self.failed.append(f"a connection failed: {error!r}")

    def close(self) -> None:
        for transport, _ in self.idle:
            transport.abort()
        for client in self._slow:
            client.close()


class Facts:
    """What the daemon and its process hold."""

    def __init__(self, metrics: dict[str, float], pid: int) -> None:
        self.metrics = metrics
        self.files = len(os.listdir(f"/proc/{pid}/fd"))
        self.rss_bytes = rss_bytes(pid) or 0
        self.tasks = metrics["skippy:event_loop_tasks"]

    def __str__(self) -> str:
        return f"{self.files} files, {self.tasks:.0f} tasks, {self.rss_bytes / 2**20:.1f} MiB"


async def look(client: Client, pid: int) -> Facts:
    return Facts(read_metrics((await client.get("/metrics")).body.decode()), pid)


async def at_rest(client: Client, pid: int, wanted: Facts, running: int) -> tuple[Facts, str]:
    """Wait until only the watched streams are left; says what still is when they are not."""
    for _ in range(200):
        facts = await look(client, pid)
        left = []
        if facts.files > wanted.files:
            left.append(f"{facts.files - wanted.files} files")
        if facts.tasks > wanted.tasks:
            left.append(f"{facts.tasks - wanted.tasks:.0f} tasks")
        lanes = facts.metrics["skippy:lanes"] - facts.metrics["skippy:lanes_free"]
        if lanes != running:
            left.append(f"{lanes - running:.0f} lanes")
        if waiting := facts.metrics["skippy:num_requests_waiting"]:
            left.append(f"{waiting:.0f} waiting requests")
        if not left:
            return facts, ""
        await asyncio.sleep(0.1)
    return facts, ", ".join(left)


def gaps(answers: list[Answer], since: float, until: float) -> list[float]:
    """Between events with text, which come with every iteration but few."""
    found: list[float] = []
    for answer in answers:
        at = [instant for instant in answer.text_at if since <= instant <= until]
        found += [later - earlier for earlier, later in pairwise(at)]
    return found


def spread(seconds: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]


def lag_p99(before: dict[str, float], after: dict[str, float]) -> str:
    """The bucket of the event loop's lag within which 99 of 100 probes lie."""
    total = after["skippy:loop_lag_seconds_count"] - before["skippy:loop_lag_seconds_count"]
    bounds = [name for name in after if name.startswith("skippy:loop_lag_seconds_bucket{")]
    for name in bounds:
        if after[name] - before.get(name, 0.0) >= 0.99 * total:
            return name.partition('le="')[2].partition('"')[0]
    return "?"


async def wait_until_ready(client: Client) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await client.get("/ready")).status == 200:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.05)


async def run(url: str, pid: int, args: argparse.Namespace, say: Console) -> list[str]:
    """All phases; returns what did not hold."""
    broken: list[str] = []
    port = int(url.rpartition(":")[2])
    async with Client(url) as client, asyncio.TaskGroup() as tasks:
        await wait_until_ready(client)
        request = client.request_bytes(
            "POST", "/v1/completions", body(max_tokens=60_000, priority=2)
        )
        answers = [Answer(60_000) for _ in range(args.streams)]
        streams = [tasks.create_task(client.generate(request, answer)) for answer in answers]
        await asyncio.sleep(0.5)
        before = await look(client, pid)
        alone_at = perf_counter()
        await asyncio.sleep(min(args.seconds, 10.0))
        alone = gaps(answers, alone_at, perf_counter())
        say.print(f"alone:   {before}")

        load = Load(client, port, args)
        await load.open_slow()
        await load.open_idle()
        loaded_at = perf_counter()
        await load.churn(args.seconds / 2)
        middle = await look(client, pid)
        say.print(f"loaded:  {middle}; {middle.metrics['skippy:connections']:.0f} connections")
        await load.churn(args.seconds / 2)
        beside = gaps(answers, loaded_at, perf_counter())
        late = await look(client, pid)
        say.print(f"later:   {late}; {load.churned} connections came and went")
        if gone := sum(not idle.is_open for _, idle in load.idle):
            broken.append(f"{gone} of {args.idle} idle connections were closed")
        if mute := sum(not idle.bytes for _, idle in load.idle if args.seconds > 20):
            broken.append(f"{mute} idle streams never got a sign of life")
        broken += load.failed[:5]
        cut = 'skippy:connections_cut_total{model_name="sim",reason="slow_reader"}'
        for _ in range(300):
            late = await look(client, pid)
            if late.metrics.get(cut, 0) >= args.slow:
                break
            await asyncio.sleep(0.1)
        if (were_cut := late.metrics.get(cut, 0)) != args.slow:
            broken.append(f"{were_cut:.0f} of {args.slow} clients that do not read were cut")
        load.close()
        after, left = await at_rest(client, pid, before, args.streams)
        say.print(f"after:   {after}")
        if left:
            broken.append(f"left behind: {left}")
        for stream, answer in zip(streams, answers, strict=True):
            if stream.done():
                broken.append(f"a watched stream ended: {answer.error} {answer.error_message}")
            stream.cancel()
    grown = late.rss_bytes / middle.rss_bytes - 1
    say.print(f"memory, second half of the load over the first: {grown:+.1%}")
    if grown > args.rss_growth_max / 100:
        broken.append(f"memory grew by {grown:.1%}, the limit is {args.rss_growth_max:g} %")
    was, is_ = spread(alone), spread(beside)
    ratios = [now / then for then, now in zip(was, is_, strict=True)]
    for name, then, now, ratio in zip(("median", "p99"), was, is_, ratios, strict=True):
        say.print(
            f"gap between tokens, {name}: {then * 1e3:.2f} ms alone, {now * 1e3:.2f} ms under "
            f"load, ratio {ratio:.2f}"
        )
    say.print(f"event loop's lag under load, p99: within {lag_p99(before.metrics, late.metrics)} s")
    if ratios[0] > args.itl_ratio_max:
        broken.append(f"the median gap grew {ratios[0]:.2f} times, limit {args.itl_ratio_max:g}")
    return broken


def main() -> int:
    cli = argparse.ArgumentParser(description="Many connections at a daemon of its own.")
    cli.add_argument("--seconds", type=float, default=60.0, help="of connects and disconnects")
    cli.add_argument("--rate", type=float, default=500.0, help="connects per second")
    cli.add_argument("--idle", type=int, default=2000, help="event streams that wait")
    cli.add_argument("--slow", type=int, default=16, help="clients that do not read")
    cli.add_argument("--streams", type=int, default=8, help="watched streams")
    cli.add_argument("--rss-growth-max", type=float, default=5.0, help="percent")
    cli.add_argument("--itl-ratio-max", type=float, default=1.5, help="of the median gap")
    cli.add_argument("--log", action="store_true", help="show the daemon's log")
    args = cli.parse_args()
    say = Console(highlight=False, soft_wrap=True)
    say.print(f"machine: {machine()}")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with daemon(args) as (url, pid), asyncio.Runner(loop_factory=loop_factory()) as runner:
        broken = runner.run(run(url, pid, args, say))
    for line in broken:
        say.print(line, markup=False)
    say.print(f"{len(broken)} things did not hold" if broken else "all held")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
