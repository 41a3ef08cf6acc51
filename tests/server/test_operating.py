"""What operators and their tools see: health, readiness, models, keys, routes."""

from __future__ import annotations

import pytest

from skippy_sched.config import Config
from skippy_sched.default_model import MODEL_FILE
from skippy_sched.server.served_model import model_name


async def test_health_and_readiness_of_a_served_model(serving):
    async with serving() as client:
        assert (await client.get("/health")).json == {"status": "ok"}
        assert (await client.get("/ready")).json == {"status": "ready"}


async def test_before_the_model_is_there_the_process_lives_but_is_not_ready(serving):
    async with serving() as client:
        client.app.served = None
        assert (await client.get("/health")).status == 200
        ready = await client.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "loading")
        for response in (await client.complete("x"), await client.get("/v1/models")):
            assert response.status == 503
            assert response.error["code"] == "loading"
            assert response.headers["retry-after"]


async def test_while_draining_new_requests_are_sent_elsewhere(serving):
    async with serving() as client:
        await client.engine.drain(1)
        ready = await client.get("/ready")
        assert (ready.status, ready.json["reason"]) == (503, "draining")
        response = await client.complete("x")
        assert response.status == 503
        assert response.error["code"] == "draining"
        assert response.headers["connection"] == "close"
        assert response.headers["retry-after"]


async def test_what_runs_at_the_drain_limit_ends_with_an_error_event(serving):
    async with serving(model={"clock": "real", "cost_fixed_us": 2000}) as client:
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        async with client.calling("/v1/completions", body) as call:
            await call.next_write()
            assert await client.engine.drain(0) == 1
        assert call.response.events[-1]["error"]["code"] == "draining"


async def test_a_dead_engine_answers_every_client_and_is_not_ready(serving):
    model = {"fault": "call=iteration nth=3 effect=hang_ms:3000", "clock": "real"}
    async with serving(model=model, scheduler={"watchdog_s": 0.1}) as client:
        for response in (await client.complete("x"), await client.complete("x")):
            assert response.status == 503
            assert response.error["code"] == "engine_dead"
        assert (await client.get("/ready")).json["reason"].startswith("engine dead")
        assert (await client.get("/health")).status == 200


async def test_the_model_is_listed_under_its_name(serving):
    async with serving() as client:
        listed = (await client.get("/v1/models")).json
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["sim"]
        assert (await client.get("/v1/models/sim")).json == listed["data"][0]


def test_without_a_path_the_model_has_the_default_files_name_in_metrics_too():
    config = Config()
    assert model_name(config) == "SmolLM2-135M-Instruct.Q4_1"
    fetched = config.model.model_copy(update={"path": f"/somewhere/{MODEL_FILE}"})
    assert model_name(config.model_copy(update={"model": fetched})) == model_name(config)


async def test_keys_are_asked_for_where_something_is_to_be_had(serving):
    async with serving(server={"api_keys": ["first", "second"]}) as client:
        for headers in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic first"}):
            for path in ("/v1/completions", "/v1/chat/completions"):
                response = await client.post(path, {}, **headers)
                assert response.status == 401
                assert response.error["code"] == "invalid_api_key"
            assert (await client.get("/v1/models", **headers)).status == 401
        for key in ("first", "second"):
            listed = await client.get("/v1/models", authorization=f"Bearer {key}")
            assert listed.status == 200
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/page/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("DELETE", "/health", 405),
        ("POST", "/v1/completions/", 404),
    ],
)
async def test_wrong_routes_and_methods_get_the_error_object(serving, method, path, status):
    async with serving() as client:
        response = await client.request(method, path)
        assert response.status == status
        assert set(response.error) == {"message", "type", "param", "code"}
        assert ("allow" in response.headers) == (status == 405)


async def test_every_response_carries_a_request_id_and_keeps_a_clients_own(serving):
    async with serving() as client:
        for path in ("/health", "/nothing", "/metrics"):
            assert (await client.get(path)).headers["x-request-id"]
            asked = await client.get(path, **{"x-request-id": "my-id.1"})
            assert asked.headers["x-request-id"] == "my-id.1"
            forged = await client.get(path, **{"x-request-id": "a\r\nb"})
            assert forged.headers["x-request-id"] != "a\r\nb"


async def test_a_bug_of_ours_is_an_answer_and_not_a_cut_connection(serving, monkeypatch):
    async with serving() as client:
        monkeypatch.setattr(client.app, "served", object())
        response = await client.get("/v1/models")
        assert response.status == 500
        assert "internal error" in response.error["message"]
        assert "object" not in response.error["message"]
