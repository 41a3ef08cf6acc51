"""The event loop makes no call that blocks, whatever is asked (case 13)."""

from __future__ import annotations

import asyncio
import time

import pytest
from blockbuster import BlockingError, blockbuster_ctx

SCHEMA = {
    "type": "object",
    "properties": {f"field{i}": {"type": "string", "maxLength": 5} for i in range(200)},
}


async def test_a_blocking_call_would_be_noticed():
    with blockbuster_ctx(), pytest.raises(BlockingError):
        time.sleep(0.001)  # noqa: ASYNC251 - the point of it


async def test_200_streams_and_all_that_is_large_make_no_blocking_call(serving):
    engine = {"lanes": 200, "batch_tokens": 256, "context_tokens": 20000}
    async with serving(engine=engine) as client:
        with blockbuster_ctx("skippy_sched"):
            format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            async with asyncio.TaskGroup() as tasks:
                streams = [
                    tasks.create_task(client.complete(f"stream {i}", stream=True, max_tokens=20))
                    for i in range(200)
                ]
                long = tasks.create_task(client.complete("x" * 15000, max_tokens=2))
                too_long = tasks.create_task(client.complete("x" * 3_000_000, max_tokens=2))
                held = tasks.create_task(client.complete("x", response_format=format_))
                for path in ("/metrics", "/admin/live", "/admin/requests", "/", "/openapi.json"):
                    assert (await client.get(path)).status == 200
        assert all(len(task.result().events) for task in streams)
        assert long.result().json["usage"]["prompt_tokens"] == 15000
        assert too_long.result().error["code"] == "context_length_exceeded"
        assert held.result().status == 200
