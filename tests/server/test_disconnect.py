"""Clients that go away free what is theirs and nothing else (case 1)."""

from __future__ import annotations

import asyncio

import pytest

TEXT = "/v1/completions"
#: A real clock, so that requests are still under way when their clients leave.
SLOW = {"clock": "real", "cost_fixed_us": 2000}


def body(prompt: str, **fields: object) -> dict[str, object]:
    return {"prompt": prompt, "temperature": 0, "max_tokens": 200, **fields}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_lane_and_is_counted(serving, stream):
    async with serving(model=SLOW) as client:
        async with client.calling(TEXT, body("hello", stream=stream)) as call:
            if stream:
                await call.next_write()
            call.closed.set()
        metrics = await client.metrics()
        assert metrics["skippy:num_requests_running"] == 0
        assert metrics['skippy:requests_total{outcome="cancelled"}'] == 1
        assert client.statistics().generated_tokens < 200


async def test_the_others_texts_do_not_change(serving):
    async with serving(model=SLOW) as client:
        prompts = ["alpha", "beta", "gamma"]
        alone = [(await client.complete(p, max_tokens=30)).text() for p in prompts]
        async with asyncio.TaskGroup() as tasks:
            rest = [tasks.create_task(client.complete(p, max_tokens=30)) for p in prompts]
            async with client.calling(TEXT, body("leaver", stream=True)) as call:
                await call.next_write()
                call.closed.set()
        assert [task.result().text() for task in rest] == alone


async def test_a_client_that_leaves_the_queue_never_reaches_the_engine(serving):
    async with (
        serving(model=SLOW, engine={"lanes": 1}) as client,
        client.calling(TEXT, body("runs", stream=True)) as running,
    ):
        await running.next_write()
        async with client.calling(TEXT, body("waits", stream=True)) as waiting:
            while client.statistics().waiting == 0:
                await running.next_write()
            waiting.closed.set()
        assert client.statistics().waiting == 0
        assert client.statistics().prefill_tokens == len("runs")
        running.closed.set()


async def test_all_clients_leaving_at_once_leave_true_zeros(serving):
    async with serving(model=SLOW) as client:
        async with asyncio.TaskGroup() as tasks, asyncio.timeout(20):
            calls = [client.calling(TEXT, body(str(i), stream=True)) for i in range(6)]
            entered = [await call.__aenter__() for call in calls]
            await entered[0].next_write()
            for call in entered:
                call.closed.set()
            for call in calls:
                tasks.create_task(call.__aexit__(None, None, None))
        metrics = await client.metrics()
        assert metrics["skippy:num_requests_running"] == 0
        assert metrics["skippy:num_requests_waiting"] == 0
        assert metrics['skippy:requests_total{outcome="cancelled"}'] == 6


async def test_a_client_that_leaves_while_sending_is_forgotten(serving, stalled_call):
    async with serving() as client:
        call = stalled_call(b'{"prompt": ')
        call.closed.set()
        await client.run(call, "POST", TEXT)
        assert call.response.status == 0
        assert client.statistics().accepted == 0


async def test_a_waiting_stream_gets_comments_until_it_flows(serving):
    """Proxies cut connections on which nothing is sent."""
    slow = {"clock": "real", "cost_fixed_us": 2000}
    keep_alive = {"keep_alive_comment_s": 0.01}
    async with serving(model=slow, engine={"lanes": 1}, server=keep_alive) as client:
        async with client.calling(TEXT, body("runs", stream=True, max_tokens=60)) as running:
            await running.next_write()
            waited = await client.complete("waits", stream=True, max_tokens=30)
        comments = [part for part in waited.parts if part.startswith(b":")]
        assert comments
        assert waited.parts[: len(comments)] == comments, "none once tokens flow"
        assert len(waited.events) == 1 + len(waited.deltas())
