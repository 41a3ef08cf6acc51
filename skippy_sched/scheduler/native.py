"""What an engine runs on: an executor, the model's facts, and a model for its text.

Blocking; knows which executor a configuration asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

from skippy_sched.config import Config
from skippy_sched.native import Model
from skippy_sched.native.facts import ModelFacts
from skippy_sched.scheduler.child import ChildProcess
from skippy_sched.scheduler.iteration import Executor
from skippy_sched.scheduler.loading import end_tokens, open_for_text, open_models
from skippy_sched.scheduler.pipeline import Pipeline
from skippy_sched.scheduler.runner import ModelRunner
from skippy_sched.scheduler.worker import Worker


@dataclass(frozen=True, slots=True, eq=False)
class Native:
    """``model`` tokenizes and detokenizes; ``owns_model``: the executor doesn't close it."""

    executor: Executor
    facts: ModelFacts
    model: Model
    end_tokens: frozenset[int]
    owns_model: bool

    async def close(self, timeout_s: float) -> None:
        await self.executor.close(timeout_s)
        if self.owns_model:
            self.model.close()


def open_native(config: Config) -> Native:
    """Raises StartupError."""
    if config.engine.isolated:
        child = ChildProcess(config)
        model = open_for_text(config)
        return Native(child, child.facts, model, end_tokens(model), owns_model=True)
    runner = ModelRunner(*open_models(config))
    executor = Worker(runner) if len(runner.stages) == 1 else Pipeline(runner)
    model = runner.stages[-1].model
    return Native(executor, runner.facts, model, end_tokens(model), owns_model=False)


def reopen_native(config: Config, lost: Native) -> Native:
    """In place of a lost one. Raises StartupError."""
    if not config.engine.isolated:
        return open_native(config)
    child = ChildProcess(config)
    return Native(child, child.facts, lost.model, lost.end_tokens, owns_model=True)
