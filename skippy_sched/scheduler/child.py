"""The executor for a native engine in a process of its own: an abort there costs a pause here.

``ChildProcess`` is the parent's side; run as a module this file is the child. Between them go
pickled iterations and outcomes, each behind its length, over two pipes. Knows nothing of what an
iteration does; a child that ends or is killed becomes a fatal outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from skippy_sched.config import Config
from skippy_sched.errors import StartupError
from skippy_sched.native.facts import ModelFacts
from skippy_sched.scheduler.iteration import Iteration, Outcome
from skippy_sched.scheduler.loading import open_models
from skippy_sched.scheduler.runner import ModelRunner

_LENGTH = struct.Struct("<Q")


def _send(pipe: BinaryIO, message: object) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    """Raises EOFError when the other side is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


class ChildProcess:
    """Runs iterations in a child; one more hop each, about a tenth of a millisecond."""

    depth = 1

    def __init__(self, config: Config) -> None:
        """Start the child and wait until its model is open; raises StartupError. Blocking."""
        child_reads, self_writes = os.pipe()
        self_reads, child_writes = os.pipe()
        command = [sys.executable, "-m", __name__, str(child_reads), str(child_writes)]
        self._process = subprocess.Popen(
            command, pass_fds=(child_reads, child_writes), stdin=subprocess.DEVNULL
        )
        os.close(child_reads)
        os.close(child_writes)
        self._orders: BinaryIO = os.fdopen(self_writes, "wb")
        self._answers: BinaryIO = os.fdopen(self_reads, "rb")
        self._number = 0
        self._thread = threading.Thread(target=self._listen, name="skippy-child", daemon=True)
        _send(self._orders, config)
        try:
            facts = _receive(self._answers)
        except EOFError:
            facts = f"the engine's process {self._ending()} while it opened the model"
        if not isinstance(facts, ModelFacts):
            self._kill()
            raise StartupError(facts)
        self.facts: ModelFacts = facts

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, on_outcome: Callable[[Outcome], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outcome = on_outcome
        self._thread.start()

    def submit(self, iteration: Iteration) -> None:
        self._number = iteration.number
        with contextlib.suppress(BrokenPipeError):  # the listener tells that the child is gone
            _send(self._orders, iteration)

    async def close(self, timeout_s: float) -> None:
        self._hang_up()
        if timeout_s > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, timeout_s)
        await asyncio.to_thread(self._kill)

    def _hang_up(self) -> None:
        """The child ends when it has nothing more to read."""
        with contextlib.suppress(BrokenPipeError):
            self._orders.close()

    def _kill(self) -> None:
        self._hang_up()
        self._process.kill()
        self._process.wait()
        if self._thread.is_alive():
            self._thread.join()
        self._answers.close()

    def _listen(self) -> None:
        try:
            while True:
                self._deliver(_receive(self._answers))
        except (EOFError, OSError):
            reason = f"the engine's process {self._ending()}"
            self._deliver(Outcome(self._number, fatal=reason))

    def _ending(self) -> str:
        status = self._process.wait()
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def _deliver(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._on_outcome, outcome)


def _serve(orders: BinaryIO, answers: BinaryIO) -> None:
    config: Config = _receive(orders)
    try:
        runner = ModelRunner(*open_models(config))
    except StartupError as error:
        _send(answers, str(error))
        return
    _send(answers, runner.facts)
    with contextlib.suppress(EOFError):
        while True:
            outcome = runner.execute(_receive(orders))
            _send(answers, outcome)
    runner.close()


if __name__ == "__main__":
    # Ctrl-C reaches the whole group; when to end is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), "rb") as read, os.fdopen(int(sys.argv[2]), "wb") as write:
        _serve(read, write)
