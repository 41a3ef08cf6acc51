"""Drives the scheduler and the simulated engine in virtual time, in one thread, step by step.

The same Scheduler, Intake and ModelRunner as in the daemon; what is missing is asyncio, text and
clients. Knows no traces beyond the arrivals it is given, and measures nothing itself.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from skippy_sched.clock import random_generator
from skippy_sched.config import Config
from skippy_sched.errors import QueueFull, StartupError
from skippy_sched.native import Model
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.intake import Intake
from skippy_sched.scheduler.iteration import Iteration, Outcome
from skippy_sched.scheduler.journal import RecordingScheduler, open_journal
from skippy_sched.scheduler.loading import (
    context_tokens,
    end_tokens,
    make_scheduler,
    open_model,
)
from skippy_sched.scheduler.reconcile import Reconciled
from skippy_sched.scheduler.request import Request, RequestParams
from skippy_sched.scheduler.runner import ModelRunner
from skippy_sched.simulate.prompts import Prompts
from skippy_sched.simulate.traces import Arrival


class SimClock:
    """The simulated engine's virtual clock: it moves by what calls cost, or when told to."""

    def __init__(self, model: Model) -> None:
        """Raises StartupError if the engine has no clock to move."""
        if not model.library.offers("skippyx_sim_advance"):
            raise StartupError(
                f'{model.library.path} has no virtual time; simulate with engine.library = "sim"'
            )
        self._model = model
        self._read = model.lib.skippyx_sim_clock_ns
        before = self.now()
        self.advance(1e-9)
        if self.now() - before > 1e-6:
            raise StartupError(f"{model.path}: needs `clock = virtual`, its clock runs by itself")

    def now(self) -> float:
        return float(self._read(self._model.raw)) / 1e9

    def advance(self, seconds: float) -> None:
        if seconds > 0:
            self._model.lib.skippyx_sim_advance(self._model.raw, round(seconds * 1e9))

    def advance_to(self, instant: float) -> None:
        self.advance(instant - self.now())


@dataclass(slots=True)
class Step:
    """One turn of the loop: who ended without an outcome, and the iteration that ran, if any."""

    now: float
    ended: list[Request] = field(default_factory=list)
    iteration: Iteration | None = None
    outcome: Outcome | None = None
    reconciled: Reconciled | None = None


class Stuck(AssertionError):
    """Requests wait and nothing will ever happen: a bug in the scheduler."""


class VirtualEngine:
    """A scheduler with its executor; ``overhead_s`` is what the host adds to each iteration."""

    def __init__(
        self,
        config: Config,
        model: Model,
        *,
        scheduler_kind: Callable[..., Scheduler] = Scheduler,
        overhead_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.clock = SimClock(model)
        self.scheduler = make_scheduler(config, model.facts, scheduler_kind)
        self.runner = ModelRunner(model, clock=self.clock.now)
        self.context_tokens = context_tokens(config, model.facts)
        self.intake = Intake(
            model.facts.n_vocab, self.context_tokens, end_tokens(model), random_generator(seed)
        )
        self._overhead_s = overhead_s
        self._to_learn: tuple[Outcome, Reconciled] | None = None

    def step(self) -> Step:
        """Sweep, plan, execute, reconcile; as in the daemon, learn once the next is under way."""
        scheduler, clock = self.scheduler, self.clock
        now = clock.now()
        step = Step(now, scheduler.sweep(now))
        iteration = scheduler.next_iteration(now)
        if self._to_learn is not None:
            scheduler.learn(*self._to_learn)
            self._to_learn = None
        if iteration is None:
            return step
        clock.advance(self._overhead_s)
        outcome = self.runner.execute(iteration)
        now = clock.now()
        reconciled = scheduler.on_outcome(outcome, now)
        self._to_learn = outcome, reconciled
        step.now, step.iteration, step.outcome, step.reconciled = (
            now,
            iteration,
            outcome,
            reconciled,
        )
        return step

    def check_alive(self) -> None:
        """Raise Stuck if requests live that no step will ever move."""
        scheduler = self.scheduler
        waits = scheduler.last_plan.waits if scheduler.last_plan else {}
        live = scheduler.live_requests()
        if live:
            why = ", ".join(f"{key}: {wait.value}" for key, wait in list(waits.items())[:8])
            raise Stuck(f"{len(live)} requests wait for ever at {self.clock.now():.6f} s ({why})")


class Observer(Protocol):
    """Told what happens, in order."""

    def refused(self, arrival: Arrival) -> None: ...

    def step(self, step: Step, scheduler: Scheduler) -> None: ...


def run(
    engine: VirtualEngine, arrivals: Iterator[Arrival], prompts: Prompts, observer: Observer
) -> None:
    """Serve all arrivals to the end."""
    scheduler, clock = engine.scheduler, engine.clock
    start = clock.now()
    coming = next(arrivals, None)
    while True:
        now = clock.now()
        while coming is not None and start + coming.at_s <= now:
            if not _submit(engine, coming, start, prompts):
                observer.refused(coming)
            coming = next(arrivals, None)
        step = engine.step()
        observer.step(step, scheduler)
        if step.iteration is not None or step.ended:
            continue
        if coming is not None:
            clock.advance_to(start + coming.at_s)
            if clock.now() < start + coming.at_s:
                clock.advance(1e-9)  # rounded down
        else:
            engine.check_alive()
            return


def _submit(engine: VirtualEngine, arrival: Arrival, start: float, prompts: Prompts) -> bool:
    params = RequestParams(
        max_tokens=arrival.output_tokens,
        ignore_eos=True,
        tenant=arrival.tenant,
        priority=arrival.priority,
    )
    now = start + arrival.at_s
    try:
        engine.scheduler.check_room(arrival.prompt_tokens, now)
        tokens = prompts.tokens(arrival)
        request = engine.intake.request(tokens, params, None, now)
        engine.scheduler.submit(request)
    except QueueFull:
        return False
    return True


@contextmanager
def open_engine(
    config: Config,
    costs: Mapping[str, float],
    *,
    overhead_s: float = 0.0,
    seed: int = 0,
    **keys: Any,
) -> Iterator[VirtualEngine]:
    """A simulated model with these costs (``cost_*_us`` of the engine's specification)."""
    lines = ["skippy-sim 1", "clock = virtual"]
    lines += [f"{key} = {value}" for key, value in {**costs, **keys}.items()]
    with tempfile.TemporaryDirectory(prefix="skippy-sched-") as folder:
        path = Path(folder) / "model.sim"
        path.write_text("\n".join(lines) + "\n")
        library = config.engine.library if config.engine.library != "llama" else "sim"
        config = config.model_copy(
            update={
                "model": config.model.model_copy(update={"path": str(path)}),
                "engine": config.engine.model_copy(update={"library": library}),
            }
        )
        model = open_model(config)
        with model:
            journal = open_journal(config, model.facts)
            kind = Scheduler if journal is None else partial(RecordingScheduler, journal)
            try:
                yield VirtualEngine(
                    config, model, scheduler_kind=kind, overhead_s=overhead_s, seed=seed
                )
            finally:
                if journal is not None:
                    journal.close()
