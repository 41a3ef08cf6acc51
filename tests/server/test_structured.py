"""Answers that have to fit a schema or a grammar do; what cannot be held to is refused by place."""

from __future__ import annotations

import json

import jsonschema
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def as_schema(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}])
async def test_an_answer_fits_its_schema(serving, stream, sampling):
    async with serving() as client:
        response = await client.chat(
            "a person", response_format=as_schema(SCHEMA), stream=stream, **sampling
        )
        assert response.finish_reason() == "stop"
        jsonschema.validate(json.loads(response.text()), SCHEMA)


async def test_a_completion_may_have_a_schema_too(serving):
    async with serving() as client:
        whole, streamed = await client.both("a person", response_format=as_schema(SCHEMA))
        jsonschema.validate(json.loads(whole.text()), SCHEMA)
        assert streamed.text() == whole.text()


async def test_json_object_is_an_object(serving):
    """Of any content: it may take any length, and is cut only by the limit."""
    async with serving() as client:
        for seed in range(5):
            response = await client.chat(
                "x", response_format={"type": "json_object"}, temperature=1, seed=seed
            )
            assert response.text().startswith("{")
            if response.finish_reason() == "stop":
                assert isinstance(json.loads(response.text()), dict)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "type": "object"},
        {
            "type": "object",
            "properties": {
                "in": {"type": "array", "items": {"$ref": "#/$defs/one"}, "maxItems": 2}
            },
            "$defs": {"one": {"type": "object", "properties": {"properties": {"enum": [1]}}}},
        },
        {"anyOf": [{"type": "object", "properties": {"b": {"type": "null"}}}, {"type": "null"}]},
    ],
)
async def test_where_nothing_is_said_of_other_properties_there_are_none(serving, schema):
    async with serving() as client:
        for seed in range(6):
            response = await client.chat(
                "x", response_format=as_schema(schema), temperature=1, seed=seed
            )
            assert response.finish_reason() == "stop", response.text()
            answer = json.loads(response.text())
            jsonschema.validate(answer, schema)
            assert set(answer or ()) <= {"a", "b", "in"}


async def test_parts_of_one_object_do_not_exclude_each_other(serving):
    """Of allOf, and of what stands beside anyOf."""
    one = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    two = {"type": "object", "properties": {"b": {"enum": [2]}}, "required": ["b"]}
    async with serving() as client:
        for schema in ({"allOf": [one, two]}, {**one, "anyOf": [two]}):
            fields = {"response_format": as_schema(schema), "temperature": 0, "max_tokens": 16}
            response = await client.chat("x", **fields)
            assert response.text().startswith('{"a": 1, "b": 2')


async def test_only_the_limit_cuts_an_answer(serving):
    async with serving() as client:
        fields = {"response_format": as_schema(SCHEMA), "temperature": 0}
        whole = await client.chat("a person", **fields)
        tokens = whole.json["usage"]["completion_tokens"]
        for limit in range(1, tokens):
            cut = await client.chat("a person", max_tokens=limit, **fields)
            assert cut.finish_reason() == "length"
            assert whole.text().startswith(cut.text())


async def test_plain_text_is_what_no_format_is(serving):
    async with serving() as client:
        plain = await client.chat("x", max_tokens=8, temperature=0)
        asked = await client.chat(
            "x", max_tokens=8, temperature=0, response_format={"type": "text"}
        )
        assert asked.text() == plain.text()


async def test_a_grammar_holds_the_answer(serving):
    async with serving() as client:
        grammar = 'root ::= answer ", " answer\nanswer ::= "yes" | "no"'
        texts = set()
        for seed in range(8):
            response = await client.complete("x", grammar=grammar, temperature=1, seed=seed)
            assert response.finish_reason() == "stop"
            texts.add(response.text())
        assert texts <= {f"{a}, {b}" for a in ("yes", "no") for b in ("yes", "no")}
        assert len(texts) > 1


@pytest.mark.parametrize(
    ("schema", "place", "why"),
    [
        ({"type": "foo"}, "schema:", "foo"),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "x"}}}},
            "schema.properties.a.items:",
            "Invalid type",
        ),
        (
            {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=a)"}}},
            "schema.properties.a:",
            "look-around",
        ),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/no"}]}, "schema.anyOf.1:", "$defs/no"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "schema:", "minimum"),
        ({"enum": ["x" * 70_000]}, "schema:", "characters"),
    ],
)
async def test_a_schema_that_cannot_be_held_to_is_refused_with_its_place(
    serving, schema, place, why
):
    async with serving() as client:
        for response in (
            await client.chat(response_format=as_schema(schema)),
            await client.complete("x", response_format=as_schema(schema)),
        ):
            assert response.status == 400
            assert response.error["param"] == "response_format"
            assert place in response.error["message"]
            assert why in response.error["message"]
            assert len(response.error["message"]) < 600
        assert client.statistics().accepted == 0


@pytest.mark.parametrize(
    "grammar", ["nonsense", "root ::= root", 'root ::= "a" missing', "x" * 70_000]
)
async def test_a_grammar_that_does_not_compile_is_refused(serving, grammar):
    async with serving() as client:
        response = await client.complete("x", grammar=grammar)
        assert response.status == 400
        assert response.error["param"] == "grammar"
        assert client.statistics().accepted == 0


async def test_a_grammar_and_an_answer_without_end_contradict(serving):
    async with serving() as client:
        response = await client.chat(
            response_format={"type": "json_object"}, ignore_eos=True, max_tokens=9
        )
        assert response.status == 400
        assert response.error["param"] == "ignore_eos"


async def test_a_stop_string_ends_also_a_held_answer(serving):
    async with serving() as client:
        response = await client.chat("x", response_format=as_schema(SCHEMA), stop=['"age"'])
        assert response.finish_reason() == "stop"
        assert response.text().startswith('{"name": ')
        assert "age" not in response.text()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_held_answers_are_the_same_alone_and_under_pressure(serving, preemption):
    """Also when a session gives way and comes back in the midst of its answer."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 6, "maxItems": 6}
    fields = {"response_format": as_schema(schema), "temperature": 0.9, "seed": 5}
    prompts = ["one", "another, a longer one", "third"]
    alone = {}
    async with serving() as client:
        for prompt in prompts:
            alone[prompt] = (await client.complete(prompt, max_tokens=30, **fields)).text()
    small = {"kv": "shared", "context_tokens": 64, "pool_tokens": 64, "lanes": 3}
    scheduler = {"preemption": preemption}
    async with serving(model={"pool_cells": 64}, engine=small, scheduler=scheduler) as client:
        response = await client.complete(prompts, max_tokens=30, **fields)
        assert [response.text(k) for k in range(3)] == list(alone.values())
        assert client.statistics().preemptions > 0


async def test_an_engine_in_its_own_process_holds_answers_too(serving):
    async with serving(engine={"isolated": True}) as client:
        response = await client.chat("a person", response_format=as_schema(SCHEMA), temperature=0)
        jsonschema.validate(json.loads(response.text()), SCHEMA)


@pytest.mark.parametrize("isolated", [False, True])
async def test_an_engine_that_is_lost_in_the_midst_costs_an_answer_nothing(serving, isolated):
    """It is followed again from its tokens, on the engine that was opened anew."""
    fields = {"response_format": as_schema(SCHEMA), "temperature": 0.9, "seed": 5}
    async with serving() as client:
        alone = (await client.chat("a person", **fields)).text()
    hangs = {"fault": "call=iteration nth=12 effect=hang"}
    limits = {"watchdog_s": 0.3}
    async with serving(model=hangs, engine={"isolated": isolated}, scheduler=limits) as client:
        response = await client.chat("a person", **fields)
        assert response.text() == alone
        assert client.statistics().recoveries >= 1
