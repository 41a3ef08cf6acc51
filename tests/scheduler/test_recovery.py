"""An engine that hangs, aborts or is killed costs a pause; only the guilty request fails."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Callable

import pytest

from skippy_sched.config import Config
from skippy_sched.errors import EngineDead, EngineFailure
from skippy_sched.scheduler.child import ChildProcess
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

from .conftest import Answer, answer, assert_books_balance

MakeConfig = Callable[..., Config]
# Scripts, so that no generated token can be the poisoned one; different for each request.
PROMPTS = [[n + 1, 258, *b"text number %02d" % n, 259] for n in range(32)]
POISON = 77
POISONED = [POISON, 258, *b"poisoned", 259]
PARAMS = RequestParams(max_tokens=100)


def check_survivors(got: list[Answer]) -> None:
    for n, a in enumerate(got):
        assert (a.text, a.finish_reason) == (f"text number {n:02d}", "stop"), a


async def all_of_them(engine: Engine, *more: list[int]) -> list[Answer]:
    prompts = [*PROMPTS[:16], *more, *PROMPTS[16:]]
    got = list(await asyncio.gather(*(answer(engine, prompt, PARAMS) for prompt in prompts)))
    check_survivors(got[:16] + got[16 + len(more) :])
    return got[16 : 16 + len(more)]


@pytest.mark.parametrize(("isolated", "effect"), [(False, "hang"), (True, "hang"), (True, "abort")])
async def test_a_request_that_takes_the_engine_down_fails_alone(
    sim_config: MakeConfig, isolated: bool, effect: str
) -> None:
    config = sim_config(
        {"fault": f"call=iteration token={POISON} count=0 effect={effect}"},
        engine={"isolated": isolated},
        scheduler={"watchdog_s": 0.3},
    )
    async with Engine.open(config) as engine:
        (guilty,) = await all_of_them(engine, POISONED)
        assert isinstance(guilty.error, EngineFailure)
        assert "lost twice" in str(guilty.error)
        assert engine.statistics().recoveries == 2
        assert_books_balance(engine)


async def test_a_killed_engine_process_costs_nobody_a_token(sim_config: MakeConfig) -> None:
    config = sim_config({"clock": "real", "cost_fixed_us": 2000}, engine={"isolated": True})
    async with Engine.open(config) as engine:
        task = asyncio.create_task(all_of_them(engine))
        for kills in range(2):
            while engine.statistics().generated_tokens < 100 * (kills + 1):
                await asyncio.sleep(0)
            child = engine._native.executor
            assert isinstance(child, ChildProcess)
            os.kill(child.pid, signal.SIGKILL)
            while engine.statistics().recoveries == kills:
                await asyncio.sleep(0)
        await task
        assert_books_balance(engine)


async def test_a_dead_worker_thread_costs_nobody_a_token(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config({"clock": "real", "cost_fixed_us": 2000})) as engine:
        task = asyncio.create_task(all_of_them(engine))
        while engine.statistics().generated_tokens < 100:
            await asyncio.sleep(0)
        # The latest one: an engine that hung before has left its thread behind.
        worker = [t for t in threading.enumerate() if t.name == "skippy-worker"][-1]
        assert worker.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit)
        )
        await task
        assert engine.statistics().recoveries == 1
        assert_books_balance(engine)


async def test_an_engine_lost_again_and_again_is_given_up(sim_config: MakeConfig) -> None:
    config = sim_config(
        {"fault": "call=iteration nth=3 effect=hang"}, scheduler={"watchdog_s": 0.05}
    )
    async with Engine.open(config) as engine:
        got = await asyncio.gather(*(answer(engine, prompt, PARAMS) for prompt in PROMPTS))
        assert "watchdog" in await engine.died()
        # Everyone has an answer: text, or an error that says what happened.
        assert any(isinstance(a.error, EngineDead) for a in got)
        assert all(a.error is not None or a.finish_reason == "stop" for a in got)
        with pytest.raises(EngineDead, match="watchdog"):
            await engine.submit([1])


async def test_an_engine_process_that_cannot_open_its_model_says_why(
    sim_config: MakeConfig,
) -> None:
    with pytest.raises(Exception, match="no_such_key"):
        async with Engine.open(sim_config({"no_such_key": 1}, engine={"isolated": True})):
            pass
