"""Fits the simulated engine's costs to a recorded run.

Knows journals and least squares. The simulated engine charges for an iteration a fixed time, and
a time per token, per sequence, and per earlier token that a computed one attends to;
the host's own time between iterations is told apart from the engine's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.cost import Coefficients
from skippy_sched.scheduler.journal import FORMAT
from skippy_sched.simulate.driver import Step
from skippy_sched.simulate.replay import JournalError, Replay
from skippy_sched.simulate.report import Report
from skippy_sched.simulate.traces import Arrival

#: Fewer iterations say too little about four unknowns.
ITERATIONS_MIN = 20
#: A pause longer than this between two iterations was idleness.
GAP_MAX_S = 0.005


@dataclass(frozen=True, slots=True)
class Calibration:
    """Costs in microseconds, and how well they explain the iterations they were fitted to."""

    fixed_us: float = 0.0
    token_us: float = 0.0
    sequence_us: float = 0.0
    attended_token_us: float = 0.0
    overhead_us: float = 0.0
    iterations: int = 0
    median_error: float = 0.0
    p95_error: float = 0.0

    @property
    def costs(self) -> dict[str, float]:
        """As keys of the simulated engine's specification."""
        return {
            "cost_fixed_us": self.fixed_us,
            "cost_token_us": self.token_us,
            "cost_sequence_us": self.sequence_us,
            "cost_attended_token_us": self.attended_token_us,
        }

    @property
    def coefficients(self) -> Coefficients:
        """The same as the scheduler's cost model counts."""
        return Coefficients(
            self.fixed_us / 1e6,
            (self.token_us + self.sequence_us) / 1e6,
            self.token_us / 1e6,
            self.attended_token_us / 1e6,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "coefficients": asdict(self.coefficients)}


@dataclass(slots=True)
class _Iterations:
    """Observes a replay: sizes and times of the iterations that ran without a fault."""

    report: Report
    sizes: list[tuple[float, ...]] = field(default_factory=list)
    native_s: list[float] = field(default_factory=list)
    overhead_s: list[float] = field(default_factory=list)
    last_at: float | None = None

    def refused(self, arrival: Arrival) -> None:
        self.report.refused(arrival)

    def step(self, step: Step, scheduler: Scheduler) -> None:
        self.report.step(step, scheduler)
        iteration, outcome, reconciled = step.iteration, step.outcome, step.reconciled
        if iteration is None or outcome is None or reconciled is None:
            return
        work = reconciled.work
        rows = len(iteration.decode_keys) + len(iteration.chunks)
        # Commands are not told apart: without the iterations that open sessions, hardly a prompt
        # would be left to learn from.
        if rows and work is not None and not outcome.faults:
            tokens = len(iteration.decode_keys) + sum(len(c.tokens) for c in iteration.chunks)
            self.sizes.append((1.0, float(tokens), float(rows), float(work.attended_tokens)))
            self.native_s.append(outcome.native_s)
            if self.last_at is not None:
                gap = step.now - self.last_at - outcome.native_s
                if 0 <= gap < GAP_MAX_S:
                    self.overhead_s.append(gap)
        self.last_at = step.now


def calibrate(path: Path) -> Calibration:
    """From a journal, or what was saved of one as JSON. Raises JournalError."""
    saved = _saved(path)
    return saved if saved is not None else measure(path)[0]


def measure(path: Path, report: Report | None = None) -> tuple[Calibration, Report]:
    """The calibration of a journal, and the report of the run that it recorded."""
    seen = _Iterations(report or Report())
    Replay(path, seen).run()
    if len(seen.sizes) < ITERATIONS_MIN:
        raise JournalError(
            f"{path}: holds {len(seen.sizes)} clean iterations; at least {ITERATIONS_MIN} are "
            "needed to fit costs: record a longer run"
        )
    sizes, seconds = np.array(seen.sizes), np.array(seen.native_s)
    found = _fit(sizes, seconds)
    errors = np.abs(sizes @ found / seconds - 1)
    overhead = float(np.median(seen.overhead_s)) if seen.overhead_s else 0.0
    fixed, token, sequence, attended = (found * 1e6).tolist()
    calibration = Calibration(
        fixed_us=fixed,
        token_us=token,
        sequence_us=sequence,
        attended_token_us=attended,
        overhead_us=overhead * 1e6,
        iterations=len(seconds),
        median_error=float(np.median(errors)),
        p95_error=float(np.percentile(errors, 95)),
    )
    return calibration, seen.report


def _fit(sizes: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Least squares of relative errors, none below zero.

    Iterations that a busy neighbour slowed down would pull the fit up: those far above it are
    left out the second time.
    """
    found = _non_negative(sizes, seconds)
    typical = seconds < 2 * (sizes @ found)
    return _non_negative(sizes[typical], seconds[typical]) if typical.sum() >= 4 else found


def _non_negative(
    sizes: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    scaled = sizes / seconds[:, None]
    unit = np.maximum(np.abs(scaled).max(axis=0), 1e-12)
    free = list(range(sizes.shape[1]))
    found = np.zeros(sizes.shape[1])
    while free:  # each round pins the most negative coefficient at zero
        solved = np.linalg.lstsq(scaled[:, free] / unit[free], np.ones(len(seconds)), rcond=None)[0]
        if (solved >= 0).all():
            found[free] = solved / unit[free]
            break
        free.pop(int(np.argmin(solved)))
    return found


def _saved(path: Path) -> Calibration | None:
    """A calibration saved as JSON; None if the file is a journal."""
    if path.suffix == ".gz":
        return None
    try:
        text = path.read_text() if path.stat().st_size < 1 << 16 else ""
        if not text or text.startswith('{"is":"' + FORMAT):
            return None
        values = json.loads(text)
        values.pop("coefficients", None)
        return Calibration(**values)
    except OSError as error:
        raise JournalError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise JournalError(f"{path}: neither a journal nor a saved calibration: {error}") from error
