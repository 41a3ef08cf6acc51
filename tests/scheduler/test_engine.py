"""The engine on the simulated library: exact counts, company without influence, clean ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from skippy_sched.config import Config
from skippy_sched.errors import (
    ContextLengthExceeded,
    Draining,
    EngineFailure,
    InvalidRequest,
    QueueFull,
    StartupError,
)
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

from .conftest import answer, assert_books_balance

MakeConfig = Callable[..., Config]
PROMPTS = [f"prompt number {n}, " + "long " * (n % 5) for n in range(8)]


def of_length(tokens: int, **more: object) -> RequestParams:
    return RequestParams(max_tokens=tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


async def test_a_request_gets_exactly_its_tokens_and_its_usage(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        got = await answer(engine, [1, 2, 3], of_length(10))
        assert len(got.tokens) == 10
        assert got.finish_reason == "length"
        assert got.usage is not None
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 10)
        assert_books_balance(engine)


async def test_company_does_not_change_a_text(sim_config: MakeConfig) -> None:
    params = of_length(40)
    async with Engine.open(sim_config()) as engine:
        alone = [await answer(engine, prompt, params) for prompt in PROMPTS]
        together = await asyncio.gather(*(answer(engine, prompt, params) for prompt in PROMPTS))
        assert [a.tokens for a in together] == [a.tokens for a in alone]
        assert len({tuple(a.tokens) for a in alone}) == len(PROMPTS)
        assert_books_balance(engine)


@pytest.mark.parametrize("batch_tokens", [4, 7, 64])
async def test_chunk_sizes_do_not_change_a_sampled_text(
    sim_config: MakeConfig, batch_tokens: int
) -> None:
    sampling = SamplingConfig(enabled=True, temperature=0.8, seed=42)
    prompt = list(range(1, 100))
    async with Engine.open(sim_config()) as engine:
        expected = await answer(engine, prompt, of_length(16, sampling=sampling))
    async with Engine.open(sim_config(engine={"batch_tokens": batch_tokens})) as engine:
        got = await answer(engine, prompt, of_length(16, sampling=sampling))
    assert got.tokens == expected.tokens


async def test_many_requests_share_few_lanes(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        got = await asyncio.gather(*(answer(engine, [n + 1], of_length(20)) for n in range(32)))
        assert all(len(a.tokens) == 20 for a in got)
        stats = engine.statistics()
        assert stats.decode_sequences / stats.decode_iterations > 3
        assert_books_balance(engine)


async def test_consumers_that_leave_free_their_lanes_and_disturb_nobody(
    sim_config: MakeConfig,
) -> None:
    rng = random.Random(7)
    async with Engine.open(sim_config()) as engine:
        for _ in range(5):
            leaving = [rng.randrange(1, 15) if n % 2 else None for n in range(16)]
            got = await asyncio.gather(
                *(
                    answer(engine, [n + 1], of_length(20), leave_after=leave)
                    for n, leave in enumerate(leaving)
                )
            )
            for a, leave in zip(got, leaving, strict=True):
                assert len(a.tokens) == (leave or 20)
        while engine.statistics().running:
            await asyncio.sleep(0)
        assert_books_balance(engine)
        assert engine.statistics().cancelled == 5 * 8


async def test_cancelling_a_task_cancels_its_request(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        task = asyncio.create_task(answer(engine, [1], of_length(400)))
        while not engine.statistics().generated_tokens:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.drain(5)
        assert engine.statistics().cancelled == 1
        assert_books_balance(engine)


async def test_cancel_by_id_ends_the_stream_with_what_it_has(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        stream = await engine.submit([1], of_length(400), request_id="mine")
        events = [await anext(stream)]
        assert engine.cancel("mine")
        events += [event async for event in stream]
        assert events[-1].finish_reason == "cancelled"
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == sum(len(e.token_ids) for e in events)
        assert not engine.cancel("mine")
        assert_books_balance(engine)


async def test_a_slow_consumer_pauses_only_itself(sim_config: MakeConfig) -> None:
    config = sim_config(scheduler={"stream_buffer_tokens": 4})
    async with Engine.open(config) as engine:
        slow = await engine.submit([1], of_length(50))
        got = await answer(engine, [2], of_length(200))
        assert len(got.tokens) == 200
        assert slow.request.completion_tokens <= 6
        rest = [token async for event in slow for token in event.token_ids]
        assert len(rest) == 50
        assert_books_balance(engine)


async def test_end_tokens_and_stop_strings_end_with_stop(sim_config: MakeConfig) -> None:
    script = [258, *b"one two three", 259]
    async with Engine.open(sim_config()) as engine:
        whole = await answer(engine, script, RequestParams(max_tokens=100))
        assert (whole.text, whole.finish_reason) == ("one two three", "stop")
        cut = await answer(engine, script, RequestParams(max_tokens=100, stop=("two",)))
        assert (cut.text, cut.finish_reason) == ("one ", "stop")
        assert cut.usage is not None
        assert cut.usage.completion_tokens == len("one two")
        last = await answer(engine, script, RequestParams(max_tokens=7, stop=("two",)))
        assert (last.text, last.finish_reason) == ("one ", "stop")
        end = await answer(engine, script, RequestParams(max_tokens=14))
        assert (end.text, end.finish_reason) == ("one two three", "stop")
        short = await answer(engine, script, RequestParams(max_tokens=13))
        assert (short.text, short.finish_reason) == ("one two three", "length")
        assert_books_balance(engine)


async def test_what_cannot_run_is_refused_before_it_is_queued(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        calls = engine.statistics().native_calls
        for prompt, params, kind, words in [
            ([], RequestParams(), InvalidRequest, "empty"),
            ([1, 99999], RequestParams(), InvalidRequest, "99999 at index 1"),
            ([-1], RequestParams(), InvalidRequest, "-1 at index 0"),
            ([1], RequestParams(max_tokens=0), InvalidRequest, "below 1"),
            ([1] * 512, RequestParams(), ContextLengthExceeded, "512 tokens"),
            ([1] * 500, RequestParams(max_tokens=13), ContextLengthExceeded, "513"),
            ([1], RequestParams(stop=("",)), InvalidRequest, "stop string is empty"),
            ("a\0b", RequestParams(), InvalidRequest, "NUL"),
            (
                [1],
                RequestParams(sampling=SamplingConfig(logit_bias=((10**9, 1.0),))),
                InvalidRequest,
                "1000000000",
            ),
        ]:
            got = await answer(engine, prompt, params)  # type: ignore[arg-type]
            assert type(got.error) is kind
            assert words in str(got.error)
        assert engine.statistics().native_calls == calls
        last = await answer(engine, [1] * 511, RequestParams(ignore_eos=True))
        assert (len(last.tokens), last.finish_reason) == (1, "length")
        assert_books_balance(engine)


async def test_the_waiting_queue_is_bounded(sim_config: MakeConfig) -> None:
    config = sim_config(engine={"lanes": 1}, scheduler={"waiting_requests_max": 3})
    async with Engine.open(config) as engine:
        streams = [await engine.submit([1], of_length(5)) for _ in range(3)]
        with pytest.raises(QueueFull, match="3 requests are waiting"):
            await engine.submit([1], of_length(5))
        for stream in streams:
            assert len([event async for event in stream]) == 5
        assert_books_balance(engine)


async def test_drain_finishes_what_runs_and_refuses_what_comes(sim_config: MakeConfig) -> None:
    async with Engine.open(sim_config()) as engine:
        tasks = [asyncio.create_task(answer(engine, [n + 1], of_length(30))) for n in range(8)]
        while engine.statistics().accepted < 8:
            await asyncio.sleep(0)
        assert await engine.drain(20) == 0
        assert [len(got.tokens) for got in await asyncio.gather(*tasks)] == [30] * 8
        with pytest.raises(Draining):
            await engine.submit([1])
        assert_books_balance(engine)


async def test_a_drain_at_its_limit_gives_the_rest_a_terminal_answer(
    sim_config: MakeConfig,
) -> None:
    config = sim_config(scheduler={"stream_buffer_tokens": 2})
    async with Engine.open(config) as engine:
        stuck = [await engine.submit([n + 1], of_length(100)) for n in range(6)]
        assert await engine.drain(0) == 6
        for stream in stuck:
            with pytest.raises(Draining, match="shut down"):
                async for _ in stream:
                    pass
        while engine.statistics().running:
            await asyncio.sleep(0)
        assert_books_balance(engine)


@pytest.mark.parametrize(
    "fault",
    [
        "call=iteration nth=3 status=RUNTIME_ERROR when=before",
        "call=iteration nth=3 status=RUNTIME_ERROR when=after",
        "call=iteration nth=3 index=2 status=RUNTIME_ERROR when=middle",
        "call=iteration nth=3 status=INVALID_ARGUMENT",
        "call=iteration nth=3 effect=wrong_count",
        "call=iteration nth=3 effect=duplicate_index",
        "call=iteration nth=3 effect=index_out_of_range",
        "call=iteration nth=3 effect=grow_buffer",
        "call=iteration nth=3 effect=no_error_object status=RUNTIME_ERROR",
    ],
)
async def test_a_passing_native_fault_costs_nobody_a_token(
    sim_config: MakeConfig, fault: str
) -> None:
    async with Engine.open(sim_config()) as engine:
        alone = [await answer(engine, prompt, of_length(12)) for prompt in PROMPTS]
    async with Engine.open(sim_config({"fault": fault})) as engine:
        got = await asyncio.gather(*(answer(engine, prompt, of_length(12)) for prompt in PROMPTS))
        assert [a.tokens for a in got] == [a.tokens for a in alone]
        assert_books_balance(engine)


@pytest.mark.parametrize(
    "fault",
    [
        "call=session_create nth=2 status=RUNTIME_ERROR",
        "call=iteration nth=3 index=1 effect=token_out_of_range",
        "call=iteration nth=3 index=1 effect=position_off_by_one",
        "call=iteration nth=3 effect=fewer_samples",
        "call=iteration token=77 count=0 status=RUNTIME_ERROR",
        "call=iteration token=77 count=0 status=RUNTIME_ERROR when=after",
    ],
)
async def test_a_fault_of_one_row_fails_one_request(sim_config: MakeConfig, fault: str) -> None:
    prompts = [[n + 1, n + 2] for n in range(6)]
    prompts[2] = [77, 5]
    # Scripts, so that no generated token can be the poisoned one.
    prompts = [[*prompt, 258, *b"abcdefgh", 259] for prompt in prompts]
    async with Engine.open(sim_config({"fault": fault})) as engine:
        got = await asyncio.gather(*(answer(engine, p, of_length(8)) for p in prompts))
        failed = [a for a in got if a.error is not None]
        assert len(failed) == 1
        assert isinstance(failed[0].error, EngineFailure)
        assert all(a.text == "abcdefgh" for a in got if a.error is None)
        assert_books_balance(engine)


async def test_faults_at_every_call_kind_end_every_request_once(sim_config: MakeConfig) -> None:
    kinds = ["iteration", "session_create", "session_free", "reset", "trim"]
    faults = [f"call={kind} every=5 count=0 status=RUNTIME_ERROR" for kind in kinds]
    faults.append("call=iteration every=7 count=0 status=RUNTIME_ERROR when=after")
    async with Engine.open(sim_config({"fault": faults})) as engine:
        got = await asyncio.gather(*(answer(engine, p, of_length(12)) for p in PROMPTS * 4))
        for a in got:
            assert (a.error is None) == (len(a.tokens) == 12)
        engine.check_invariants()
        stats = engine.statistics()
        assert stats.accepted == 32 == stats.finished + stats.failed


async def test_a_model_that_cannot_be_opened_says_so_in_one_line(sim_config: MakeConfig) -> None:
    for config, words in [
        (sim_config({"no_such_key": 1}), "no_such_key"),
        (sim_config(engine={"expected_abi": "0.1.62"}), "0.1.62"),
        (sim_config(engine={"library": "/nonexistent/libskippy.so"}), "/nonexistent"),
    ]:
        with pytest.raises(StartupError, match=words) as caught:
            async with Engine.open(config):
                pass
        assert "\n" not in str(caught.value)


async def test_long_work_leaves_the_loop_to_others(sim_config):
    """Long texts are tokenized, and schemas compiled, while the loop turns."""
    properties = {f"field {n}": {"type": "string", "maxLength": n + 1} for n in range(200)}
    schema = {"type": "object", "properties": properties}
    async with Engine.open(sim_config()) as engine:
        for work in (engine.vocabulary.tokenize("word " * 200_000), engine.compile_schema(schema)):
            task, turns = asyncio.ensure_future(work), 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            await task
            assert turns > 5
