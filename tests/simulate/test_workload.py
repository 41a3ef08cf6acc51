"""Synthetic traffic, prompts and histograms."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from skippy_sched.simulate.histogram import Histogram
from skippy_sched.simulate.prompts import Prompts
from skippy_sched.simulate.timeline import POINTS_MAX, Timeline
from skippy_sched.simulate.traces import BLOCK_TOKENS, Arrival
from skippy_sched.simulate.workload import Lengths, Workload


def a_workload(**more: object) -> Workload:
    given = {"rate": 10.0, "prompt": Lengths(100, 500), "output": Lengths(20, 60), **more}
    return Workload(**given)  # type: ignore[arg-type]


def test_arrivals_come_at_the_rate_and_nine_tenths_of_the_lengths_in_the_range() -> None:
    arrivals = list(islice(a_workload().arrivals(), 20_000))
    assert arrivals[-1].at_s == pytest.approx(2000, rel=0.05)
    inside = sum(100 <= arrival.prompt_tokens <= 500 for arrival in arrivals)
    assert inside / len(arrivals) == pytest.approx(0.9, abs=0.02)


def test_bursts_have_the_same_rate_and_more_uneven_gaps() -> None:
    def gaps(burstiness: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        arrivals = islice(a_workload(burstiness=burstiness).arrivals(), 20_000)
        return np.diff([arrival.at_s for arrival in arrivals])

    even, bursts = gaps(1.0), gaps(0.2)
    assert bursts.mean() == pytest.approx(even.mean(), rel=0.1)
    assert bursts.std() > 1.8 * even.std()


def test_tenants_get_their_shares() -> None:
    workload = a_workload(tenants={"big": 20.0, "small": 1.0})
    arrivals = list(islice(workload.arrivals(), 10_000))
    assert sum(a.tenant == "small" for a in arrivals) / 10_000 == pytest.approx(1 / 21, abs=0.01)


def test_the_same_seed_gives_the_same_traffic() -> None:
    def traffic(seed: int) -> list[Arrival]:
        return list(islice(a_workload(seed=seed).arrivals(), 50))

    assert traffic(3) == traffic(3) != traffic(4)


@pytest.mark.parametrize("text", ["0-5", "9-3", "x", "1-"[:1] + "-0"])
def test_impossible_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - argparse shows the words
        Lengths.parse(text)


def test_equal_blocks_are_equal_tokens_and_others_are_not() -> None:
    prompts = Prompts(seed=1)
    one = prompts.tokens(Arrival(0, 1200, 1, blocks=(7, 8, 9)))
    two = prompts.tokens(Arrival(0, 1100, 1, blocks=(7, 8, 10)))
    assert one[: 2 * BLOCK_TOKENS] == two[: 2 * BLOCK_TOKENS]
    assert one[2 * BLOCK_TOKENS] != two[2 * BLOCK_TOKENS]
    assert (len(one), len(two)) == (1200, 1100)


def test_of_two_prompts_with_one_prefix_the_shorter_begins_the_longer() -> None:
    prompts = Prompts()
    short = prompts.tokens(Arrival(0, 40, 1, prefix="a"))
    long = prompts.tokens(Arrival(0, 90, 1, prefix="a"))
    assert long[:40] == short


def test_prompts_without_anything_in_common_differ_within_the_first_tokens() -> None:
    prompts = Prompts()
    heads = {tuple(prompts.tokens(Arrival(0, 5, 1))) for _ in range(1000)}
    assert len(heads) == 1000


def test_percentiles_are_right_to_half_a_percent() -> None:
    values = np.random.default_rng(0).lognormal(-3, 2, 50_000)
    histogram = Histogram()
    histogram.extend(values.tolist())
    for percent in (1, 50, 95, 99):
        exact = float(np.percentile(values, percent, method="inverted_cdf"))
        assert histogram.percentile(percent) == pytest.approx(exact, rel=0.006)
    assert histogram.max == values.max()
    assert histogram.mean == pytest.approx(values.mean())


def test_a_long_timeline_keeps_its_extremes_in_few_points() -> None:
    timeline = Timeline()
    for second in range(50_000):
        timeline.queue(float(second), waiting=1000 if second == 777 else 1, running=2)
    rows = timeline.rows()
    assert len(rows) <= POINTS_MAX
    (peak,) = (row for row in rows if row["queue"] == 1000)
    assert peak["at_s"] is not None
    assert peak["at_s"] <= 777 < peak["at_s"] + timeline.width_s


def test_fewer_points_keep_the_extremes_and_the_mean() -> None:
    timeline = Timeline()
    for second in range(1000):
        timeline.queue(float(second), waiting=second, running=1)
        timeline.first_token(float(second), ttft_s=1.0 if second % 2 else 3.0)
    rows = timeline.rows(points_max=10)
    assert len(rows) <= 10
    assert max(row["queue"] for row in rows if row["queue"] is not None) == 999
    assert {row["mean_ttft_ms"] for row in rows} == {2000.0}
    assert {row["max_ttft_ms"] for row in rows} == {3000.0}
