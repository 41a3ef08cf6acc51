"""The executor for the stages of one model in this process: a thread per stage.

As many iterations are under way as there are stages, each on another one, and all pass every
stage in the same order. Knows threads and locks; what an iteration does is runner.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from skippy_sched.scheduler.iteration import Iteration, Outcome
from skippy_sched.scheduler.runner import ModelRunner, Passage


class Pipeline:
    """Runs iterations on the stages of ``runner``; they are daemon threads as a worker's is."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.depth = len(runner.stages)
        self._queues: list[queue.SimpleQueue[Passage | None]] = [
            queue.SimpleQueue() for _ in runner.stages
        ]
        #: held by whoever uses a stage; only the last stage's thread ever holds several
        self._locks = [threading.Lock() for _ in runner.stages]
        self._threads = [
            threading.Thread(target=self._work, args=(n,), name=f"skippy-stage-{n}", daemon=True)
            for n in range(self.depth)
        ]
        self._closed = threading.Event()
        self._number = 0

    def start(self, on_outcome: Callable[[Outcome], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outcome = on_outcome
        for thread in self._threads:
            thread.start()

    def submit(self, iteration: Iteration) -> None:
        self._number = iteration.number
        self._queues[0].put(self._runner.begin(iteration))

    async def close(self, timeout_s: float) -> None:
        """Free sessions and models once the iterations under way are done.

        If they do not return in time the threads and the models are left behind.
        """
        self._queues[0].put(None)
        for thread in self._threads:
            if thread.ident is None:
                thread.start()  # it has nothing to do but to close
        await asyncio.to_thread(self._closed.wait, timeout_s)

    def _work(self, number: int) -> None:
        is_last = number == self.depth - 1
        try:
            while (passage := self._queues[number].get()) is not None:
                with self._locks[number]:
                    self._runner.advance(passage, number)
                if is_last:
                    self._deliver(self._finished(passage))
                else:
                    self._queues[number + 1].put(passage)
        except BaseException as error:
            # Whatever it was, the clients must hear of it; the thread ends here.
            reason = f"the thread of stage {number} died: {type(error).__name__}: {error}"
            self._deliver(Outcome(self._number, fatal=reason))
        if is_last:
            self._runner.close()
            self._closed.set()
        else:
            self._queues[number + 1].put(None)

    def _finished(self, passage: Passage) -> Outcome:
        if not passage.repairs:
            return self._runner.finish(passage)
        # In ascending order and with none held before: the other threads hold one at most.
        with contextlib.ExitStack() as held:
            for lock in self._locks:
                held.enter_context(lock)
            return self._runner.finish(passage)

    def _deliver(self, outcome: Outcome) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile
            self._loop.call_soon_threadsafe(self._on_outcome, outcome)
