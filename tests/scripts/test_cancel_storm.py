"""What the cancel storm decides: whom to close and when, and what counts as not at rest."""

from __future__ import annotations

import argparse

import pytest
from _client import Answer
from cancel_storm import busy, closing_moments, faults, growth

AT_REST = {
    "skippy:num_requests_running": 0.0,
    "skippy:num_requests_waiting": 0.0,
    "skippy:lanes": 4.0,
    "skippy:lanes_free": 4.0,
}


def storm_args(**changes: int) -> argparse.Namespace:
    return argparse.Namespace(**({"streams": 9, "output_tokens": 10, "seed": 1} | changes))


@pytest.mark.parametrize("output_tokens", [1, 2, 64])
def test_half_of_the_streams_are_closed_before_their_answer_can_end(output_tokens: int) -> None:
    args = storm_args(streams=64, output_tokens=output_tokens)
    for round_s in (None, 2.0):
        moments = closing_moments(args, 1, round_s)
        victims = [moment for moment in moments if moment]
        assert len(victims) == 32
        assert all(m["close_after_events"] <= max(1, output_tokens // 2) for m in victims)
        timed = [m["close_after_s"] for m in victims if "close_after_s" in m]
        assert len(timed) == (16 if round_s else 0)
        assert all(0 <= moment <= 2.0 for moment in timed)


def test_the_moments_repeat_with_their_seed_and_differ_between_rounds() -> None:
    first = closing_moments(storm_args(), 1, 1.0)
    assert first == closing_moments(storm_args(), 1, 1.0)
    assert first != closing_moments(storm_args(), 2, 1.0)
    assert first != closing_moments(storm_args(seed=2), 1, 1.0)


def test_a_server_at_rest_is_not_busy() -> None:
    assert busy(AT_REST) is None


@pytest.mark.parametrize("name", sorted(AT_REST))
def test_each_figure_that_is_off_or_missing_counts_as_not_at_rest(name: str) -> None:
    assert busy(AT_REST | {name: 3.0}) is not None
    assert busy({key: value for key, value in AT_REST.items() if key != name}) is not None


def test_only_an_answer_with_its_exact_count_has_no_fault() -> None:
    assert faults(Answer(3, completion_tokens=3, finish_reason="length")) is None
    assert faults(Answer(3, completion_tokens=2, finish_reason="length")) is not None
    assert faults(Answer(3, completion_tokens=3, finish_reason="stop")) is not None
    assert faults(Answer(3, error="http_500")) is not None
    assert faults(Answer(3)) is not None


def test_growth_compares_the_last_quarter_with_the_second() -> None:
    assert growth([50, 100, 100, 110]) == pytest.approx(0.1)
    assert growth([1, 1, 1]) is None
