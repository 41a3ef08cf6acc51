"""What can be said of a request, at any moment of its life and after it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from skippy_sched.config import Config
from skippy_sched.scheduler.drain_rate import DrainRate
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.explain import ENDED_MAX, Explanation
from skippy_sched.scheduler.history import STEPS_MAX, History
from skippy_sched.scheduler.plan import Wait
from skippy_sched.scheduler.request import RequestParams

from .conftest import answer

MakeConfig = Callable[..., Config]


def of_length(tokens: int, **more: object) -> RequestParams:
    return RequestParams(max_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


@asynccontextmanager
async def submitted(
    engine: Engine, *requests: tuple[str, RequestParams]
) -> AsyncIterator[Callable[[str], Explanation]]:
    """So many requests under way; gives what explains one of them."""

    def explain(request_id: str) -> Explanation:
        found = engine.requests.explain(request_id)
        assert found is not None
        return found

    async with AsyncExitStack() as stack:
        for name, params in requests:
            stream = await engine.submit([1, 2, 3], params, request_id=name)
            await stack.enter_async_context(stream)
        while not engine.statistics().decoding:
            await asyncio.sleep(0)
        yield explain


async def test_waiting_requests_know_their_place_and_what_holds_them_up(
    sim_config: MakeConfig,
) -> None:
    config = sim_config(engine={"lanes": 1}, scheduler={"stream_buffer_tokens": 4})
    async with (
        Engine.open(config) as engine,
        submitted(
            engine,
            ("runs", of_length(100)),
            ("first", of_length(5)),
            ("second", of_length(5)),
            ("urgent", of_length(5)),
        ) as explain,
    ):
        while explain("runs").state != "paused":
            await asyncio.sleep(0)
        first, second, third = (explain(name) for name in ("first", "second", "urgent"))
        assert [each.queue_position for each in (first, second, third)] == [1, 2, 3]
        assert first.waits_for is Wait.LANE
        assert (second.waits_for, second.first_waits_for) == (Wait.QUEUE, Wait.LANE)
        assert first.start_in_s is None, "nobody has left the queue yet"
        assert explain("runs").waits_for is Wait.CONSUMER
        assert explain("runs").queue_position is None


async def test_a_higher_priority_is_seen_to_be_before_those_that_came_earlier(
    sim_config: MakeConfig,
) -> None:
    config = sim_config(engine={"lanes": 1}, scheduler={"stream_buffer_tokens": 4})
    async with (
        Engine.open(config) as engine,
        submitted(
            engine,
            ("runs", of_length(100, priority=2)),
            ("early", of_length(5)),
            ("urgent", of_length(5, priority=1)),
        ) as explain,
    ):
        assert explain("urgent").queue_position == 1
        assert explain("early").queue_position == 2


async def test_an_ended_request_tells_its_chunks_and_its_time(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config(engine={"batch_tokens": 16})) as engine:
        await answer(engine, list(range(1, 41)), of_length(7))
        (found,) = engine.requests.explain_all(10)
        chunks = [step.tokens for step in found.steps if step.what == "chunk"]
        assert sum(chunks) == 40
        assert len(chunks) == found.chunks >= 3
        assert [step.what for step in found.steps if step.what != "chunk"] == [
            "admitted",
            "decoding",
            "ended",
        ]
        assert found.state == "finished"
        assert found.ended_at is not None
        assert set(found.seconds) == {"waiting", "prefill", "decode"}
        assert sum(found.seconds.values()) == pytest.approx(found.ended_at - found.arrived_at)
        instants = [step.at for step in found.steps]
        assert instants == sorted(instants)


async def test_cache_hits_and_preemptions_are_told(sim_config: MakeConfig) -> None:
    prompt = list(range(1, 101))
    engine_keys = {"lanes": 1, "kv": "shared"}
    async with Engine.open(sim_config(engine=engine_keys)) as engine:
        await answer(engine, prompt, of_length(2))
        async with await engine.submit(prompt, of_length(60), request_id="second") as second:
            await anext(second)
            await answer(engine, [1], of_length(5, priority=1))
            assert [event async for event in second]
        found = engine.requests.explain("second")
        assert found is not None
        assert found.cached_tokens > 60
        assert found.steps[0].tokens == found.cached_tokens
        assert found.preemptions == 1
        assert sum(step.what in ("preempted", "swapped out") for step in found.steps) == 1
        assert found.completion_tokens == 60


async def test_a_slow_readers_pause_is_counted_apart(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config(scheduler={"stream_buffer_tokens": 4})) as engine:
        async with await engine.submit([1], of_length(20), request_id="slow") as stream:
            await answer(engine, [2], of_length(100))
            found = engine.requests.explain("slow")
            assert found is not None
            assert (found.state, found.waits_for) == ("paused", Wait.CONSUMER)
            assert [event async for event in stream]
        ended = engine.requests.explain("slow")
        assert ended is not None
        assert ended.seconds["paused"] > 0


async def test_ended_requests_are_kept_up_to_a_bound(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        for _ in range(ENDED_MAX + 5):
            async with await engine.submit([1], of_length(1)) as stream:
                stream.cancel()
                assert [event async for event in stream]
        kept = engine.requests.explain_all(2 * ENDED_MAX)
        assert len(kept) == ENDED_MAX
        assert engine.requests.explain(kept[0].request_id) == kept[0]
        assert engine.requests.explain("request-1") is None


async def test_the_list_has_running_then_waiting_then_ended_ones(sim_config: MakeConfig) -> None:
    config = sim_config(engine={"lanes": 1}, scheduler={"stream_buffer_tokens": 4})
    async with Engine.open(config) as engine:
        await answer(engine, [1], of_length(1))
        async with submitted(engine, ("a", of_length(50)), ("b", of_length(1))):
            names = [each.request_id for each in engine.requests.explain_all(10)]
            assert names == ["a", "b", "request-1"]
            assert len(engine.requests.explain_all(2)) == 2


def test_only_the_latest_steps_are_kept() -> None:
    history = History(0.0)
    for n in range(STEPS_MAX + 10):
        history.chunk(1, float(n))
    assert len(history.steps) == STEPS_MAX
    assert history.steps_dropped == 10
    assert history.chunks == STEPS_MAX + 10
    assert history.steps[-1].at == STEPS_MAX + 9


# --- the rate at which the queue drains -----------------------------------------------------------


def drained(each_s: float, requests: int = 100) -> DrainRate:
    """A queue that one request of 50 tokens left at a time."""
    rate = DrainRate()
    rate.observe(0.0, 0, 0, is_waiting=True)
    for n in range(requests):
        rate.observe((n + 1) * each_s, 1, 50, is_waiting=True)
    return rate


@pytest.mark.parametrize("each_s", [0.001, 0.25, 20.0])
def test_the_predicted_start_is_the_place_times_the_measured_interval(each_s: float) -> None:
    rate = drained(each_s)
    assert rate.start_in_s(1) == pytest.approx(each_s)
    assert rate.start_in_s(7) == pytest.approx(7 * each_s)
    assert rate.tokens_in_s(500) == pytest.approx(10 * each_s)


def test_time_without_a_queue_does_not_count() -> None:
    rate = drained(0.5)
    rate.observe(60.0, 1, 50, is_waiting=False)
    slower = rate.start_in_s(1)
    rate.observe(1000.0, 1, 50, is_waiting=False)
    assert rate.start_in_s(1) == slower


def test_a_stalled_queue_predicts_longer_and_longer() -> None:
    rate = drained(0.5)
    rate.observe(200.0, 0, 0, is_waiting=True)
    later = rate.start_in_s(1)
    assert later is not None
    assert later > 4


def test_those_who_are_refused_are_told_to_come_back_one_after_the_other() -> None:
    rate = drained(0.5)
    told = [rate.room_in_s(4, now=100.0) for _ in range(6)]
    assert told == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    assert rate.room_in_s(4, now=200.0) == pytest.approx(0.5)


def test_before_anybody_has_left_the_queue_its_age_is_all_there_is() -> None:
    rate = DrainRate()
    rate.observe(10.0, 0, 0, is_waiting=True)
    rate.observe(13.0, 0, 0, is_waiting=True)
    assert rate.start_in_s(1) is None
    assert rate.room_in_s(5, 13.0) == rate.tokens_in_s(100) == 3.0
