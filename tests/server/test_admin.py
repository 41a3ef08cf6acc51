"""What the operator may ask over HTTP."""

from __future__ import annotations

import asyncio

import pytest

SLOW = {"clock": "real", "cost_fixed_us": 3000}


async def test_a_request_is_explained_by_its_answers_id_and_by_its_request_id(serving):
    async with serving() as client:
        done = await client.post(
            "/v1/completions", {"prompt": "hello", "max_tokens": 5}, **{"x-request-id": "mine"}
        )
        assert done.json["id"] == "cmpl-mine"
        for name in ("cmpl-mine", "mine"):
            told = (await client.get(f"/admin/requests/{name}")).json
            assert told["id"] == "cmpl-mine"
            assert told["state"] == "finished"
            assert told["completion_tokens"] == 5
            assert told["steps"][-1]["what"] == "ended"
            assert "5 tokens" in told["why"]
        named_by_us = await client.chat()
        told = await client.get("/admin/requests/" + named_by_us.headers["x-request-id"])
        assert told.json["id"] == named_by_us.json["id"]


async def test_a_waiting_request_says_why(serving):
    async with serving(model=SLOW, engine={"lanes": 1}) as client:
        body = {"prompt": "x", "max_tokens": 50, "stream": True}
        async with client.calling("/v1/completions", body) as running:
            await running.next_write()
            async with (
                client.calling("/v1/completions", body),
                client.calling("/v1/completions", body),
            ):
                while client.statistics().waiting < 2:
                    await running.next_write()
                listed = (await client.get("/admin/requests")).json["data"]
                assert [each["queue_position"] for each in listed] == [None, 1, 2]
                assert "1 in the queue" in listed[1]["why"]
                running.closed.set()


async def test_one_id_used_twice_at_a_time_serves_both(serving):
    async with serving(model=SLOW) as client:
        body = {"prompt": "x", "max_tokens": 20}
        headers = {"x-request-id": "twice"}
        both = await asyncio.gather(
            *(client.post("/v1/completions", body, **headers) for _ in range(2))
        )
        assert [response.status for response in both] == [200, 200]
        assert len({response.json["id"] for response in both}) == 2


async def test_what_is_not_known_is_not_found(serving):
    async with serving() as client:
        response = await client.get("/admin/requests/cmpl-nothing")
        assert response.status == 404
        assert "cmpl-nothing" in response.error["message"]


@pytest.mark.parametrize("limit", ["0", "x", "-1", "99999999"])
async def test_a_wrong_limit_is_named(serving, limit):
    async with serving() as client:
        response = await client.get(f"/admin/requests?limit={limit}")
        assert response.status == 400
        assert response.error["param"] == "limit"
