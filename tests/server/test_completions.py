"""Text completions: shapes, choices, prompts, limits."""

from __future__ import annotations

import asyncio

import pytest


async def test_a_completion_has_the_documented_shape(serving, script):
    async with serving() as client:
        response = await client.complete(script("Hello"), model="sim")
        assert response.status == 200
        answer = response.json
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "sim"
        assert answer["choices"] == [
            {
                "index": 0,
                "text": "Hello",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 257,
            }
        ]
        assert answer["usage"] == {
            "prompt_tokens": 7,
            "completion_tokens": 6,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


async def test_a_streamed_completion_says_what_the_whole_one_says(serving):
    async with serving() as client:
        whole, streamed = await client.both("once upon a time", max_tokens=40)
        assert streamed.text() == whole.text() != ""
        assert streamed.finish_reason() == whole.finish_reason() == "length"


async def test_every_chunk_carries_the_same_id_created_and_model(serving):
    async with serving() as client:
        events = (await client.complete("hello", max_tokens=5, stream=True)).events
        assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
        assert events[0]["object"] == "text_completion"


async def test_a_stream_is_written_once_per_iteration(serving, script):
    """Each token arrives with its iteration; the finish comes with the last token."""
    async with serving() as client:
        response = await client.complete(script("abc"), stream=True)
        assert len(response.parts) == 5  # a, b, c, the end token's finish, [DONE]
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_prompts_times_n_and_a_prompt_counts_once(serving, script, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with serving() as client:
        response = await client.complete(
            [script("ab"), script("xyz")], n=2, stream=stream, **options
        )
        assert [response.text(i) for i in range(4)] == ["ab", "ab", "xyz", "xyz"]
        assert [response.finish_reason(i) for i in range(4)] == ["stop"] * 4
        usage = response.events[-1]["usage"] if stream else response.json["usage"]
        assert usage["prompt_tokens"] == 4 + 5
        assert usage["completion_tokens"] == 3 + 3 + 4 + 4


async def test_more_choices_than_lanes_and_buffer_all_come_to_their_end(serving):
    limits = {"engine": {"lanes": 2}, "scheduler": {"stream_buffer_tokens": 2}}
    async with serving(**limits) as client:
        response = await client.complete("hello", n=6, max_tokens=20)
        assert response.json["usage"]["completion_tokens"] == 120


async def test_choice_k_of_a_seeded_request_is_the_single_choice_of_seed_plus_k(serving):
    async with serving() as client:
        fields = {"max_tokens": 12, "temperature": 0.8}
        three = await client.complete("hello", n=3, seed=42, **fields)
        alone = [await client.complete("hello", seed=42 + k, **fields) for k in range(3)]
        assert [three.text(k) for k in range(3)] == [one.text() for one in alone]
        assert len({one.text() for one in alone}) > 1


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**32, 2**63, 2**64 - 1])
async def test_any_64_bit_seed_repeats_itself(serving, seed):
    async with serving() as client:
        texts = {
            (await client.complete("a", seed=seed, temperature=1, max_tokens=8)).text()
            for _ in range(2)
        }
        assert len(texts) == 1


async def test_without_a_seed_two_answers_differ(serving):
    async with serving() as client:
        texts = {
            (await client.complete("a", temperature=1, max_tokens=20)).text() for _ in range(2)
        }
        assert len(texts) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_before_the_text(serving, stream):
    async with serving() as client:
        plain = await client.complete("hello", max_tokens=5)
        for prompt in ("hello", list(b"hello")):
            echoed = await client.complete(prompt, max_tokens=5, echo=True, stream=stream)
            assert echoed.text() == "hello" + plain.text()


async def test_a_prompt_of_ids_is_the_prompt_of_their_text(serving):
    async with serving() as client:
        ids = await client.engine.vocabulary.tokenize("hello world")
        by_text = await client.complete("hello world", max_tokens=8)
        assert (await client.complete(ids, max_tokens=8)).text() == by_text.text()
        assert (await client.complete([ids], max_tokens=8)).text() == by_text.text()


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_asked_for_is_an_empty_text_that_ended_by_length(serving, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    async with serving() as client:
        before = client.statistics().native_calls
        response = await client.complete("hello", max_tokens=0, stream=stream, **options)
        assert (response.text(), response.finish_reason()) == ("", "length")
        usage = response.events[-1]["usage"] if stream else response.json["usage"]
        prompt = len(await client.engine.vocabulary.tokenize("hello"))
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 0)
        echoed = await client.complete("hello", max_tokens=0, echo=True, stream=stream, **options)
        assert echoed.text() == "hello"
        assert client.statistics().native_calls == before


async def test_one_token_is_exactly_one_token(serving):
    async with serving() as client:
        response = await client.complete("hello", max_tokens=1)
        usage = response.json["usage"]
        assert response.finish_reason() == "length"
        assert usage["completion_tokens"] == 1
        assert usage["total_tokens"] == usage["prompt_tokens"] + 1


async def test_an_end_token_that_is_the_last_allowed_token_is_a_stop(serving, script):
    async with serving() as client:
        for stream in (False, True):
            response = await client.complete(script("ab"), max_tokens=3, stream=stream)
            assert (response.text(), response.finish_reason()) == ("ab", "stop")


async def test_ignored_end_tokens_leave_the_length_to_the_limit(serving, script):
    async with serving() as client:
        response = await client.complete(script("ab"), max_tokens=10, ignore_eos=True)
        assert response.finish_reason() == "length"
        assert response.json["usage"]["completion_tokens"] == 10


async def test_a_bias_forces_a_token_and_another_forbids_it(serving):
    async with serving() as client:
        forced = await client.complete("hello", max_tokens=3, logit_bias={"65": 100})
        assert forced.text() == "AAA"


async def test_a_stop_token_id_ends_the_text(serving, script):
    async with serving() as client:
        response = await client.complete(script("abc"), stop_token_ids=[98])
        assert response.finish_reason() == "stop"
        assert response.json["choices"][0]["stop_reason"] == 98


async def test_unset_max_tokens_means_up_to_the_context_limit(serving):
    async with serving(engine={"context_tokens": 64}) as client:
        response = await client.complete("hello")
        assert response.finish_reason() == "length"
        assert response.json["usage"]["total_tokens"] == 64


async def test_a_service_tier_is_told_back_only_if_asked_for(serving):
    async with serving() as client:
        for asked, used in (("auto", "default"), ("flex", "flex"), ("priority", "priority")):
            whole, streamed = await client.both("x", max_tokens=1, service_tier=asked)
            assert whole.json["service_tier"] == used
            assert {event["service_tier"] for event in streamed.events} == {used}
        assert "service_tier" not in (await client.complete("x", max_tokens=1)).json


async def test_a_higher_priority_gets_the_lane_first(serving):
    async with serving(engine={"lanes": 1}) as client:
        order = []

        async def ask(name: str, **fields: object) -> None:
            await client.complete("x", max_tokens=5, **fields)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ask("first"))
            tasks.create_task(ask("low", service_tier="flex"))
            tasks.create_task(ask("normal"))
        assert order == ["first", "normal", "low"]


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_and_metrics_tell_what_became_of_drafts(serving, script, stream):
    speculation = {"method": "ngram", "draft_tokens": 4}
    async with serving(speculation=speculation) as client:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        prompt = script("abcdabcdabceabcd")
        response = await client.complete(prompt, max_tokens=17, stream=stream, **options)
        assert response.text() == "abcdabcdabceabcd"
        usage = response.events[-1]["usage"] if stream else response.json["usage"]
        details = usage["completion_tokens_details"]
        accepted, rejected = details.values()
        assert usage["completion_tokens"] == 17
        assert accepted > 8
        assert rejected > 0
        metrics = await client.metrics()
        assert metrics["skippy:spec_decode_num_accepted_tokens_total"] == accepted
        assert metrics["skippy:spec_decode_num_draft_tokens_total"] == accepted + rejected


INFILL = {
    "token": [name.encode().hex() for name in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")]
}


async def test_a_suffix_asks_for_what_belongs_between(serving):
    """The prompt is put together of the model's own tokens for that."""
    async with serving(model=INFILL) as client:
        before, after, middle = 260, 261, 262
        by_hand = [before, *b"ab", after, *b"yz", middle]
        expected = (await client.complete(by_hand, max_tokens=8)).json
        for prompt in ("ab", list(b"ab")):
            answer = (await client.complete(prompt, suffix="yz", max_tokens=8)).json
            assert answer["choices"] == expected["choices"]
            assert answer["usage"]["prompt_tokens"] == len(by_hand)
        echoed = await client.complete("ab", suffix="yz", max_tokens=8, echo=True)
        assert echoed.text() == "ab" + expected["choices"][0]["text"]
        scored = await client.complete("ab", suffix="yz", echo=True, logprobs=1)
        assert scored.error["param"] == "suffix"


async def test_a_suffix_for_a_model_without_such_tokens_is_a_clear_refusal(serving):
    async with serving() as client:
        response = await client.complete("ab", suffix="yz")
        assert response.status == 400
        assert "filling in the middle" in response.error["message"]
