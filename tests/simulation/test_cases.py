"""Troubles that users of such systems have reported, staged in virtual time, to the token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from skippy_sched.config import Config
from skippy_sched.scheduler.planner import PREEMPTIONS_MAX
from skippy_sched.scheduler.request import Request, RequestParams, Status
from skippy_sched.simulate.driver import Step, VirtualEngine, open_engine

MS = 0.001


@contextmanager
def engine_with(costs: dict[str, int], **sections: dict[str, object]) -> Iterator[VirtualEngine]:
    given: dict[str, dict[str, object]] = {"engine": {"library": "sim"}, "scheduler": {}}
    for name, values in sections.items():
        given[name] = {**given[name], **values}
    with open_engine(Config.model_validate(given), costs) as engine:
        yield engine


def submit(engine: VirtualEngine, prompt: int, tokens: int, priority: int = 0) -> Request:
    params = RequestParams(max_tokens=tokens, ignore_eos=True, priority=priority)
    first = engine.scheduler.state.totals.accepted + 1  # so that no prompts share a prefix
    ids = [first % 250, *(1 + n % 250 for n in range(prompt - 1))]
    request = engine.intake.request(ids, params, None, engine.clock.now())
    engine.scheduler.submit(request)
    return request


def steps_until(engine: VirtualEngine, *requests: Request) -> list[Step]:
    steps = []
    while not all(request.status.is_final for request in requests):
        steps.append(engine.step())
    return steps


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    """Every iteration has all streams, and none is longer than a full budget takes."""
    costs = {"cost_fixed_us": 1000, "cost_token_us": 100}
    sizes = {"lanes": 9, "context_tokens": 40_000, "batch_tokens": 256}
    with engine_with(costs, engine=sizes) as engine:
        streams = [submit(engine, 4, 400) for _ in range(8)]
        while any(stream.completion_tokens < 20 for stream in streams):
            engine.step()
        prompt = submit(engine, 32_768, 1)
        steps = steps_until(engine, prompt)
        gaps = [gap for step in steps if step.reconciled for gap in step.reconciled.gaps_s]
        assert max(gaps) <= 1 * MS + 256 * 0.1 * MS + 1e-9
        iterations = [step.iteration for step in steps if step.iteration is not None]
        assert all(len(iteration.decode_keys) == 8 for iteration in iterations)
        assert len(iterations) == ceil(32_768 / 248)


def test_prompts_without_end_do_not_starve_running_streams() -> None:
    """A new prompt at every turn: still each stream has a token in each iteration."""
    costs = {"cost_fixed_us": 1000, "cost_token_us": 100}
    sizes = {"lanes": 6, "context_tokens": 512, "batch_tokens": 64}
    limits = {"waiting_requests_max": 1000}
    with engine_with(costs, engine=sizes, scheduler=limits) as engine:
        stream = submit(engine, 4, 100)
        while stream.status is not Status.DECODE:
            engine.step()
        others = []
        while not stream.status.is_final:
            others.append(submit(engine, 300, 1))
            before = stream.completion_tokens
            engine.step()
            assert stream.completion_tokens == before + 1
        assert any(other.status is Status.FINISHED for other in others)
        steps_until(engine, *others)


def test_a_prompt_that_is_cancelled_between_its_chunks_makes_no_more_calls() -> None:
    sizes = {"lanes": 2, "context_tokens": 8192, "batch_tokens": 256}
    with engine_with({}, engine=sizes) as engine:
        prompt = submit(engine, 4096, 10)
        for _ in range(2):
            engine.step()
        computed = prompt.computed
        assert 0 < computed < 4096
        engine.scheduler.cancel(prompt)
        following = submit(engine, 8, 1)
        steps = steps_until(engine, following)
        assert prompt.status is Status.CANCELLED
        assert prompt.computed == computed
        assert all(
            chunk.key != prompt.key
            for step in steps
            if step.iteration is not None
            for chunk in step.iteration.chunks
        )


def test_a_preempted_request_is_no_new_arrival_and_is_not_preempted_for_ever() -> None:
    """The queue's limit does not refuse it; urgent ones take its lane only so often."""
    sizes = {"lanes": 1, "context_tokens": 512, "batch_tokens": 64}
    with engine_with({}, engine=sizes, scheduler={"waiting_requests_max": 1}) as engine:
        patient = submit(engine, 8, 60)
        while patient.status is not Status.DECODE:
            engine.step()
        for _ in range(PREEMPTIONS_MAX):
            urgent = submit(engine, 8, 2, priority=9)
            engine.step()
            assert patient.status is Status.WAITING
            steps_until(engine, urgent)
            while patient.status is not Status.DECODE:
                engine.step()
        last = submit(engine, 8, 2, priority=9)
        steps_until(engine, patient, last)
        assert patient.preemptions == PREEMPTIONS_MAX
        assert patient.finished_at is not None
        assert last.first_token_at is not None
        assert patient.finished_at <= last.first_token_at
        assert patient.completion_tokens == 60
