"""langchain-openai against the daemon: python langchain_client.py URL KEY."""

from __future__ import annotations

import asyncio
import sys

import openai
from langchain_openai import ChatOpenAI

URL, KEY = sys.argv[1:]


def chat(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        model="sim", base_url=f"{URL}/v1", api_key=KEY, max_retries=0, stream_usage=True, **fields
    )


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
    try:
        chat(max_tokens=100_000).invoke("hi")
        raise AssertionError("a request beyond the context was answered")
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise


asyncio.run(main())
