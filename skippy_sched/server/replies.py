"""Answers in OpenAI's shapes: whole objects, and the events of a stream.

Knows names and punctuation. Does not know where text comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from skippy_sched.errors import RequestError
from skippy_sched.scheduler.request import Usage
from skippy_sched.scheduler.vocabulary import Vocabulary
from skippy_sched.server.exchange import encode_json
from skippy_sched.server.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    Logprobs,
    Part,
)
from skippy_sched.server.problems import error_object
from skippy_sched.server.tool_calls import Call, CallReader

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """What one choice has come to; ``finish_reason`` None: it is not finished."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: Part | None = None
    #: per token; for a ranking, if log-probabilities were asked for
    mean_logprob: float = 0.0


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
    tells_logprobs: bool = False
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

    def logprobs_of(self, vocabulary: Vocabulary) -> Logprobs:
        """A writer for one choice."""
        raise NotImplementedError

    def delta(self, index: int, text: str, logprobs: Part | None = None) -> str:
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

    def logprobs_of(self, vocabulary: Vocabulary) -> Logprobs:
        return CompletionLogprobs(vocabulary)

    def delta(self, index: int, text: str, logprobs: Part | None = None) -> str:
        return (
            f'{self._before[index]}"text":{encode_json(text)},"logprobs":{_or_null(logprobs)},'
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
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


class ChatFormat(Format):
    """With ``reads_calls`` calls of tools are told apart from the text."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self, head: Head, include_usage: bool, tells_logprobs: bool, *, reads_calls: bool
    ) -> None:
        super().__init__(head, include_usage, tells_logprobs)
        self._reads_calls = reads_calls
        self._readers: list[CallReader] = []

    def prepare_stream(self, choices: int) -> None:
        super().prepare_stream(choices)
        if self._reads_calls:
            self._readers = [CallReader() for _ in range(choices)]

    def opening(self, index: int) -> str:
        return (
            f'{self._before[index]}"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}{self._after}'
        )

    def logprobs_of(self, vocabulary: Vocabulary) -> Logprobs:
        return ChatLogprobs(vocabulary)

    def delta(self, index: int, text: str, logprobs: Part | None = None) -> str:
        if not self._readers:
            return self._content(index, text, logprobs)
        told = "" if logprobs is None else self._content(index, "", logprobs)
        reader = self._readers[index]
        return told + "".join(self._piece(index, reader, piece) for piece in reader.read(text))

    def _piece(self, index: int, reader: CallReader, piece: str | Call) -> str:
        if isinstance(piece, str):
            return self._content(index, piece)
        number = reader.calls - 1
        call = {"index": number, **self._call(index, number, piece)}
        return self._delta(index, encode_json({"tool_calls": [call]}))

    def _content(self, index: int, text: str, logprobs: Part | None = None) -> str:
        return self._delta(index, f'{{"content":{encode_json(text)}}}', _or_null(logprobs))

    def _delta(self, index: int, delta: str, logprobs: str = "null") -> str:
        return (
            f'{self._before[index]}"delta":{delta},"logprobs":{logprobs},'
            f'"finish_reason":null}}{self._after}'
        )

    def finish(self, index: int, choice: Choice) -> str:
        rest, calls = "", 0
        if self._readers:
            reader = self._readers[index]
            rest = "".join(self._content(index, text) for text in reader.end())
            calls = reader.calls
        return (
            f'{rest}{self._before[index]}"delta":{{}},"logprobs":null,'
            f'"finish_reason":"{_finish_reason(choice, calls)}",'
            f'"stop_reason":{encode_json(choice.stop_reason)}}}{self._after}'
        )

    def whole_choice(self, index: int, choice: Choice) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None}
        calls: list[dict[str, object]] = []
        if self._reads_calls:
            reader = CallReader()
            pieces = [*reader.read(choice.text), *reader.end()]
            calls = [
                self._call(index, number, call)
                for number, call in enumerate(p for p in pieces if isinstance(p, Call))
            ]
            if calls:
                texts = "".join(piece for piece in pieces if isinstance(piece, str))
                message |= {"content": texts or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": choice.logprobs,
            "finish_reason": _finish_reason(choice, len(calls)),
            "stop_reason": choice.stop_reason,
        }

    def _call(self, index: int, number: int, call: Call) -> dict[str, object]:
        """Its id is unique, and follows from the answer's."""
        return {
            "id": f"call_{self.head.id.removeprefix('chatcmpl-')}_{index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }


def _finish_reason(choice: Choice, calls: int) -> str | None:
    return "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason


def _or_null(part: Part | None) -> str:
    return "null" if part is None else encode_json(part)


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
