"""What prompts may cost running streams when no target is set, in virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from math import inf

from skippy_sched.config import Config
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.plan import FEW_PROMPTS_S, MANY_PROMPTS_S
from skippy_sched.simulate.driver import Step, open_engine, run
from skippy_sched.simulate.prompts import Prompts
from skippy_sched.simulate.traces import Arrival

#: as a small machine: 8 rows take 45 ms, a prompt token 4 ms
COSTS = {"cost_fixed_us": 5000, "cost_token_us": 4000, "cost_sequence_us": 1000}
#: of the virtual engine, which is exact, against the fitted model
TOLERANCE = 1.15


class Gaps:
    def __init__(self) -> None:
        self.token_at: dict[int, list[float]] = defaultdict(list)

    def refused(self, arrival: Arrival) -> None:
        raise AssertionError("none is refused here")

    def step(self, step: Step, scheduler: Scheduler) -> None:
        if step.reconciled is not None:
            for request, _ in step.reconciled.tokens:
                self.token_at[request.key].append(step.now)

    def of(self, key: int, after: float = 0.0, until: float = inf) -> list[float]:
        """Those that end later than ``after``, and at ``until`` at the latest."""
        pairs = pairwise(self.token_at[key])
        return [end - start for start, end in pairs if after < end <= until]


def serve(arrivals: Sequence[Arrival]) -> Gaps:
    config = Config.model_validate(
        {"engine": {"library": "sim", "lanes": 16, "context_tokens": 2048, "batch_tokens": 512}}
    )
    gaps = Gaps()
    with open_engine(config, COSTS) as engine:
        run(engine, iter(arrivals), Prompts(seed=1), gaps)
    return gaps


def test_one_long_prompt_widens_the_gaps_of_many_streams_little() -> None:
    streams = [Arrival(at_s=0.0, prompt_tokens=8, output_tokens=300) for _ in range(8)]
    gaps = serve([*streams, Arrival(at_s=5.0, prompt_tokens=1500, output_tokens=2)])
    *running, long = sorted(gaps.token_at)
    arrived, first = 5.0, gaps.token_at[long][0]
    for key in running:
        behind = gaps.of(key, arrived, first)
        assert max(behind) <= FEW_PROMPTS_S * TOLERANCE
        assert max(behind) > 3 * min(gaps.of(key)), "the prompt took what it may"


def test_where_more_wait_for_a_first_token_than_stream_they_may_take_more() -> None:
    teacher = Arrival(at_s=0.0, prompt_tokens=400, output_tokens=40)  # what a token costs
    crowd = [Arrival(at_s=10.0, prompt_tokens=400, output_tokens=40) for _ in range(16)]
    gaps = serve([teacher, *crowd])
    del gaps.token_at[min(gaps.token_at)]
    widest = max(max(gaps.of(key)) for key in gaps.token_at)
    assert FEW_PROMPTS_S * TOLERANCE < widest <= MANY_PROMPTS_S * TOLERANCE
    firsts = sorted(at[0] for at in gaps.token_at.values())
    late = [key for key, at in gaps.token_at.items() if at[0] > firsts[8]]
    assert max(max(gaps.of(key)) for key in late) <= FEW_PROMPTS_S * TOLERANCE
