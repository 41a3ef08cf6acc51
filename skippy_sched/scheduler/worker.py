"""The executor for one model in this process: one thread that makes every native call.

One hop down and one hop up per iteration. Knows threads; what an iteration does is runner.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from skippy_sched.scheduler.iteration import Iteration, Outcome
from skippy_sched.scheduler.runner import ModelRunner


class Worker:
    """Runs iterations on a thread of its own.

    The thread is a daemon thread: a native call that never returns must not keep the process.
    """

    #: the model has one context; a second iteration could not run beside the first
    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._orders: queue.SimpleQueue[Iteration | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="skippy-worker", daemon=True)
        self._closed = threading.Event()

    def start(self, on_outcome: Callable[[Outcome], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outcome = on_outcome
        self._thread.start()

    def submit(self, iteration: Iteration) -> None:
        self._orders.put(iteration)

    async def close(self, timeout_s: float) -> None:
        """Free sessions and model once the iteration under way is done.

        If it does not return in time the thread and the model are left behind.
        """
        self._orders.put(None)
        if self._thread.ident is None:
            self._thread.start()  # it has nothing to do but to close
        await asyncio.to_thread(self._closed.wait, timeout_s)

    def _work(self) -> None:
        number = 0
        try:
            while (iteration := self._orders.get()) is not None:
                number = iteration.number
                self._deliver(self._runner.execute(iteration))
        except BaseException as error:
            # Whatever it was, the clients must hear of it; the thread ends here.
            reason = f"the worker thread died: {type(error).__name__}: {error}"
            self._deliver(Outcome(number, fatal=reason))
        self._runner.close()
        self._closed.set()

    def _deliver(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._on_outcome, outcome)
