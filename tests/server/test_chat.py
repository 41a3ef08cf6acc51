"""Chat completions: shapes, the usage chunk, failures in mid-stream."""

from __future__ import annotations

import pytest

#: The template's whole output is the prompt, so a script in it makes the answer known.
SCRIPTED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|script|>Hi!<|end|>{% endif %}"
)


async def test_a_chat_answer_has_the_documented_shape(serving):
    async with serving(model={"chat_template": SCRIPTED}) as client:
        answer = (await client.chat()).json
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        choice = answer["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Hi!", "refusal": None}
        assert (choice["index"], choice["finish_reason"]) == (0, "stop")


async def test_a_chat_stream_opens_with_the_role_and_ends_with_an_empty_delta(serving):
    async with serving(model={"chat_template": SCRIPTED}) as client:
        events = (await client.chat(stream=True)).events
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert [delta["content"] for delta in deltas[1:-1]] == ["H", "i", "!"]
        assert deltas[-1] == {}
        assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["stop"]
        assert {event["object"] for event in events} == {"chat.completion.chunk"}


async def test_every_choice_of_a_stream_opens_and_ends_once(serving):
    async with serving(model={"chat_template": SCRIPTED}) as client:
        response = await client.chat(stream=True, n=3)
        for index in range(3):
            assert response.deltas(index) == ["", "H", "i", "!"]
            assert response.finish_reason(index) == "stop"


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_without_include_usage_no_chunk_speaks_of_usage(serving, options):
    fields = {} if options is None else {"stream_options": options}
    async with serving(model={"chat_template": SCRIPTED}) as client:
        for event in (await client.chat(stream=True, **fields)).events:
            assert "usage" not in event
            assert event["choices"]


async def test_with_include_usage_the_last_chunk_has_the_counts_and_no_choices(serving):
    async with serving(model={"chat_template": SCRIPTED}) as client:
        whole = await client.chat()
        response = await client.chat(stream=True, stream_options={"include_usage": True})
        *chunks, last = response.events
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"] == whole.json["usage"]
        assert last["usage"]["completion_tokens"] == 4
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_failure_in_mid_stream_is_an_error_event_and_then_done(serving):
    """The client must not take a cut stream for a finished one."""
    fault = "call=iteration nth=4 index=0 status=RUNTIME_ERROR"
    async with serving(model={"fault": [fault + " count=0"]}) as client:
        response = await client.complete("A", stream=True, max_tokens=50)
        assert response.status == 200
        *chunks, failure = response.events
        assert len(chunks) > 0
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert failure["error"]["code"] == "engine_error"
        assert isinstance(failure["error"]["message"], str)
        assert response.body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_a_failure_before_the_first_token_is_a_status(serving):
    fault = "call=iteration nth=1 count=0 status=RUNTIME_ERROR"
    async with serving(model={"fault": [fault]}) as client:
        for stream in (False, True):
            response = await client.complete("A", stream=stream, max_tokens=50)
            assert response.status == 500
            assert response.error["code"] == "engine_error"
            assert response.headers["x-should-retry"] == "false"


async def test_message_parts_are_joined_and_developers_speak_as_the_system(serving):
    template = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    async with serving(model={"chat_template": template}) as client:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        ]
        body = {"messages": messages, "max_tokens": 1}
        response = await client.post("/v1/chat/completions", body)
        expected = await client.engine.vocabulary.tokenize("[system:be brief][user:a\nb]")
        assert response.json["usage"]["prompt_tokens"] == len(expected)


async def test_a_template_that_writes_the_first_token_gets_no_second_one(serving):
    template = "{{ bos_token }}{{ messages[0].content }}"
    async with serving(model={"chat_template": template, "add_bos": True}) as client:
        response = await client.chat("A", max_tokens=1)
        assert response.json["usage"]["prompt_tokens"] == 2


async def test_either_name_of_the_token_limit_is_taken(serving):
    async with serving() as client:
        for name in ("max_tokens", "max_completion_tokens"):
            response = await client.chat(**{name: 3})
            assert response.json["usage"]["completion_tokens"] == 3
        assert (await client.chat(max_tokens=3, max_completion_tokens=3)).status == 200


async def test_a_template_is_given_the_clients_variables(serving):
    """But none of them takes the place of its own."""
    template = "{{ messages[0].content }}{% if enable_thinking is false %}!{% endif %}"
    async with serving(model={"chat_template": template}) as client:
        plain = await client.chat("abc", max_tokens=1)
        given = await client.chat(
            "abc", max_tokens=1, chat_template_kwargs={"enable_thinking": False, "messages": "no"}
        )
        assert plain.json["usage"]["prompt_tokens"] == 3
        assert given.json["usage"]["prompt_tokens"] == 4
