"""Calls of tools: told to the model by its template, held to their schemas, read from its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from skippy_sched.config import Config
from skippy_sched.scheduler.engine import Engine
from skippy_sched.server.app import App
from skippy_sched.server.metrics import Metrics
from skippy_sched.server.served_model import serve_model
from skippy_sched.server.wire import ChatRequest

from .conftest import Client

#: Shows the whole conversation, tools included, then answers with the script of the last message.
TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}({{ call.function.arguments | tojson }})</tool_call>"
    "{% endfor %}\n{% endfor %}<|end|>"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Berlin", "Paris"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Berlin", "days": 2}}\n</tool_call>'
)
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LONG = {"context_tokens": 2048}
MODEL = {"chat_template": TEMPLATE.replace("\n", "\\n")}


def answering(text: str) -> str:
    """A message that makes the simulated model answer so."""
    return f"<|script|>{text}<|end|>"


def message(response: Any) -> dict[str, Any]:
    """The answer's message; of a stream put together as clients do it."""
    if response.headers["content-type"] == "application/json":
        return dict(response.json["choices"][0]["message"])
    content, calls = "", {}
    for event in response.events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"arguments": ""})
            known |= {"id": call["id"], "name": call["function"]["name"]}
            known["arguments"] += call["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    built = [
        {
            "id": c["id"],
            "type": "function",
            "function": {"name": c["name"], "arguments": c["arguments"]},
        }
        for c in calls.values()
    ]
    return {"role": "assistant", "content": content or None, "refusal": None} | (
        {"tool_calls": built} if built else {}
    )


def called(response: Any) -> list[tuple[str, Any]]:
    calls = message(response).get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_told_apart_from_the_text_before_it(serving, stream):
    async with serving(model=MODEL, engine=LONG) as client:
        fields = {"tools": [WEATHER, NOW], "temperature": 0, "stream": stream}
        response = await client.chat(answering(f"Let me look.{CALL}\n{CALL_NOW}"), **fields)
        assert called(response) == [("get_weather", {"city": "Berlin", "days": 2}), ("now", {})]
        assert message(response)["content"] == "Let me look."
        assert response.finish_reason() == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_a_call_is_text(serving, stream):
    async with serving(model=MODEL, engine=LONG) as client:
        text = "2 < 3, and <tool is no <tool_cal"
        response = await client.chat(
            answering(text), tools=[NOW], stream=stream, temperature=0, max_tokens=len(text)
        )
        assert message(response)["content"] == text
        assert called(response) == []
        assert response.finish_reason() == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_wanted_comes_whatever_the_model_likes(serving, choice, stream):
    async with serving(model=MODEL, engine=LONG) as client:
        for seed in range(4):
            response = await client.chat(
                "hello",
                tools=[WEATHER, NOW],
                tool_choice=choice,
                parallel_tool_calls=False,
                temperature=1,
                seed=seed,
                stream=stream,
            )
            [(name, arguments)] = called(response)
            assert response.finish_reason() == "tool_calls"
            assert message(response)["content"] is None
            if choice == "required":
                schema = {"get_weather": WEATHER["function"]["parameters"]}.get(name, {})
                jsonschema.validate(arguments, schema)
            else:
                assert name == "now"


async def test_what_begins_as_a_call_becomes_one(serving):
    """In auto, too: the model may open a call, but not write another tool's name into it."""
    async with serving(model=MODEL, engine=LONG) as client:
        wrong = '<tool_call>\n{"name": "delete_all", "arguments": {}}\n</tool_call>'
        response = await client.chat(
            answering(wrong), tools=[WEATHER], parallel_tool_calls=False, temperature=0
        )
        [(name, arguments)] = called(response)
        assert name == "get_weather"
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])


async def test_without_parallel_calls_there_is_one(serving):
    async with serving(model=MODEL, engine=LONG) as client:
        fields = {"tools": [WEATHER, NOW], "temperature": 0}
        both = answering(f"{CALL}\n{CALL_NOW}")
        assert len(called(await client.chat(both, **fields))) == 2
        assert len(called(await client.chat(both, parallel_tool_calls=False, **fields))) == 1


async def test_a_call_cut_by_the_limit_is_text_that_ended_by_length(serving):
    async with serving(model=MODEL, engine=LONG) as client:
        whole, streamed = [
            await client.chat(
                answering(CALL), tools=[WEATHER], max_tokens=30, temperature=0, stream=stream
            )
            for stream in (False, True)
        ]
        assert message(whole) == message(streamed)
        assert message(whole)["content"] == CALL[:30]
        assert whole.finish_reason() == streamed.finish_reason() == "length"


async def test_a_call_or_json_where_both_are_asked_for(serving):
    async with serving(model=MODEL, engine=LONG) as client:
        form = {"type": "json_object"}
        fields = {"tools": [WEATHER], "response_format": form, "temperature": 0}
        assert called(await client.chat(answering(CALL), **fields))
        plain = await client.chat(answering('{"a": 1}'), **fields)
        assert json.loads(message(plain)["content"]) == {"a": 1}


async def test_the_template_is_given_tools_calls_and_results(serving):
    """Arguments as an object, as templates expect; results by role."""
    async with serving(model=MODEL, engine=LONG) as client:
        call = {"name": "now", "arguments": '{"zone": "UTC"}'}
        messages = [
            {"role": "user", "content": "what time is it?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        ]
        template = client.app.served.template
        request = ChatRequest.model_validate_json(
            json.dumps({"messages": messages, "tools": [NOW]})
        )
        text = template.render(request.messages, request.tools_offered)
        assert '<tools>{"type": "function", "function": {"name": "now"}}</tools>' in text
        assert 'assistant:<tool_call>now({"zone": "UTC"})</tool_call>' in text
        assert "tool:noon" in text
        response = await client.post(
            "/v1/chat/completions",
            {"messages": messages, "tools": [NOW], "max_tokens": 3},
        )
        assert response.status == 200


async def test_tools_that_may_not_be_called_are_not_told(serving):
    async with serving(model=MODEL, engine=LONG) as client:
        fields = {"temperature": 0, "max_tokens": 5}
        without = await client.chat("hello", **fields)
        none = await client.chat("hello", tools=[NOW], tool_choice="none", **fields)
        assert none.text() == without.text()
        assert none.json["usage"] == without.json["usage"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0].content }}", "has none"),
        ("{{ tools }}{{ messages[0].content }}[CALL]", "another notation"),
    ],
)
async def test_a_template_without_readable_tools_is_a_clear_refusal(serving, template, why):
    async with serving(model={"chat_template": template}) as client:
        response = await client.chat(tools=[NOW])
        assert response.status == 400
        assert response.error["param"] == "tools"
        assert why in response.error["message"]
        assert "model.chat_template" in response.error["message"]
        assert client.statistics().accepted == 0


@pytest.mark.parametrize(
    ("strict", "place"),
    [(True, "tools.1.function.parameters.properties.list:"), (False, None)],
)
async def test_only_a_strict_tool_is_refused_for_what_cannot_be_held_to(serving, strict, place):
    schema = {"type": "object", "properties": {"list": {"type": "array", "uniqueItems": True}}}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": schema, "strict": strict},
    }
    async with serving(model=MODEL, engine=LONG) as client:
        response = await client.chat(tools=[NOW, tool], max_tokens=4)
        assert response.status == (400 if strict else 200)
        if place:
            assert response.error["param"] == "tools"
            assert place in response.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [NOW, NOW]}, "tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "x"}}}, None),
        ({"tools": [NOW], "grammar": 'root ::= "a"'}, "grammar"),
        ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
        ({"tools": [NOW] * 129}, "tools"),
    ],
)
async def test_tools_that_make_no_sense_are_refused(serving, fields, param):
    async with serving(model=MODEL, engine=LONG) as client:
        response = await client.chat(**fields)
        assert response.status == 400
        assert response.error["param"] == (param or "tool_choice")


async def test_a_template_file_takes_the_place_of_the_models_own(serving, tmp_path):
    path = tmp_path / "template.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}<|script|>from a file<|end|>"
    )
    async with serving(template=path) as client:
        assert (await client.chat("hi", temperature=0)).text() == "from a file"


@pytest.mark.llama
async def test_a_small_real_model_calls_a_tool_with_the_template_that_is_shipped(default_model):
    path = Path(__file__).parents[2] / "config" / "templates" / "chatml-tools.jinja"
    config = Config.model_validate(
        {
            "model": {"path": str(default_model), "name": "m", "chat_template": str(path)},
            "engine": {"lanes": 2, "context_tokens": 1024, "threads": 2},
        }
    )
    app = App(config, Metrics("m"))
    async with Engine.open(config, seed=7) as engine:
        app.served = serve_model(config, engine)
        response = await Client(app, engine).chat(
            "What is the weather in Paris for the next two days?",
            tools=[WEATHER, NOW],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        )
        [(name, arguments)] = called(response)
        schemas = {"get_weather": WEATHER["function"]["parameters"], "now": {"type": "object"}}
        jsonschema.validate(arguments, schemas[name])
        await engine.drain(5)
