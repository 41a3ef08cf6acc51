"""Feeds a journal's inputs and outcomes to a fresh scheduler and compares what it decides.

No engine runs: outcomes come from the journal. The same steps go to an observer as in a
simulation, so a recorded run is measured by the same code as a simulated one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skippy_sched.config import Config
from skippy_sched.errors import EngineFailure, SkippySchedError
from skippy_sched.native.facts import ModelFacts
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.iteration import Iteration
from skippy_sched.scheduler.journal import (
    Record,
    iteration_record,
    read_journal,
    recorded_outcome,
    recorded_request,
)
from skippy_sched.scheduler.loading import make_scheduler
from skippy_sched.scheduler.reconcile import Reconciled
from skippy_sched.scheduler.request import Request
from skippy_sched.simulate.driver import Observer, Step
from skippy_sched.simulate.traces import Arrival


class JournalError(SkippySchedError):
    """The journal cannot be read, or was written by another version."""

    exit_code = 65


class Difference(SkippySchedError):
    """The scheduler decided otherwise than the journal says."""


@dataclass(slots=True)
class Replay:
    """One pass over a journal; ``counts`` are its records by kind.

    ``cut_off``: it ends within a record, as a crash leaves it.
    """

    path: Path
    observer: Observer | None = None
    counts: Counter[str] = field(default_factory=Counter)
    cut_off: bool = False
    requests: dict[int, Request] = field(default_factory=dict)
    config: Config = field(default_factory=Config)
    facts: ModelFacts = field(default_factory=ModelFacts)
    _scheduler: Scheduler = field(init=False)
    _iterations: dict[int, Iteration] = field(default_factory=dict)
    _to_learn: dict[int, tuple[Any, Reconciled]] = field(default_factory=dict)
    _decode_keys: list[int] = field(default_factory=list)

    def run(self) -> Scheduler:
        """Returns the scheduler in its last state. Raises JournalError or Difference."""
        records = self._records()
        header = next(records, None)
        if header is None:
            raise JournalError(f"{self.path}: is empty, or was cut off in its first record")
        self._open(header[1])
        for number, record in records:
            kind = record["is"]
            self.counts[kind] += 1
            try:
                self._apply(kind, record)
            except Difference as difference:
                raise Difference(f"{self.path}:{number}: {difference}") from None
            except (KeyError, TypeError, ValueError) as error:
                raise JournalError(
                    f"{self.path}:{number}: {kind} does not fit what came before it: {error!r}"
                ) from error
        return self._scheduler

    def _records(self) -> Iterator[tuple[int, Record]]:
        try:
            self.cut_off = yield from read_journal(self.path)
        except OSError as error:
            raise JournalError(f"cannot read journal {self.path}: {error}") from error
        except ValueError as error:
            raise JournalError(str(error)) from error

    def _open(self, header: Record) -> None:
        try:
            self.config = Config.model_validate(
                {
                    "engine": header["engine"],
                    "scheduler": {**header["scheduler"], "journal": None},
                    "speculation": header.get("speculation", {}),
                }
            )
            self.facts = ModelFacts(**header["facts"])
        except (KeyError, TypeError, ValueError) as error:
            raise JournalError(f"{self.path}:1: written by another version: {error}") from error
        self._scheduler = make_scheduler(self.config, self.facts)

    def _apply(self, kind: str, record: Record) -> None:
        scheduler, requests = self._scheduler, self.requests
        match kind:
            case "submit":
                request = recorded_request(record)
                requests[request.key] = request
                scheduler.submit(request)
            case "cancel":
                scheduler.cancel(requests[record["key"]])
            case "paused":
                paused = set(record["keys"])
                for request in scheduler.state.decoding.values():
                    request.paused = request.key in paused
            case "sweep":
                ended = scheduler.sweep(record["now"])
                keys = [request.key for request in ended]
                _compare("requests ended by cancellation or deadline", record["ended"], keys)
                self._observe(Step(record["now"], ended))
            case "lost":
                failed = scheduler.engine_lost(record["now"])
                keys = [request.key for request in failed]
                _compare("requests failed with the engine", record["failed"], keys)
                self._iterations.clear()
                self._observe(Step(record["now"], failed))
            case "stop" | "fail":
                self._end(kind, record)
            case "plan":
                self._plan(record)
            case "outcome":
                self._outcome(record)
            case "learn":
                scheduler.learn(*self._to_learn.pop(record["number"]))
            case _:
                raise ValueError(f"unknown record {kind!r}")

    def _end(self, kind: str, record: Record) -> None:
        request = self.requests[record["key"]]
        was_final = request.status.is_final
        if kind == "stop":
            behind = record.get("behind", 0)
            self._scheduler.stop(request, record["stop"], record["now"], behind)
        else:
            self._scheduler.fail(request, EngineFailure(record["error"]), record["now"])
        if not was_final:
            self._observe(Step(record["now"], [request]))

    def _plan(self, record: Record) -> None:
        iteration = self._scheduler.next_iteration(record["now"])
        if iteration is None:
            raise Difference(f"iteration {record['number']}: the scheduler planned nothing")
        self._iterations[iteration.number] = iteration
        decided = iteration_record(iteration, self._decode_keys)
        self._decode_keys = list(iteration.decode_keys)
        where = f"iteration {record['number']} at {record['now']:.6f} s"
        for name in ("number", "commands", "decodes", "chunks", "verifies"):
            _compare(f"{where}: {name}", record.get(name, []), decided.get(name, []))

    def _outcome(self, record: Record) -> None:
        outcome = recorded_outcome(record)
        iteration = self._iterations.pop(outcome.number)
        reconciled = self._scheduler.on_outcome(outcome, record["now"])
        self._to_learn[outcome.number] = outcome, reconciled
        self._observe(Step(record["now"], [], iteration, outcome, reconciled))

    def _observe(self, step: Step) -> None:
        if self.observer is not None:
            self.observer.step(step, self._scheduler)


def _compare(what: str, recorded: object, replayed: object) -> None:
    if recorded != replayed:
        raise Difference(
            f"{what}: recorded {_first_difference(recorded, replayed)}, "
            f"replayed {_first_difference(replayed, recorded)}"
        )


def _first_difference(these: object, those: object) -> str:
    """What is in one list at the first index at which the two differ."""
    if not isinstance(these, list) or not isinstance(those, list):
        return json.dumps(these)
    index = next(
        (i for i, (a, b) in enumerate(zip(these, those, strict=False)) if a != b),
        min(len(these), len(those)),
    )
    shown = json.dumps(these[index]) if index < len(these) else "nothing"
    return f"{shown} at {index} of {len(these)}"


def recorded_arrivals(path: Path) -> list[Arrival]:
    """The requests of a journal as arrivals, with the tokens that they did get.

    Requests that were cancelled or failed are left out: how long they would have run is unknown.
    """
    replay = Replay(path)
    replay.run()
    done = [r for r in replay.requests.values() if r.finish_reason in ("stop", "length")]
    done.sort(key=lambda request: request.arrived_at)
    start = done[0].arrived_at if done else 0.0
    return [
        Arrival(
            request.arrived_at - start,
            request.prompt_tokens,
            max(1, request.completion_tokens),
            request.tenant,
            request.params.priority,
        )
        for request in done
    ]
