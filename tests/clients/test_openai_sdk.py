"""The openai Python SDK, unmodified, sees what it sees of its own server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Literal

import openai
import pytest
from pydantic import BaseModel, Field

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="sk-test", max_retries=0) as made:
        yield made


def test_models_are_listed_and_found_by_name(client):
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").owned_by == "skippy-sched"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_chat_has_its_text_finish_and_usage(client):
    answer = client.chat.completions.create(model="sim", messages=USER)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there!", "stop")
    assert choice.message.role == "assistant"
    assert answer.usage.completion_tokens == len("Hello there!") + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer._request_id


def test_a_streamed_chat_comes_in_pieces_with_the_usage_last(client):
    chunks = list(
        client.chat.completions.create(
            model="sim", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    *deltas, usage = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == "Hello there!"
    assert deltas[0].choices[0].delta.role == "assistant"
    assert deltas[-1].choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 13
    assert all(chunk.usage is None for chunk in deltas)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper_gathers_the_answer(client):
    with client.chat.completions.stream(model="sim", messages=USER) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "Hello there!"


def test_choices_stops_and_seeds_of_completions(client):
    answer = client.completions.create(
        model="sim", prompt=["a", "b"], n=2, seed=5, temperature=0.8, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    again = client.completions.create(
        model="sim", prompt=["a", "b"], n=2, seed=5, temperature=0.8, max_tokens=4
    )
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]
    cut = client.chat.completions.create(model="sim", messages=USER, stop=[" there"])
    assert cut.choices[0].message.content == "Hello"


def test_a_streamed_completion_equals_a_whole_one(client):
    fields = {"model": "sim", "prompt": "once", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**fields)
    streamed = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


async def test_the_async_client_chats_and_streams(async_client):
    answer = await async_client.chat.completions.create(model="sim", messages=USER)
    assert answer.choices[0].message.content == "Hello there!"
    stream = await async_client.chat.completions.create(model="sim", messages=USER, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello there!"
    assert [model.id async for model in async_client.models.list()] == ["sim"]


async def test_a_stream_left_early_leaves_the_server_usable(async_client):
    stream = await async_client.completions.create(
        model="sim", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    answer = await async_client.chat.completions.create(model="sim", messages=USER)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"temperature": 3}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", "invalid_value"),
        ({"max_tokens": 5000}, openai.BadRequestError, None, "context_length_exceeded"),
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"stop": list("abcde")}, openai.BadRequestError, "stop", "invalid_value"),
    ],
)
def test_refusals_arrive_as_the_typed_errors(client, fields, kind, param, code):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "sim", "messages": USER, **fields})
    error = caught.value
    assert (error.code, error.type) == (code, "invalid_request_error")
    assert param in (None, error.param)
    assert error.request_id


def test_a_wrong_key_is_an_authentication_error(client):
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="sk-wrong").models.list()
    assert caught.value.code == "invalid_api_key"


def test_a_failure_in_mid_stream_is_an_api_error_and_not_an_end(client, failing_url):
    failing = client.with_options(base_url=f"{failing_url}/v1")
    fields = {"model": "sim", "prompt": "A", "max_tokens": 50}
    pieces = failing.completions.create(**fields, stream=True)
    assert next(pieces).choices[0].finish_reason is None
    with pytest.raises(openai.APIError) as caught:
        list(pieces)
    assert caught.value.code == "engine_error"
    with pytest.raises(openai.InternalServerError):
        failing.completions.create(**fields)


# --- structured answers and tools -----------------------------------------------------------------


class Person(BaseModel):
    name: Literal["Ada", "Bo"]
    age: Annotated[int, Field(ge=0, le=120)]
    languages: list[Literal["de", "en"]]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Berlin", "Paris"]
    days: Annotated[int, Field(ge=1, le=9)]


WEATHER = openai.pydantic_function_tool(GetWeather, name="get_weather")
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
)


def saying(text):
    """A message that the simulated model answers with this text, if it may."""
    return [{"role": "user", "content": f"<|script|>{text}<|end|>"}]


def test_a_parsed_answer_is_of_the_model_that_was_asked_for(client):
    text = '{"name": "Ada", "age": 36, "languages": ["en", "de"]}'
    for messages in (saying(text), saying("no JSON at all")):
        answer = client.chat.completions.parse(
            model="sim", messages=messages, response_format=Person
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        if messages == saying(text):
            expected = Person(name="Ada", age=36, languages=["en", "de"])
            assert answer.choices[0].message.parsed == expected


def test_a_streamed_answer_is_parsed_too(client):
    with client.chat.completions.stream(
        model="sim", messages=saying("anything"), response_format=Person
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
        assert isinstance(message.parsed, Person)


async def test_the_async_client_parses(async_client):
    answer = await async_client.chat.completions.parse(
        model="sim", messages=saying("x"), response_format=Person
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_a_tool_is_called_and_its_result_taken(client):
    messages = saying(CALL)
    answer = client.chat.completions.create(model="sim", messages=messages, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert GetWeather.model_validate_json(call.function.arguments).days == 3
    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        *saying("It is sunny."),
    ]
    answer = client.chat.completions.create(
        model="sim", messages=messages, tools=[WEATHER], temperature=0
    )
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].finish_reason == "stop"


def test_a_wanted_tool_is_parsed_from_a_stream(client):
    with client.chat.completions.stream(
        model="sim",
        messages=saying("I would rather talk"),
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    ) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_log_probabilities_arrive_typed(client):
    answer = client.chat.completions.create(
        model="sim", messages=USER, logprobs=True, top_logprobs=2, temperature=0
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content[:-1]) == "Hello there!"
    assert content[0].bytes == [72]
    assert content[0].top_logprobs[0].token == "H"
    stream = client.chat.completions.create(
        model="sim", messages=USER, logprobs=True, top_logprobs=2, temperature=0, stream=True
    )
    streamed = [
        e for chunk in stream for c in chunk.choices if c.logprobs for e in c.logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    legacy = client.completions.create(
        model="sim", prompt="abc", max_tokens=2, logprobs=1, echo=True
    )
    assert legacy.choices[0].logprobs.tokens[:3] == ["a", "b", "c"]
    assert legacy.choices[0].logprobs.token_logprobs[0] is None


def test_embeddings_are_a_clear_refusal(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="sim", input="x")
    assert "embeddings" in caught.value.message
