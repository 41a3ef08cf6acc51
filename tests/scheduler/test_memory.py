"""KV cells, preemption and saved prefixes, on the simulated engine: never a wrong token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from skippy_sched.config import Config
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

from .conftest import answer, assert_books_balance

MakeConfig = Callable[..., Config]
PREFIX = list(range(260, 360))


def of_length(tokens: int, **more: object) -> RequestParams:
    return RequestParams(max_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("prefix_cache_tokens", [0, 8192])
async def test_three_times_more_cells_wanted_than_there_are(
    sim_config: MakeConfig, preemption: str, prefix_cache_tokens: int
) -> None:
    prompts = [[n + 1] * 40 for n in range(12)]
    async with Engine.open(sim_config()) as engine:
        alone = [await answer(engine, prompt, of_length(60)) for prompt in prompts]
    config = sim_config(
        engine={"kv": "shared", "lanes": 12, "context_tokens": 200, "pool_tokens": 400},
        scheduler={"preemption": preemption, "prefix_cache_tokens": prefix_cache_tokens},
    )
    async with Engine.open(config) as engine:
        got = await asyncio.gather(*(answer(engine, prompt, of_length(60)) for prompt in prompts))
        assert [a.tokens for a in got] == [a.tokens for a in alone]
        state = engine.statistics()
        assert state.preemptions > 0
        assert (state.swaps > 0) == (preemption == "swap")
        assert_books_balance(engine)


@pytest.mark.parametrize("kv", ["per_lane", "shared"])
async def test_requests_that_come_together_compute_a_common_prefix_once(
    sim_config: MakeConfig, kv: str
) -> None:
    prompts = [[*PREFIX, n + 1, n + 2, n + 3] for n in range(16)]
    engine_section = {"kv": kv, "lanes": 16, "batch_tokens": 64}
    async with Engine.open(
        sim_config(engine=engine_section, scheduler={"prefix_cache_tokens": 0})
    ) as engine:
        alone = [await answer(engine, prompt, of_length(8)) for prompt in prompts]
        assert all(a.usage and a.usage.cached_tokens == 0 for a in alone)
    async with Engine.open(sim_config(engine=engine_section)) as engine:
        got = await asyncio.gather(*(answer(engine, prompt, of_length(8)) for prompt in prompts))
        assert [a.tokens for a in got] == [a.tokens for a in alone]
        assert engine.statistics().prefill_tokens == len(PREFIX) + 16 * 3
        assert sorted(a.usage.cached_tokens for a in got if a.usage) == [0] + [len(PREFIX)] * 15
        assert_books_balance(engine)


@pytest.mark.parametrize("kv", ["per_lane", "shared"])
async def test_a_conversation_goes_on_from_its_last_answer(sim_config: MakeConfig, kv: str) -> None:
    async with Engine.open(sim_config(engine={"kv": kv})) as engine:
        first = await answer(engine, PREFIX, of_length(50))
        second = await answer(engine, [*PREFIX, *first.tokens, 1, 2], of_length(5))
        assert second.usage is not None
        # The last token of the answer was never given to the engine.
        assert second.usage.cached_tokens == len(PREFIX) + 49
        assert_books_balance(engine)


@pytest.mark.parametrize("kv", ["per_lane", "shared"])
async def test_prefixes_are_evicted_rather_than_anyone_refused(
    sim_config: MakeConfig, kv: str
) -> None:
    config = sim_config(
        engine={
            "kv": kv,
            "context_tokens": 256,
            **({"pool_tokens": 300} if kv == "shared" else {}),
        },
        scheduler={"prefix_cache_tokens": 300},
    )
    async with Engine.open(config) as engine:
        for n in range(30):
            got = await answer(engine, [n + 1] * 150, of_length(20))
            assert len(got.tokens) == 20
            assert_books_balance(engine)
        assert engine.statistics().preemptions == 0


async def test_tenants_can_be_kept_from_each_others_prefixes(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config(scheduler={"prefix_cache_per_tenant": True})) as engine:
        cached = []
        for tenant in ("a", "b", "a"):
            got = await answer(engine, PREFIX, of_length(2, tenant=tenant))
            assert got.usage is not None
            cached.append(got.usage.cached_tokens)
        assert cached == [0, 0, len(PREFIX) - 1]


@pytest.mark.parametrize(
    "fault",
    [
        "call=save_prefix nth=1 status=RUNTIME_ERROR",
        "call=restore_prefix every=2 count=0 status=RUNTIME_ERROR",
        "call=export_state every=2 count=0 status=RUNTIME_ERROR",
        "call=import_state every=2 count=0 status=RUNTIME_ERROR",
    ],
)
async def test_faults_of_prefixes_and_swaps_cost_time_but_no_token(
    sim_config: MakeConfig, fault: str
) -> None:
    prompts = [[*PREFIX[:40], n + 1] for n in range(12)]
    async with Engine.open(sim_config()) as engine:
        alone = [await answer(engine, prompt, of_length(40)) for prompt in prompts]
    config = sim_config(
        {"fault": fault},
        engine={"kv": "shared", "lanes": 12, "context_tokens": 200, "pool_tokens": 300},
        scheduler={"preemption": "swap"},
    )
    async with Engine.open(config) as engine:
        got = await asyncio.gather(*(answer(engine, prompt, of_length(40)) for prompt in prompts))
        assert [a.tokens for a in got] == [a.tokens for a in alone]
        assert_books_balance(engine)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_a_higher_priority_takes_the_lane_of_the_latest_lower_one(
    sim_config: MakeConfig, preemption: str
) -> None:
    config = sim_config(engine={"lanes": 2}, scheduler={"preemption": preemption})
    async with Engine.open(config) as engine:
        alone = [await answer(engine, [n + 1], of_length(100)) for n in range(4)]
        tasks = []
        for n, priority in enumerate((0, 0, 0, 5)):
            params = of_length(100, priority=priority)
            tasks.append(asyncio.create_task(answer(engine, [n + 1], params)))
            while engine.statistics().decoding < min(n + 1, 2):
                await asyncio.sleep(0)
        got = await asyncio.gather(*tasks)
        assert [a.tokens for a in got] == [a.tokens for a in alone]
        assert engine.statistics().preemptions == 1
        assert_books_balance(engine)


async def test_equal_priorities_never_preempt_each_other(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config(engine={"lanes": 2})) as engine:
        params = of_length(50, priority=3)
        await asyncio.gather(*(answer(engine, [n + 1], params) for n in range(12)))
        assert engine.statistics().preemptions == 0
