"""The connections script: what it counts as left behind, and a small run against a real daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _client import Answer
from connections import gaps, lag_p99, spread

SCRIPT = Path(__file__).parents[2] / "scripts" / "connections.py"


def test_gaps_are_those_within_the_time_of_each_stream() -> None:
    one, other = Answer(9, text_at=[0.0, 1.0, 3.0, 7.0]), Answer(9, text_at=[2.0, 2.5])
    assert gaps([one, other], 1.0, 5.0) == [2.0, 0.5]


def test_median_and_99th_percentile() -> None:
    median, p99 = spread([1.0] * 98 + [2.0, 3.0])
    assert median == 1.0
    assert 2.0 <= p99 <= 3.0


def test_the_lag_is_told_by_the_bucket_that_holds_99_of_100() -> None:
    def metrics(*counts: int) -> dict[str, float]:
        bounds = zip(("0.001", "0.01", "+Inf"), counts, strict=True)
        name = "skippy:loop_lag_seconds"
        return {
            **{f'{name}_bucket{{le="{bound}",model_name="sim"}}': count for bound, count in bounds},
            f"{name}_count": counts[-1],
        }

    assert lag_p99(metrics(0, 0, 0), metrics(98, 99, 100)) == "0.01"
    assert lag_p99(metrics(50, 60, 100), metrics(150, 160, 200)) == "0.001"


def test_a_small_run_leaves_nothing_behind() -> None:
    """Files, tasks, lanes and streams; times are for the run by hand, on a machine at rest."""
    small = ("--seconds=1", "--rate=40", "--idle=40", "--slow=1", "--streams=2")
    unmeasured = ("--itl-ratio-max=inf", "--rss-growth-max=inf")
    run = subprocess.run(
        [sys.executable, SCRIPT, *small, *unmeasured], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "all held" in run.stdout
