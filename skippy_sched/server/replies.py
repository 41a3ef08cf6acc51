"""Answers in OpenAI's shapes: whole objects, and the events of a stream.

Knows names and punctuation. Does not know where text comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.request import Usage
from skippy_sched.server.exchange import encode_json
from skippy_sched.server.problems import error_object

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """What one choice has come to; ``finish_reason`` None: it is not finished."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What all objects of one answer share."""

    id: str
    created: int
    model: str
    fingerprint: str
    service_tier: str | None = None


@dataclass(slots=True)
class Format:
    """One endpoint's shapes; an event's constant parts are encoded once per stream."""

    head: Head
    include_usage: bool = False
    _before: list[str] = field(default_factory=list)
    _after: str = ""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def prepare_stream(self, choices: int) -> None:
        head = encode_json(self._fields(self.chunk_object))[:-1]
        self._before = [f'data: {head},"choices":[{{"index":{i},' for i in range(choices)]
        self._after = '],"usage":null}\n\n' if self.include_usage else "]}\n\n"

    def _fields(self, kind: str) -> dict[str, object]:
        fields: dict[str, object] = {
            "id": self.head.id,
            "object": kind,
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.fingerprint,
        }
        if self.head.service_tier is not None:
            fields["service_tier"] = self.head.service_tier
        return fields

    def opening(self, index: int) -> str:
        """Comes before a choice's first text."""
        return ""

    def delta(self, index: int, text: str) -> str:
        raise NotImplementedError

    def finish(self, index: int, choice: Choice) -> str:
        raise NotImplementedError

    def whole_choice(self, index: int, choice: Choice) -> dict[str, object]:
        raise NotImplementedError

    def usage_event(self, usage: Usage) -> str:
        fields = {**self._fields(self.chunk_object), "choices": [], "usage": usage_object(usage)}
        return f"data: {encode_json(fields)}\n\n"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, object]:
        return {
            **self._fields(self.whole_object),
            "choices": [self.whole_choice(i, choice) for i, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }


class CompletionFormat(Format):
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def delta(self, index: int, text: str) -> str:
        return (
            f'{self._before[index]}"text":{encode_json(text)},"logprobs":null,'
            f'"finish_reason":null}}{self._after}'
        )

    def finish(self, index: int, choice: Choice) -> str:
        return (
            f'{self._before[index]}"text":"","logprobs":null,'
            f'"finish_reason":"{choice.finish_reason}",'
            f'"stop_reason":{encode_json(choice.stop_reason)}}}{self._after}'
        )

    def whole_choice(self, index: int, choice: Choice) -> dict[str, object]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatFormat(Format):
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> str:
        return (
            f'{self._before[index]}"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}{self._after}'
        )

    def delta(self, index: int, text: str) -> str:
        return (
            f'{self._before[index]}"delta":{{"content":{encode_json(text)}}},"logprobs":null,'
            f'"finish_reason":null}}{self._after}'
        )

    def finish(self, index: int, choice: Choice) -> str:
        return (
            f'{self._before[index]}"delta":{{}},"logprobs":null,'
            f'"finish_reason":"{choice.finish_reason}",'
            f'"stop_reason":{encode_json(choice.stop_reason)}}}{self._after}'
        )

    def whole_choice(self, index: int, choice: Choice) -> dict[str, object]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def error_event(error: RequestError) -> str:
    return f"data: {encode_json(error_object(error))}\n\n"


def usage_object(usage: Usage) -> dict[str, object]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.rejected_draft_tokens,
        },
    }
