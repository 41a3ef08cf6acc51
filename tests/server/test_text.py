"""Text as clients see it: whole characters, exact stops (cases 5 and 6)."""

from __future__ import annotations

from typing import Any

import pytest

SPLIT = {"token": ["f09f", "98", "8a", "ff"]}  # ids 260 to 263


async def both_texts(client: Any, prompt: list[int], **fields: Any) -> str:
    """The text, which must be the same whole and streamed, and no delta may be empty."""
    whole, streamed = await client.both(prompt, **fields)
    assert streamed.text() == whole.text()
    assert streamed.finish_reason() == whole.finish_reason()
    assert "" not in streamed.deltas()
    return str(whole.text())


async def test_a_character_over_three_tokens_arrives_whole(serving, script):
    async with serving(model=SPLIT) as client:
        prompt = script(260, 261, 262, "!")
        assert await both_texts(client, prompt) == "😊!"
        streamed = await client.complete(prompt, stream=True)
        assert streamed.deltas() == ["😊", "!"]


async def test_half_a_character_at_the_limit_is_dropped_and_counted(serving, script):
    async with serving(model=SPLIT) as client:
        prompt = script(260, 261, 262, "!")
        assert await both_texts(client, prompt, max_tokens=2) == ""
        answer = (await client.complete(prompt, max_tokens=2)).json
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 2


async def test_an_invalid_byte_is_one_replacement_character(serving, script):
    async with serving(model=SPLIT) as client:
        assert await both_texts(client, script(263, "a")) == "\ufffda"


FOX = ["54686520717569636b206272", "6f776e", "20666f78206a756d7073"]  # The quick br|own| fox jumps


@pytest.mark.parametrize(
    ("tokens", "pieces", "stop", "text"),
    [
        (FOX, (260, 261, 262), ["own fox"], "The quick br"),
        ([], ("aaab",), ["aab"], "a"),
        ([], ("xyz",), ["yz", "z"], "x"),
        ([], ("xyz",), ["z", "yz"], "x"),
        ([], ("stop",), ["s"], ""),
        (["61626364"], (260,), ["bc"], "a"),
        (["c3"], (260, 0xA9, "!"), ["\u00e8"], "é!"),
    ],
)
async def test_nothing_at_or_after_a_stop_is_shown(serving, script, tokens, pieces, stop, text):
    async with serving(model={"token": tokens} if tokens else {}) as client:
        assert await both_texts(client, script(*pieces), stop=stop) == text


async def test_what_could_become_a_stop_waits_and_is_then_released(serving, script):
    async with serving(model={"token": ["613c"]}) as client:  # "a<"
        response = await client.complete(script(260, "bc"), stop=["<|end|>"], stream=True)
        assert response.deltas() == ["a", "<b", "c"]
        assert response.finish_reason() == "stop"


async def test_the_stop_that_matched_is_named_besides(serving, script):
    async with serving() as client:
        for stop in ("c", ["x", "c"]):
            choice = (await client.complete(script("abcd"), stop=stop)).json["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("ab", "stop")
            assert choice["stop_reason"] == "c"
