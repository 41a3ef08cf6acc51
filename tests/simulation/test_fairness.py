"""Fair shares, priorities and deadlines in virtual time: who is served when, to the token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest

from skippy_sched.config import Config
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.request import Request
from skippy_sched.simulate.driver import Step, open_engine, run
from skippy_sched.simulate.prompts import Prompts
from skippy_sched.simulate.traces import Arrival

COSTS = {"cost_fixed_us": 5000, "cost_token_us": 200, "cost_sequence_us": 1000}


class Watch:
    """Notes first tokens, and tokens computed by tenant between two instants."""

    def __init__(self, start_s: float = 0.0, end_s: float = 1e9) -> None:
        self.first_token_s: dict[str, list[float]] = defaultdict(list)
        self.served: dict[str, int] = defaultdict(int)
        self.order: list[Request] = []
        self.refusals = 0
        self._window = (start_s, end_s)
        self._seen: set[int] = set()

    def refused(self, arrival: Arrival) -> None:
        self.refusals += 1

    def step(self, step: Step, scheduler: Scheduler) -> None:
        if step.reconciled is None:
            return
        for request, _ in step.reconciled.tokens:
            if request.key not in self._seen:
                self._seen.add(request.key)
                self._first(request)
            if self._window[0] <= step.now < self._window[1]:
                self.served[request.tenant] += 1

    def _first(self, request: Request) -> None:
        assert request.first_token_at is not None
        self.order.append(request)
        self.first_token_s[request.tenant].append(request.first_token_at - request.arrived_at)


def serve(
    arrivals: Iterator[Arrival],
    watch: Watch,
    *,
    lanes: int,
    costs: dict[str, int] = COSTS,
    **scheduler: object,
) -> Watch:
    config = Config.model_validate(
        {
            "engine": {"library": "sim", "lanes": lanes, "context_tokens": 512},
            "scheduler": {
                "waiting_requests_max": 100_000,
                "inter_token_target_ms": 50,
                **scheduler,
            },
        }
    )
    with open_engine(config, costs) as engine:
        run(engine, arrivals, Prompts(seed=1), watch)
    return watch


def every(interval_s: float, until_s: float, tenant: str, **more: int) -> Iterator[Arrival]:
    for n in range(int(until_s / interval_s)):
        yield Arrival(
            at_s=n * interval_s, prompt_tokens=40, output_tokens=40, tenant=tenant, **more
        )


def merged(*streams: Iterator[Arrival]) -> Iterator[Arrival]:
    return iter(sorted((a for s in streams for a in s), key=lambda a: a.at_s))


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def test_a_small_tenant_hardly_feels_one_that_sends_twenty_times_more() -> None:
    half = {key: 2 * cost for key, cost in COSTS.items()}
    alone = serve(every(0.25, 20.0, "small"), Watch(), lanes=4, costs=half)
    both = merged(every(0.25, 20.0, "small"), every(0.0125, 20.0, "big"))
    mixed = serve(both, Watch(), lanes=8)
    assert len(mixed.first_token_s["small"]) == 80
    assert p95(mixed.first_token_s["big"]) > 20 * p95(alone.first_token_s["small"])
    assert p95(mixed.first_token_s["small"]) <= 1.5 * p95(alone.first_token_s["small"])


def test_weights_give_tokens_in_their_ratio() -> None:
    both = merged(every(0.1, 64.0, "light"), every(0.05, 64.0, "heavy"))
    watch = serve(both, Watch(2.0, 62.0), lanes=8, tenant_weights={"heavy": 3.0})
    assert watch.served["heavy"] / watch.served["light"] == pytest.approx(3.0, rel=0.05)


def test_a_low_priority_is_passed_only_by_what_comes_before_it_has_aged() -> None:
    flood = every(0.08, 40.0, "a", priority=2)
    patient = iter([Arrival(at_s=1.0, prompt_tokens=40, output_tokens=40, tenant="a")])
    watch = serve(merged(flood, patient), Watch(), lanes=4, aging_s=5.0)
    (place,) = (n for n, request in enumerate(watch.order) if request.params.priority == 0)
    later = [request.arrived_at for request in watch.order[:place]]
    assert max(later) > 1.0 + 5.0
    # One class for every aging_s, so two classes after twice that; ages count in whole steps.
    assert max(later) <= watch.order[place].arrived_at + 3 * 5.0
