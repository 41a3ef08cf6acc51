"""langchain-openai against the daemon: python langchain_client.py URL KEY."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Literal

import openai
from langchain_core.messages import AIMessageChunk
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL, KEY = sys.argv[1:]


def chat(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        model="sim", base_url=f"{URL}/v1", api_key=KEY, max_retries=0, stream_usage=True, **fields
    )


class Person(BaseModel):
    name: Literal["Ada", "Bo"]
    age: int = Field(ge=0, le=120)


@tool
def get_weather(city: Literal["Berlin", "Paris"]) -> str:
    """The weather of a city."""
    return "sunny"


#: A message that the simulated model answers with a call.
CALL = (
    "<|script|><tool_call>"
    '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    "</tool_call><|end|>"
)


def sum_of(chunks: Iterable[AIMessageChunk]) -> AIMessageChunk:
    first, *rest = chunks
    for chunk in rest:
        first += chunk
    return first


async def main() -> None:
    answer = chat().invoke("hi")
    assert answer.content == "Hello there!", answer
    assert answer.usage_metadata["output_tokens"] == 13
    chunks = list(chat().stream("hi"))
    assert "".join(chunk.content for chunk in chunks) == "Hello there!"
    counts = [c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata]
    assert counts == [13], counts
    assert (await chat().ainvoke("hi")).content == "Hello there!"
    batch = chat().batch(["a", "b", "c"])
    assert [one.content for one in batch] == ["Hello there!"] * 3
    person = chat().with_structured_output(Person, method="json_schema").invoke("who?")
    assert isinstance(person, Person), person
    for answer in (
        chat().bind_tools([get_weather], tool_choice="get_weather").invoke("and now?"),
        sum_of(chat().bind_tools([get_weather]).stream(CALL)),
    ):
        [call] = answer.tool_calls
        assert call["name"] == "get_weather", answer
        assert call["args"]["city"] in ("Berlin", "Paris"), answer
    try:
        chat(max_tokens=100_000).invoke("hi")
        raise AssertionError("a request beyond the context was answered")
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise


asyncio.run(main())
