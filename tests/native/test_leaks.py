"""A hundred thousand calls leave nothing behind."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from skippy_sched.native import IterationEntry, NativeError, SamplingConfig, iteration_batch_sampled

from .conftest import Engine, a_stage, add_fault, live_objects

PAGE = resource.getpagesize()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.timeout(300)
def test_a_hundred_thousand_iterations_leave_memory_flat(sim: Engine) -> None:
    """Decode rows, every tenth call failing, a session turned over every hundredth."""
    model = sim.open(ctx_size=512)
    sessions = [model.create_session() for _ in range(4)]
    add_fault(model, "call=iteration every=10 count=0 status=RUNTIME_ERROR")
    add_fault(model, "call=iteration every=7 count=0 effect=grow_buffer")
    sampling = SamplingConfig(enabled=True, temperature=1, seed=1)

    def run(iterations: int) -> None:
        for number in range(iterations):
            entries = [IterationEntry(session, [300], (), sampling) for session in sessions]
            try:
                iteration_batch_sampled(entries)
            except NativeError:
                continue
            if number % 100 == 0:
                sessions.pop(0).close()
                sessions.append(model.create_session())

    run(5_000)
    before, objects = resident_bytes(), live_objects(sim.library)
    run(95_000)
    assert resident_bytes() - before < 2 << 20
    assert live_objects(sim.library) == objects


def test_frames_that_are_dropped_give_their_memory_back(sim: Engine) -> None:
    stage = a_stage(sim, 0, 2, ctx_size=256)
    sessions = [stage.create_session() for _ in range(4)]

    def run(rounds: int) -> None:
        for _ in range(rounds):
            for session in sessions:
                session.reset()
            for _ in range(8):
                iteration_batch_sampled([IterationEntry(s, [300] * 12) for s in sessions])

    run(50)
    before = resident_bytes()
    run(1_000)
    assert resident_bytes() - before < 2 << 20
