"""Starts the servers that are measured, waits until they serve, and ends them.

Knows command lines. Does not know what is asked of a server. Each runs alone or idle while
another one is measured: an idle server takes no processor time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _client import Client, Closed
from _quiet import process_s
from _wire import MalformedResponse

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05

#: What helps llama-server: no pages, and no copies of prompts in memory that nobody asks for again
#: (a slot's own cache stays). A KV of its own per slot, its default with -np, is faster on a CPU
#: than the unified one.
LLAMA_FLAGS = ("--no-ui", "--cache-ram", "0")


class StartFailed(Exception):
    """A server did not come up; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all servers are given alike."""

    model: Path
    threads: int
    lanes: int
    context_tokens: int = 2048
    batch_tokens: int = 512


@dataclass(slots=True)
class Server:
    """A running server; ``start_s`` from the process's start until it served."""

    name: str
    url: str
    pid: int | None = None
    start_s: float | None = None

    def memory_mib(self, kind: str) -> float | None:
        """``Rss``, or ``Pss``: pages shared with other processes count by share only."""
        if self.pid is None:
            return None
        for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(kind + ":"):
                return int(line.split()[1]) / 1024
        return None

    @property
    def cpu_s(self) -> float | None:
        """Processor time of all its threads so far."""
        if self.pid is None:
            return None
        return process_s(Path(f"/proc/{self.pid}/stat").read_text())


@asynccontextmanager
async def daemon(
    setting: Setting,
    name: str = "skippy-sched",
    *,
    library: str = "llama",
    env: dict[str, str] | None = None,
    **scheduler: Any,
) -> AsyncIterator[Server]:
    """Ours, with keys of the table [scheduler]; None leaves a key unset."""
    keys = {key: value for key, value in scheduler.items() if value is not None}
    lines = [
        "[model]",
        f'path = "{setting.model}"',
        "[engine]",
        f'library = "{library}"',
        f"threads = {setting.threads}",
        f"lanes = {setting.lanes}",
        f"context_tokens = {setting.context_tokens}",
        f"batch_tokens = {setting.batch_tokens}",
        f"microbatch_tokens = {setting.batch_tokens}",
        "[scheduler]",
        *(f"{key} = {value}" for key, value in keys.items()),
        "[server]",
        f"port = {(port := free_port())}",
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write("\n".join(lines) + "\n")
        config.flush()
        command = [sys.executable, "-m", "skippy_sched", "serve", "-c", config.name]
        async with _process(name, command, port, "/ready", env or {}) as server:
            yield server


@asynccontextmanager
async def llama_server(
    binary: Path, setting: Setting, name: str = "llama-server"
) -> AsyncIterator[Server]:
    """llama.cpp's own, from any build; its context is that of all lanes together."""
    port = free_port()
    command = [
        str(binary),
        *("-m", str(setting.model), "--port", str(port)),
        *("-t", str(setting.threads), "-tb", str(setting.threads)),
        *("-np", str(setting.lanes), "-c", str(setting.lanes * setting.context_tokens)),
        *("-b", str(setting.batch_tokens), "-ub", str(setting.batch_tokens)),
        *LLAMA_FLAGS,
    ]
    async with _process(name, command, port, "/health", {}) as server:
        yield server


@asynccontextmanager
async def servers(
    setting: Setting, llama_binary: Path | None, urls: Sequence[str], **scheduler: Any
) -> AsyncIterator[list[Server]]:
    """Ours first, then llama-server if there is one, then those that run already."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(daemon(setting, **scheduler))]
        if llama_binary is not None:
            found.append(await stack.enter_async_context(llama_server(llama_binary, setting)))
        found += [Server(url, url) for url in urls]
        yield found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@asynccontextmanager
async def _process(
    name: str, command: list[str], port: int, ready_path: str, env: dict[str, str]
) -> AsyncIterator[Server]:
    server = Server(name, f"http://127.0.0.1:{port}")
    with tempfile.TemporaryFile() as output:
        began = perf_counter()
        process = subprocess.Popen(  # noqa: ASYNC220 - a fork, before anything is measured
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | env
        )
        server.pid = process.pid
        try:
            while not await _serves(server.url, ready_path):
                if process.poll() is not None or perf_counter() - began > START_TIMEOUT_S:
                    output.seek(0)
                    tail = output.read()[-2000:].decode(errors="replace")
                    raise StartFailed(f"{name} does not serve: {' '.join(command)}\n{tail}")
                await asyncio.sleep(POLL_S)
            server.start_s = perf_counter() - began
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _serves(url: str, path: str) -> bool:
    try:
        async with Client(url, timeout_s=5) as client:
            return (await client.get(path)).status == 200
    except (OSError, Closed, MalformedResponse):
        return False
