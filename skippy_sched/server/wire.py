"""The request bodies of OpenAI's endpoints: every field is honoured, or refused with its name.

Knows names, types and bounds that do not depend on the model. Does not know the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skippy_sched.errors import InvalidRequest

#: Each choice takes a lane or a place in the queue.
CHOICES_MAX = 128
#: OpenAI's bound; each stop string is searched for in every piece of text.
STOPS_MAX = 4
#: The library takes so many; more would be dropped without a word.
LOGIT_BIASES_MAX = 256
SHOWN_CHARS_MAX = 80
#: Classes enough for any order, few enough to be kept apart.
PRIORITY_MAX = 100
#: A name for logs and tenants, not a place to store things.
USER_CHARS_MAX = 256


def _integral(value: object) -> object:
    """JavaScript clients send 1.0 where they mean 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("request", "{message}", {"message": message})


Int = Annotated[int, BeforeValidator(_integral)]
TokenLimit = Annotated[Int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=USER_CHARS_MAX)]
Number = Annotated[float, Field(allow_inf_nan=False)]


# What a client may send where a validator reads it: for the OpenAPI document.
Stop = Annotated[str, Field(min_length=1)]
StopInput = Stop | Annotated[list[Stop], Field(max_length=STOPS_MAX)] | None
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
BiasInput = Annotated[dict[TokenName, Bias], Field(max_length=LOGIT_BIASES_MAX)] | None
TokenId = Annotated[Int, Field(ge=0, lt=2**31)]
IdsInput = list[TokenId] | None
Ids = Annotated[list[TokenId], Field(min_length=1)]
PromptInput = (
    str
    | Annotated[list[str], Field(min_length=1)]
    | Ids
    | Annotated[list[Ids], Field(min_length=1)]
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None

    @property
    def ignored(self) -> list[str]:
        return [f"stream_options.{name}" for name in self.model_extra or ()]


class Generation(BaseModel):
    """What both endpoints share. None, and only None, means that a field was not sent."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    model: str | None = None
    max_tokens: TokenLimit | None = None
    n: Annotated[Int, Field(ge=1, le=CHOICES_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: tuple[str, ...] = ()
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
    user: Text | None = None

    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    # Extensions, under the names that other servers use.
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    repetition_penalty: Annotated[Number, Field(gt=0, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[Annotated[Int, Field(ge=0, lt=2**31)], ...] = Field((), strict=False)
    timeout: Annotated[Number, Field(gt=0, le=86400)] | None = None
    priority: Annotated[Int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    # Known, and refused unless they ask for what happens anyway.
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    grammar: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None
    use_beam_search: Literal[False] | None = None

    @field_validator("stop", mode="plain", json_schema_input_type=StopInput)
    @classmethod
    def _stop(cls, value: object) -> tuple[str, ...]:
        stops = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise problem("expected a string or a list of strings")
        if len(stops) > STOPS_MAX:
            raise problem(f"{len(stops)} stop strings are more than {STOPS_MAX}")
        if "" in stops:
            raise problem("a stop string is empty; leave it out")
        return tuple(stops)

    @field_validator("logit_bias", mode="plain", json_schema_input_type=BiasInput)
    @classmethod
    def _logit_bias(cls, value: object) -> tuple[tuple[int, float], ...]:
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise problem("expected an object that maps token ids, as strings, to -100…100")
        if len(value) > LOGIT_BIASES_MAX:
            raise problem(f"{len(value)} biases are more than {LOGIT_BIASES_MAX}")
        return tuple(_bias(token, bias) for token, bias in value.items())

    @field_validator("stop_token_ids", mode="before", json_schema_input_type=IdsInput)
    @classmethod
    def _no_stop_tokens(cls, value: object) -> object:
        return () if value is None else value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise at("stream_options", "only allowed together with stream = true")
        if self.repeat_penalty is not None and self.repetition_penalty is not None:
            raise at("repetition_penalty", "is repeat_penalty by another name; send one of them")
        return self

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def priority_class(self) -> int:
        """Higher goes first; a tier is a priority by another name."""
        if self.priority is not None:
            return self.priority
        return {"flex": -1, "priority": 1}.get(self.service_tier or "default", 0)

    @property
    def tier_used(self) -> str | None:
        """The tier to tell the client of; None if it did not ask for one."""
        return "default" if self.service_tier == "auto" else self.service_tier

    @property
    def ignored(self) -> list[str]:
        """Fields that we do not know; clients send their vendors' extras."""
        nested = self.stream_options.ignored if self.stream_options else []
        return [*(self.model_extra or ()), *nested]


def _bias(token: str, bias: object) -> tuple[int, float]:
    if not re.fullmatch(r"[0-9]{1,10}", token):
        raise problem(f"{_shown(token)} is not a token id")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
        raise problem(f"the bias of token {token} is {_shown(bias)}, not a number in -100…100")
    return int(token), float(bias)


class CompletionRequest(Generation):
    prompt: tuple[str | list[int], ...]
    echo: bool | None = None
    best_of: Annotated[Int, Field(ge=1, le=CHOICES_MAX)] | None = None
    suffix: Literal[""] | None = None
    logprobs: None = None
    response_format: None = None

    @field_validator("prompt", mode="plain", json_schema_input_type=PromptInput)
    @classmethod
    def _prompt(cls, value: object) -> tuple[str | list[int], ...]:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list) and value:
            if _all(value, str):
                return tuple(value)
            if _all(value, int):
                return (value,)
            if _all(value, list) and all(_all(ids, int) for ids in value):
                return tuple(value)
        raise problem("expected a string, a list of strings, token ids, or a list of lists of ids")

    @model_validator(mode="after")
    def _choices(self) -> CompletionRequest:
        if self.best_of not in (None, self.choices_per_prompt):
            raise at(
                "best_of", f"is {self.best_of}; only best_of = n is supported, without ranking"
            )
        choices = len(self.prompt) * self.choices_per_prompt
        if choices > CHOICES_MAX:
            raise at("n", f"prompts times n is {choices}, more than {CHOICES_MAX}")
        return self


def _all(values: Sequence[object], kind: type) -> bool:
    """Exactly of this type: true and false are no token ids."""
    return set(map(type, values)) <= {kind}


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["text"]
    text: str


ContentInput = str | list[TextPart]


class Message(BaseModel):
    """One message; templates may look at the fields that we do not know."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: Text | None = None
    refusal: str | None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None

    @field_validator("content", mode="before", json_schema_input_type=ContentInput)
    @classmethod
    def _content(cls, value: object) -> object:
        """A list of text parts is one text."""
        if not isinstance(value, list):
            return value
        texts = []
        for index, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get("text") if isinstance(part, dict) else None
            if kind != "text":
                raise problem(f"part {index} has type {_shown(kind)}; only text is supported")
            if not isinstance(text, str):
                raise problem(f"part {index} has no text")
            texts.append(text)
        return "\n".join(texts)


class ChatRequest(Generation):
    messages: Annotated[tuple[Message, ...], Field(strict=False)]
    max_completion_tokens: TokenLimit | None = None

    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[tuple[Any, ...], Field(max_length=0, strict=False)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[tuple[Any, ...], Field(max_length=0, strict=False)] | None = None
    function_call: Literal["none"] | None = None
    response_format: dict[str, Any] | None = None
    modalities: Annotated[tuple[Literal["text"], ...], Field(strict=False)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None

    @model_validator(mode="after")
    def _limits(self) -> ChatRequest:
        if not self.messages:
            raise at("messages", "at least one message is needed")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise at("max_completion_tokens", f"is {new} and max_tokens is {old}; send one of them")
        name = "max_tokens" if new is None else "max_completion_tokens"
        if self.token_limit == 0:
            raise at(name, "0 is below 1")
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise at("response_format", 'only {"type": "text"} is supported')
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def at(param: str, message: str) -> PydanticCustomError:
    """A problem between fields, found after each was right by itself."""
    return PydanticCustomError("request", "{message}", {"message": message, "param": param})


Request = TypeVar("Request", bound=Generation)


def parse(kind: type[Request], body: bytes) -> Request:
    """Raises InvalidRequest for the first problem, with the field's name as ``param``.

    The parser works on the bytes: it refuses lone surrogates, other encodings, endless nesting
    and non-numbers, which Python's own JSON reader lets through.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = min(error.errors(include_url=False), key=_urgency)
        raise InvalidRequest(_message(first), param=_param(first)) from None


def _urgency(found: Any) -> tuple[bool, int]:
    """A wrong field says more than a missing one, an element more than the list it is in."""
    depth = len(found["loc"])
    return (found["type"] == "missing" and depth == 1, -depth)


def _param(found: Any) -> str | None:
    between: str | None = found.get("ctx", {}).get("param")
    if between is not None:
        return between
    return str(found["loc"][0]) if found["loc"] else None


def _message(found: Any) -> str:
    kind, bounds = found["type"], found.get("ctx", {})
    if kind == "json_invalid":
        return f"the body is not valid JSON: {bounds['error']}"
    if kind == "model_type" and not found["loc"]:
        return "the body must be a JSON object"
    where = ".".join(str(part) for part in found["loc"]) or str(bounds.get("param", "body"))
    return f"{where}: {_sentence(kind, bounds, found)}"


def _sentence(kind: str, bounds: Any, found: Any) -> str:
    shown = _shown(found["input"])
    if kind == "missing":
        return "is required"
    if kind == "request":
        return str(bounds["message"])
    if kind in ("none_required", "literal_error"):
        choice = {"False": "false"}.get(expected := bounds.get("expected", "null"), expected)
        return f"{shown} is not supported; leave the field out or send {choice}"
    if kind == "too_long" and bounds.get("max_length") == 0:
        return "is not supported"
    for bound, word in (("ge", "is below"), ("gt", "is not above"), ("le", "is above")):
        if bound in bounds:
            return f"{shown} {word} {bounds[bound]}"
    if "lt" in bounds:
        return f"{shown} is not below {bounds['lt']}"
    message = str(found["msg"])
    return f"{message[:1].lower()}{message[1:]}, found {shown}"


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value[: SHOWN_CHARS_MAX + 1]) if isinstance(value, str) else str(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"
