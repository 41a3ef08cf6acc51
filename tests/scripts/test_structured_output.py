"""Answers to random schemas fit them, on both engines; scripts/structured_output.py runs more."""

from __future__ import annotations

import random

import pytest
from _schemas import random_schema
from structured_output import check, what_is_wrong

from skippy_sched.config import Config
from skippy_sched.scheduler.engine import Engine


async def test_every_complete_answer_fits_its_schema(sim_config):
    async with Engine.open(sim_config(engine={"context_tokens": 2048}), seed=1) as engine:
        totals = await check(engine, range(60))
        assert totals.failures == []
        assert totals.answers == 120
        assert totals.cut == 0
        await engine.drain(5)


@pytest.mark.llama
async def test_every_complete_answer_of_a_real_model_fits_its_schema(default_model):
    config = Config.model_validate(
        {
            "model": {"path": str(default_model)},
            "engine": {"lanes": 8, "context_tokens": 1536, "threads": 2},
        }
    )
    async with Engine.open(config, seed=1) as engine:
        totals = await check(engine, range(12))
        assert totals.failures == []
        assert totals.cut <= 1
        await engine.drain(5)


def test_the_check_finds_what_does_not_fit():
    schema = random_schema(random.Random(3))
    assert what_is_wrong("no json", schema)
    assert what_is_wrong("5", {"type": "string"})
    assert what_is_wrong('"5"', {"type": "string"}) is None
