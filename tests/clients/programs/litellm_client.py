"""litellm against the daemon: python litellm_client.py URL KEY."""

from __future__ import annotations

import asyncio
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
import litellm

URL, KEY = sys.argv[1:]
CALL = {"model": "openai/sim", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
USER = [{"role": "user", "content": "hi"}]


async def main() -> None:
    answer = litellm.completion(messages=USER, **CALL)
    assert answer.choices[0].message.content == "Hello there!", answer
    assert answer.usage.completion_tokens == 13, answer.usage
    chunks = list(
        litellm.completion(
            messages=USER, stream=True, stream_options={"include_usage": True}, **CALL
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello there!", text
    assert [c.usage.completion_tokens for c in chunks if getattr(c, "usage", None)] == [13]
    answer = await litellm.acompletion(messages=USER, **CALL)
    assert answer.choices[0].finish_reason == "stop"
    try:
        litellm.completion(messages=USER, max_tokens=100_000, **CALL)
        raise AssertionError("a request beyond the context was answered")
    except litellm.ContextWindowExceededError:
        pass
    try:
        litellm.completion(messages=USER, **{**CALL, "api_key": "wrong"})
        raise AssertionError("a wrong key was accepted")
    except litellm.AuthenticationError:
        pass


asyncio.run(main())
