"""Log-probabilities on the wire: both shapes, streamed and whole, of answers and of prompts."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from typing import Any

import pytest

from skippy_sched.native import Library, find_library
from skippy_sched.scheduler.request import RequestParams

#: "😊" in three tokens and one that is no text: 260 to 262, then the script's end.
SPLIT = {"token": ["f09f", "98", "8a"]}


def merged(response: Any, index: int = 0) -> dict[str, list[Any]]:
    """The lists of a choice's log-probabilities, of a stream put together."""
    objects = (
        response.events if "event-stream" in response.headers["content-type"] else [response.json]
    )
    whole: dict[str, list[Any]] = {}
    for choice in (choice for item in objects for choice in item["choices"]):
        if choice["index"] == index and choice["logprobs"] is not None:
            for key, value in choice["logprobs"].items():
                if isinstance(value, list):
                    whole.setdefault(key, []).extend(value)
    return whole


@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_tells_each_token_with_the_likeliest_beside_it(serving, script, stream):
    async with serving() as client:
        response = await client.complete(script("abc"), logprobs=2, stream=stream)
        told = merged(response)
        assert told["tokens"] == ["a", "b", "c", "<|eos|>"]
        assert told["text_offset"] == [0, 1, 2, 3]
        assert told["token_logprobs"] == pytest.approx([-math.log(2)] * 4)
        for name, top in zip(told["tokens"], told["top_logprobs"], strict=True):
            assert len(top) == 2
            assert max(top, key=lambda one: top[one]) == name
        assert response.text() == "abc"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_tells_names_bytes_and_the_likeliest(serving, script, stream):
    async with serving(model={"chat_template": "{{ messages[0].content }}"}) as client:
        fields = {"logprobs": True, "top_logprobs": 3, "temperature": 0, "stream": stream}
        response = await client.chat("<|script|>hé<|end|>", **fields)
        content = merged(response)["content"]
        assert [entry["bytes"] for entry in content] == [[104], [0xC3], [0xA9], None]
        assert [entry["token"] for entry in content] == [
            "h",
            "bytes:\\xc3",
            "bytes:\\xa9",
            "<|eos|>",
        ]
        assert [len(entry["top_logprobs"]) for entry in content] == [3] * 4
        assert content[0]["top_logprobs"][0] == {
            "token": "h",
            "bytes": [104],
            "logprob": content[0]["logprob"],
        }
        assert response.text() == "hé"


async def test_zero_means_the_chosen_token_only(serving, script):
    async with serving(model={"chat_template": "{{ messages[0].content }}"}) as client:
        told = merged(await client.complete(script("ab"), logprobs=0))
        assert [list(top) for top in told["top_logprobs"]] == [["a"], ["b"], ["<|eos|>"]]
        plain = await client.chat("<|script|>a<|end|>", logprobs=True)
        assert [e["top_logprobs"] for e in merged(plain)["content"]] == [[], []]


async def test_without_the_wish_nothing_is_told(serving, script):
    async with serving() as client:
        for response in await client.both(script("ab")):
            assert merged(response) == {}
        assert merged(await client.chat(logprobs=False, max_tokens=2)) == {}


async def test_a_sampled_token_is_told_with_its_own_probability(serving):
    async with serving() as client:
        told = merged(await client.complete("x", logprobs=1, temperature=1, max_tokens=20, seed=3))
        likely = -math.log(2)
        assert any(value < likely - 0.1 for value in told["token_logprobs"])
        for name, own, top in zip(
            told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True
        ):
            assert top[name] == own
            assert len(top) == (1 if own == pytest.approx(likely) else 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_within_a_character_stand_where_it_begins(serving, script, stream):
    async with serving(model=SPLIT) as client:
        response = await client.complete(script("a", 260, 261, 262, "b"), logprobs=0, stream=stream)
        told = merged(response)
        assert response.text() == "a😊b"
        assert told["text_offset"] == [0, 1, 1, 1, 2, 3]
        names = ["a", "bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x8a", "b", "<|eos|>"]
        assert told["tokens"] == names


async def test_every_generated_token_is_told_although_a_stop_cuts_the_text(serving, script):
    """The list stays whole: its length is the usage's count."""
    async with serving() as client:
        whole, streamed = await client.both(script("abcdef"), logprobs=0, stop="cd")
        assert whole.text() == "ab"
        assert merged(whole)["tokens"] == ["a", "b", "c", "d"]
        assert whole.json["usage"]["completion_tokens"] == 4
        assert merged(streamed) == merged(whole)


# --- the prompt's ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_tells_the_prompt_tokens_first(serving, stream):
    """The first has nothing before it; offsets run through prompt and answer."""
    async with serving() as client:
        plain = merged(await client.complete("hello", max_tokens=4, logprobs=1))
        response = await client.complete(
            "hello", max_tokens=4, logprobs=1, echo=True, stream=stream
        )
        told = merged(response)
        assert told["tokens"] == [*"hello", *plain["tokens"]]
        assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
        assert told["token_logprobs"][5:] == plain["token_logprobs"]
        assert told["text_offset"] == [0, 1, 2, 3, 4, *(5 + o for o in plain["text_offset"])]
        assert response.text().startswith("hello")


async def test_a_prompt_scores_what_generating_it_scored(serving):
    """What a model generated, given back as a prompt, has the same log-probabilities."""
    async with serving() as client:
        ids = [104, 105]
        first = await client.complete(
            ids, max_tokens=20, logprobs=3, temperature=1, seed=5, ignore_eos=True
        )
        told = merged(first)
        by_name = {client.engine.vocabulary.piece(t).decode("latin-1"): t for t in range(257)}
        by_name |= {client.engine.vocabulary.piece(t).decode(): t for t in range(260, 512)}
        names = [
            bytes.fromhex(name[6:].replace("\\x", "")).decode("latin-1")
            if name.startswith("bytes:")
            else name
            for name in told["tokens"]
        ]
        longer = ids + [by_name[name] for name in names]
        again = merged(await client.complete(longer, max_tokens=0, logprobs=3, echo=True))
        assert again["token_logprobs"][2:] == told["token_logprobs"]
        assert again["top_logprobs"][2:] == told["top_logprobs"]


async def test_no_tokens_asked_for_still_scores_the_prompt(serving):
    async with serving() as client:
        response = await client.complete("hello", max_tokens=0, logprobs=2, echo=True)
        told = merged(response)
        assert told["tokens"] == list("hello")
        assert [value is None for value in told["token_logprobs"]] == [True] + [False] * 4
        assert (response.text(), response.finish_reason()) == ("hello", "length")
        assert response.json["usage"]["completion_tokens"] == 0


async def test_a_prompt_token_that_is_not_shown_stands_at_the_start(serving):
    async with serving(model={"add_bos": True}) as client:
        told = merged(await client.complete("hey", max_tokens=0, logprobs=0, echo=True))
        assert told["tokens"] == ["<|bos|>", "h", "e", "y"]
        assert told["text_offset"] == [0, 0, 1, 2]
        written = await client.complete("a<|end|>b", max_tokens=0, logprobs=0, echo=True)
        told = merged(written)
        assert told["tokens"] == ["<|bos|>", "a", "<|end|>", "b"]
        assert told["text_offset"] == [0, 0, 1, 8]
        assert written.text() == "a<|end|>b"


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
async def test_a_scored_prompt_that_gives_way_is_told_as_if_it_had_not(serving, preemption):
    scored = RequestParams(max_tokens=3, logprobs=2, prompt_logprobs=True)
    prompt = list(b"a prompt that takes some iterations")
    limits = {"engine": {"lanes": 1}, "scheduler": {"preemption": preemption}}
    async with serving(**limits) as client:
        alone = [event async for event in client.engine.generate(prompt, scored)]
        async with await client.engine.submit(prompt, scored) as stream:
            while stream.request.computed < 9:
                await asyncio.sleep(0)
            urgent = RequestParams(max_tokens=2, priority=5)
            assert len([event async for event in client.engine.generate(b"x", urgent)]) == 2
            assert [event async for event in stream] == alone
            assert stream.request.preemptions == 1
        assert len(alone[0].prompt_logprobs) == len(prompt) - 1


async def test_a_scored_prompt_whose_session_is_lost_is_scored_again(serving):
    fields = {"max_tokens": 3, "logprobs": 1, "echo": True}
    async with serving() as client:
        alone = merged(await client.complete("hello", **fields))
    # The batch fails behind its work, and its row cannot be brought back.
    faults = [
        "call=iteration status=RUNTIME_ERROR when=after nth=3",
        "call=trim status=RUNTIME_ERROR nth=1",
    ]
    async with serving(model={"fault": faults}) as client:
        company = await client.complete(["hello", "hello"], **fields)
        assert (await client.metrics())["skippy:entries_requeued_total"] > 0
        assert [merged(company, index) for index in range(2)] == [alone, alone]


# --- the best of several --------------------------------------------------------------------------


async def test_the_best_of_several_are_those_with_the_highest_mean(serving):
    fields = {"temperature": 1, "seed": 11, "max_tokens": 6}
    async with serving() as client:
        everyone = await client.complete("x", n=6, logprobs=0, **fields)
        means = [sum(t) / len(t) for t in (merged(everyone, k)["token_logprobs"] for k in range(6))]
        order = sorted(range(6), key=lambda k: means[k], reverse=True)
        assert all(a > b for a, b in pairwise(sorted(means, reverse=True)))
        best = await client.complete("x", n=2, best_of=6, **fields)
        assert [best.text(k) for k in range(2)] == [everyone.text(k) for k in order[:2]]
        assert best.json["choices"][0]["logprobs"] is None
        usage = best.json["usage"]
        assert usage["completion_tokens"] == everyone.json["usage"]["completion_tokens"]


async def test_the_best_are_chosen_per_prompt(serving, script):
    async with serving() as client:
        response = await client.complete([script("ab"), script("xyz")], best_of=2)
        assert [choice["text"] for choice in response.json["choices"]] == ["ab", "xyz"]
        assert response.json["usage"]["prompt_tokens"] == 9


async def test_a_library_that_cannot_tell_is_a_clear_refusal(serving, monkeypatch):
    offered = Library.offers
    monkeypatch.setattr(
        Library, "offers", lambda self, name: "logprobs" not in name and offered(self, name)
    )
    async with serving() as client:
        response = await client.complete("x", logprobs=1)
        assert response.status == 400
        assert response.error["param"] == "logprobs"
        assert "library" in response.error["message"]


def test_the_simulated_library_can_tell():
    assert Library.load(find_library("sim")).offers("skippyx_session_logprobs")
