"""Faults in the midst of 32 streams: who completes, who is told what, and how long it pauses.

    python scripts/fault_drill.py                 # simulated engine
    python scripts/fault_drill.py --model default # the default model on the llama engine

Each drill starts the streams, waits until tokens flow, breaks something, and waits for every
answer. Exit code 1 if a stream gets no answer, or another text than without the fault.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import uvloop
from _report import machine
from rich.console import Console
from rich.table import Table

from skippy_sched import Config, Engine, RequestParams
from skippy_sched.default_model import default_model
from skippy_sched.errors import RequestError
from skippy_sched.scheduler.child import ChildProcess

ANSWER_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Told:
    """What a stream got, and when."""

    tokens: list[int]
    at: list[float]
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Drill:
    name: str
    isolated: bool
    strike: Callable[[Engine], None] | None


def signal_engine(number: signal.Signals) -> Callable[[Engine], None]:
    def strike(engine: Engine) -> None:
        child = engine._native.executor
        assert isinstance(child, ChildProcess)
        os.kill(child.pid, number)

    return strike


def end_worker_thread(engine: Engine) -> None:
    worker = [t for t in threading.enumerate() if t.name == "skippy-worker"][-1]
    assert worker.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit)
    )


DRILLS = (
    Drill("none", True, None),
    Drill("worker thread ends", False, end_worker_thread),
    Drill("engine process killed", True, signal_engine(signal.SIGKILL)),
    Drill("engine process aborts", True, signal_engine(signal.SIGABRT)),
    Drill("engine hangs", True, signal_engine(signal.SIGSTOP)),
)


def config(options: argparse.Namespace, isolated: bool, folder: Path) -> Config:
    if options.model is None:
        model = folder / "model.sim"
        model.write_text(
            "skippy-sim 1\nclock = real\ncost_fixed_us = 2000\ncost_sequence_us = 100\n"
        )
        library = "sim"
    else:
        model = default_model() if options.model == "default" else Path(options.model)
        library = "llama"
    return Config.model_validate(
        {
            "model": {"path": str(model)},
            "engine": {
                "library": library,
                "lanes": options.streams,
                "context_tokens": 512,
                "isolated": isolated,
            },
            "scheduler": {"watchdog_s": options.watchdog_s},
        }
    )


async def consume(engine: Engine, number: int, tokens: int, flowing: asyncio.Event) -> Told:
    told = Told([], [])
    prompt = [*range(300, 316), 300 + number]
    try:
        async for event in engine.generate(
            prompt, RequestParams(max_tokens=tokens, ignore_eos=True)
        ):
            told.tokens += event.token_ids
            told.at.append(perf_counter())
            told.finish_reason = event.finish_reason
            if len(told.tokens) > tokens // 3:
                flowing.set()
    except RequestError as error:
        told.error = f"{type(error).__name__}: {error}"
        flowing.set()
    return told


async def run(
    drill: Drill, options: argparse.Namespace, folder: Path
) -> tuple[list[Told | None], float, float]:
    """The answers (None: none came), the longest pause after the fault, the engine's own figure."""
    async with Engine.open(config(options, drill.isolated, folder)) as engine:
        flowing = asyncio.Event()
        tasks = [
            asyncio.create_task(consume(engine, number, options.tokens, flowing))
            for number in range(options.streams)
        ]
        await flowing.wait()
        struck_at = perf_counter()
        if drill.strike is not None:
            drill.strike(engine)
        done, _ = await asyncio.wait(tasks, timeout=ANSWER_TIMEOUT_S)
        told = [task.result() if task in done else None for task in tasks]
        after = [moment for one in told if one for moment in one.at if moment > struck_at]
        pause = min(after, default=struck_at) - struck_at
        for task in tasks:
            task.cancel()
        engine.check_invariants()
        return told, pause, engine.statistics().recovery_s


async def drills(options: argparse.Namespace) -> bool:
    table = Table(title=f"{options.streams} streams of {options.tokens} tokens")
    for column in (
        "fault",
        "complete",
        "same text",
        "errors",
        "no answer",
        "pause s",
        "reopened s",
    ):
        table.add_column(column, justify="left" if column == "fault" else "right")
    right, sound = None, True
    with TemporaryDirectory() as folder:
        for drill in DRILLS:
            told, pause_s, reopened_s = await run(drill, options, Path(folder))
            texts = [one.tokens if one else None for one in told]
            right = right or texts
            complete = sum(one is not None and one.finish_reason == "length" for one in told)
            same = sum(a == b for a, b in zip(texts, right, strict=True))
            errors = [one.error for one in told if one is not None and one.error]
            lost = sum(one is None for one in told)
            sound &= not lost and complete + len(errors) == len(told)
            # Computed again in another batch, a real model's logits differ in their last bits.
            sound &= options.model is not None or same + len(errors) == len(told)
            table.add_row(
                drill.name,
                str(complete),
                str(same),
                ", ".join(sorted(set(errors))) or "0",
                str(lost),
                f"{pause_s:.2f}",
                "-" if drill.strike is None else f"{reopened_s:.2f}",
            )
    say = Console(highlight=False, width=100)
    say.print(f"machine: {machine()}", table)
    say.print("pause: from the fault to the next token; a hang is noticed after the watchdog's")
    say.print(f"{options.watchdog_s:g} s; reopened: engine lost until it was open again")
    return sound


def main() -> int:
    cli = argparse.ArgumentParser(description="What faults cost the streams that run.")
    cli.add_argument("--model", metavar="GGUF", help="'default': the default model")
    cli.add_argument("--streams", type=int, default=32)
    cli.add_argument("--tokens", type=int, default=60)
    cli.add_argument("--watchdog-s", type=float, default=2.0)
    options = cli.parse_args()
    sound = uvloop.run(drills(options))
    sys.stdout.write("sound\n" if sound else "NOT SOUND\n")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
