"""Requests that are refused: at once, by name, and before anything native (cases 4, 7 and 10)."""

from __future__ import annotations

import json
from typing import Any

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]

#: field -> values that are refused, for completions; ``param`` is the field
FIELDS: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, "5", True, 2**32],
    "temperature": [-0.1, 2.1, "1", float("nan"), float("inf")],
    "top_p": [0, -1, 1.1],
    "top_k": [-2, 1.5, 2**31],
    "min_p": [-0.1, 1.1],
    "n": [0, 129, 1.5, True],
    "seed": [2**64, -(2**63) - 1, 0.5, "1"],
    "stop": ["", ["a", ""], list("abcde"), 5, [1], {"a": 1}],
    "logit_bias": [
        {"999999999": 1},
        {"x": 1},
        {"-1": 1},
        {"1": 101},
        {"1": float("nan")},
        {"1": True},
        {str(token): 1 for token in range(257)},
        [1],
    ],
    "stop_token_ids": [[-1], ["a"], 5],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "timeout": [0, -1],
    "prompt": [[], [1, True], [1, "a"], [[]], {"a": 1}, 5, None, [-1], [512], "a\0b"],
    "model": [5],
    "stream": [1, "true"],
    "stream_options": [{}, {"include_usage": True}],
    "user": ["x" * 257, 5],
    "logprobs": [-1, 6, True, "1"],
    "best_of": [0, 129, 1.5],
    "response_format": ["json", {}, {"type": "xml"}, {"type": "json_schema"}],
    "grammar": ["", "root ::= x", 5],
    # known, not supported
    "suffix": ["x"],
    "guided_json": [{}],
    "priority": [101, -101, 1.5],
    "service_tier": ["gold"],
    "store": [True, 0],
    "structured_outputs": [{"json": {}}],
    "use_beam_search": [True],
    "length_penalty": [0.5],
    "skip_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "min_tokens": [3, False],
    "truncate_prompt_tokens": [5],
    "prompt_logprobs": [1],
    "allowed_token_ids": [[1]],
    "bad_words": [["x"]],
    "logits_processors": [["x"]],
    "return_tokens_as_token_ids": [True],
    "return_token_ids": [True],
    "cache_salt": ["x"],
    "add_special_tokens": [False, 1],
    "safety_identifier": ["x" * 257],
    # a chat's
    "messages": [MESSAGES],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required"],
    "functions": [[{}]],
}

CHAT_FIELDS: dict[str, list[Any]] = {
    "max_tokens": [0],
    "max_completion_tokens": [0, -1],
    "messages": [
        [],
        "hi",
        ["hi"],
        [{"role": "user"}],
        [{"role": "tool", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "a"}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
    ],
    "logprobs": [1, "yes"],
    "top_logprobs": [3, 21, -1],
    "tools": [[{"type": "function"}], [{"type": "function", "function": {"name": "f"}}], {}],
    "tool_choice": ["required", "any", {"type": "function", "function": {"name": "f"}}, {}],
    "functions": [[{}]],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "x"}}],
    "modalities": [["audio"]],
    "reasoning_effort": ["low"],
    "verbosity": ["low"],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"x": [1]}, {"__class__": 1}, {str(n): 1 for n in range(17)}],
    "documents": [[{}]],
    "echo": [True],
    "best_of": [2],
    "suffix": ["x"],
    "prompt": ["x"],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "add_special_tokens": [True],
}

CASES = [(TEXT, {"prompt": "x"}, f, v) for f, values in FIELDS.items() for v in values] + [
    (CHAT, {"messages": MESSAGES}, f, v) for f, values in CHAT_FIELDS.items() for v in values
]


async def test_every_wrong_field_is_named_and_nothing_native_is_called(serving):
    async with serving() as client:
        for path, base, name, value in CASES:
            response = await client.post(path, {**base, name: value})
            case = f"{name} = {value!r}"
            assert response.status == 400, case
            assert response.error["param"] == name, case
            assert response.error["type"] == "invalid_request_error", case
            assert isinstance(response.error["message"], str), case
        assert client.statistics().accepted == 0
        assert client.statistics().native_calls == 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "x"',
        "{'prompt': '测'}".encode("gbk"),
        b"[]",
        b"null",
        b'"x"',
        b"",
        b"NaN",
        b"Infinity",
        b"1e400",
        b'{"prompt":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"prompt": "x", "temperature": 1e400}',
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(serving, body):
    async with serving() as client:
        response = await client.post(TEXT, body)
        assert response.status == 400
        assert response.error["type"] == "invalid_request_error"
        assert client.statistics().accepted == 0


async def test_of_duplicate_keys_the_last_wins(serving):
    async with serving() as client:
        response = await client.post(TEXT, b'{"prompt": "x", "max_tokens": 9, "max_tokens": 2}')
        assert response.json["usage"]["completion_tokens"] == 2


async def test_an_integer_may_be_written_as_a_float(serving):
    async with serving() as client:
        response = await client.complete("x", max_tokens=2.0, n=1.0, seed=4.0)
        assert response.json["usage"]["completion_tokens"] == 2


async def test_both_names_of_the_limit_with_different_values_are_refused(serving):
    async with serving() as client:
        response = await client.chat(max_completion_tokens=3, max_tokens=5)
        assert response.status == 400
        assert response.error["param"] == "max_completion_tokens"


async def test_a_top_k_above_the_vocabulary_means_all_of_it(serving):
    async with serving() as client:
        assert (await client.complete("x", top_k=10**6, max_tokens=1)).status == 200


async def test_another_model_is_not_found(serving):
    async with serving() as client:
        for response in (
            await client.complete("x", model="gpt-9"),
            await client.chat(model="gpt-9"),
            await client.get("/v1/models/gpt-9"),
        ):
            assert response.status == 404
            assert response.error["code"] == "model_not_found"
            assert response.error["param"] == "model"


async def test_an_unknown_field_is_ignored_with_a_warning(serving):
    async with serving() as client:
        response = await client.complete("x", max_tokens=1, vendor_extra={"a": 1}, **{"né\n": 1})
        assert response.status == 200
        warning = response.headers["warning"]
        assert "vendor_extra" in warning
        assert "n??" in warning


async def test_a_body_over_the_limit_is_refused_without_being_kept(serving):
    async with serving(server={"body_limit_bytes": 1024}) as client:
        headers = {"content-type": "application/json"}
        announced = await client.request(
            "POST", TEXT, b"x" * 1025, {**headers, "content-length": "1025"}
        )
        counted = await client.request("POST", TEXT, [b"x" * 600, b"x" * 425], headers)
        for response in (announced, counted):
            assert response.status == 413
            assert response.error["code"] == "payload_too_large"
            assert "1024" in response.error["message"]
            assert response.headers["connection"] == "close"


async def test_a_body_of_exactly_the_limit_is_taken(serving):
    async with serving(server={"body_limit_bytes": 1024}) as client:
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(1024)
        assert (await client.post(TEXT, body)).status == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_another_content_type_is_refused(serving, kind):
    async with serving() as client:
        response = await client.request("POST", TEXT, b"{}", {"content-type": kind})
        assert response.status == 415
        assert kind in response.error["message"]


async def test_a_compressed_body_is_refused(serving):
    async with serving() as client:
        response = await client.post(TEXT, b"\x1f\x8b", **{"content-encoding": "gzip"})
        assert response.status == 415


# --- the context (case 4) -------------------------------------------------------------------------


@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_a_prompt_beyond_the_context_names_both_numbers(serving, path):
    async with serving(engine={"context_tokens": 64}) as client:
        if path == TEXT:
            response = await client.complete(list(range(32, 122)))
        else:
            response = await client.chat("x" * 90)
        assert response.status == 400
        error = response.error
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert error["n_ctx"] == 64
        assert error["n_prompt_tokens"] >= 90
        assert str(error["n_prompt_tokens"]) in error["message"]
        assert "64" in error["message"]


async def test_a_prompt_and_limit_that_never_fit_together_are_refused(serving):
    async with serving(engine={"context_tokens": 64}) as client:
        response = await client.complete([65] * 40, max_tokens=25)
        assert response.status == 400
        assert "65" in response.error["message"]
        assert "64" in response.error["message"]


async def test_a_prompt_of_the_whole_context_is_refused_and_one_less_gives_one_token(serving):
    async with serving(engine={"context_tokens": 64}) as client:
        assert (await client.complete([65] * 64)).status == 400
        response = await client.complete([65] * 63)
        assert response.finish_reason() == "length"
        assert response.json["usage"]["completion_tokens"] == 1


async def test_a_full_queue_is_429_with_a_time_to_come_back(serving):
    limits = {"engine": {"lanes": 1}, "scheduler": {"waiting_requests_max": 1}}
    async with serving(**limits) as client:
        response = await client.complete("x", n=4, max_tokens=50)
        assert response.status == 429
        assert response.error["type"] == "rate_limit_error"
        assert 1 <= int(response.headers["retry-after"]) <= 120
        assert response.headers["x-should-retry"] == "true"
        metrics = await client.metrics()
        assert metrics['skippy:requests_refused_total{reason="rate_limit_exceeded"}'] == 1


async def test_fields_that_ask_for_what_happens_anyway_are_taken(serving):
    """Clients of other servers send their defaults."""
    fields = {
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "include_stop_str_in_output": False,
        "min_tokens": 0,
        "length_penalty": 1.0,
        "bad_words": [],
        "use_beam_search": False,
        "return_token_ids": False,
        "prompt_cache_key": "k",
        "store": False,
        "stream_options": None,
    }
    chat = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "echo": False,
        "best_of": 1,
        "suffix": "",
        "verbosity": "medium",
        "reasoning_effort": "none",
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "modalities": ["text"],
    }
    async with serving() as client:
        for response in (
            await client.complete("x", max_tokens=1, suffix="", best_of=1, **fields),
            await client.chat(max_tokens=1, **fields, **chat),
        ):
            assert response.status == 200, response.json
            assert "warning" not in response.headers


async def test_embeddings_are_refused_with_the_reason(serving):
    async with serving() as client:
        response = await client.post("/v1/embeddings", {"model": "sim", "input": "x"})
        assert response.status == 400
        assert "embedding" in response.error["message"]


async def test_a_deadline_that_passes_in_the_queue_is_504(serving):
    """Also without a stream: never a 200 with an error in it."""
    slow = {"clock": "real", "cost_fixed_us": 5000}
    first = {"prompt": "x", "max_tokens": 100, "stream": True}
    async with (
        serving(model=slow, engine={"lanes": 1}) as client,
        client.calling(TEXT, first) as call,
    ):
        await call.next_write()
        response = await client.complete("y", timeout=0.01)
        assert response.status == 504
        assert response.error["type"] == "timeout_error"
        assert response.error["code"] == "deadline_exceeded"
        call.closed.set()
