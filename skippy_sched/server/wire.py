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
#: OpenAI's bounds on likeliest tokens told beside each token.
COMPLETION_LOGPROBS_MAX = 5
CHAT_LOGPROBS_MAX = 20
#: The library takes so many; more would be dropped without a word.
LOGIT_BIASES_MAX = 256
SHOWN_CHARS_MAX = 80
#: Classes enough for any order, few enough to be kept apart.
PRIORITY_MAX = 100
#: A name for logs and tenants, not a place to store things.
USER_CHARS_MAX = 256
#: OpenAI's bound.
TOOLS_MAX = 128


def _integral(value: object) -> object:
    """JavaScript clients send 1.0 where they mean 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("request", "{message}", {"message": message})


def _boolean(value: object) -> object:
    """A literal would take 0 for false."""
    if not isinstance(value, bool):
        raise problem(f"expected true or false, found {_shown(value)}")
    return value


def _not_boolean(value: object) -> object:
    """As above, the other way round."""
    if isinstance(value, bool):
        raise problem(f"expected a number, found {_shown(value)}")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_boolean)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_boolean)]
OnlyOne = Annotated[Literal[1], BeforeValidator(_not_boolean)]
OnlyZero = Annotated[Literal[0], BeforeValidator(_not_boolean)]
Nothing = Annotated[tuple[Any, ...], Field(max_length=0, strict=False)] | None
Int = Annotated[int, BeforeValidator(_integral)]
TokenLimit = Annotated[Int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(max_length=USER_CHARS_MAX)]
Number = Annotated[float, Field(allow_inf_nan=False)]
TemplateVariables = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")],
        str | bool | Int | Number | None,
    ],
    Field(max_length=16),
]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


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


class NamedFunction(BaseModel):
    name: FunctionName


class NamedTool(BaseModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoiceInput = Literal["none", "auto", "required"] | NamedTool | None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: OnlyFalse | None = None

    @property
    def ignored(self) -> list[str]:
        return [f"stream_options.{name}" for name in self.model_extra or ()]


class JsonSchema(BaseModel):
    """``strict`` changes nothing: an answer always fits its schema."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: Text | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise at("response_format", "json_schema is required with type json_schema")
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """What the answer has to be; None: any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


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
    #: what took the place of ``user``; the other is a hint that a cache of prefixes needs not
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None

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

    # What the answer has to look like.
    response_format: ResponseFormat | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    # Known, and refused unless they ask for what happens anyway.
    store: OnlyFalse | None = None
    metadata: dict[str, str] | None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    structured_outputs: None = None
    use_beam_search: OnlyFalse | None = None
    length_penalty: Annotated[Number, Field(ge=1, le=1)] | None = None
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: bool | None = None  # there are none in a text
    include_stop_str_in_output: OnlyFalse | None = None
    min_tokens: OnlyZero | None = None
    truncate_prompt_tokens: None = None
    prompt_logprobs: None = None
    allowed_token_ids: None = None
    bad_words: Annotated[tuple[str, ...], Field(max_length=0, strict=False)] | None = None
    logits_processors: None = None
    return_tokens_as_token_ids: OnlyFalse | None = None
    return_token_ids: OnlyFalse | None = None
    cache_salt: None = None

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
        wants_schema = self.response_format is not None and self.response_format.type != "text"
        if self.grammar is not None and wants_schema:
            raise at("grammar", "and response_format both say what the answer looks like")
        if self.repeat_penalty is not None and self.repetition_penalty is not None:
            raise at("repetition_penalty", "is repeat_penalty by another name; send one of them")
        return self

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def logprobs_wanted(self) -> int | None:
        """Tokens to tell of beside each token; None: no log-probabilities."""
        raise NotImplementedError

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
    suffix: str | None = None
    add_special_tokens: OnlyTrue | None = None
    # What only a chat has, so that nobody takes it for heard.
    messages: Nothing = None
    tools: Nothing = None
    tool_choice: Literal["none"] | None = None
    functions: Nothing = None
    logprobs: Annotated[Int, Field(ge=0, le=COMPLETION_LOGPROBS_MAX)] | None = None

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
        if self.suffix and self.echo and self.logprobs is not None:
            raise at("suffix", "cannot go with echo and logprobs: which text would be scored?")
        candidates, choices = self.candidates, self.choices_per_prompt
        if candidates < choices:
            raise at("best_of", f"is {candidates}, below n = {choices}")
        if candidates > choices and self.stream:
            raise at("best_of", "cannot be streamed: which choices are best is known at the end")
        if candidates > choices and self.max_tokens == 0:
            raise at("best_of", "without tokens, none is better than another")
        total = len(self.prompt) * candidates
        if total > CHOICES_MAX:
            name = "n" if candidates == choices else "best_of"
            raise at(name, f"prompts times {name} is {total}, more than {CHOICES_MAX}")
        return self

    @property
    def candidates(self) -> int:
        """Choices generated per prompt, of which the best are told."""
        return self.choices_per_prompt if self.best_of is None else self.best_of

    @property
    def logprobs_wanted(self) -> int | None:
        return self.logprobs


def _all(values: Sequence[object], kind: type) -> bool:
    """Exactly of this type: true and false are no token ids."""
    return set(map(type, values)) <= {kind}


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    type: Literal["text"]
    text: str


ContentInput = str | list[TextPart]


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    name: FunctionName
    arguments: str


class ToolCall(BaseModel):
    """A call that the model made in an earlier turn."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message; templates may look at the fields that we do not know."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    name: Text | None = None
    refusal: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Field(strict=False)] | None = None
    tool_call_id: Text | None = None
    function_call: None = None
    audio: None = None

    @model_validator(mode="before")
    @classmethod
    def _only_calls_need_no_content(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("content") is None:
            if value.get("role") == "assistant" and value.get("tool_calls"):
                return {**value, "content": ""}
            if "content" not in value:
                raise problem("content is required")
        return value

    @model_validator(mode="after")
    def _calls_and_results_by_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise problem(f"tool_calls are an assistant's, the role is {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise problem("tool_call_id is required with role tool")
        return self

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


class Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["function"]
    function: Function


class ChatRequest(Generation):
    messages: Annotated[tuple[Message, ...], Field(strict=False)]
    max_completion_tokens: TokenLimit | None = None

    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=CHAT_LOGPROBS_MAX)] | None = None
    tools: Annotated[tuple[Tool, ...], Field(max_length=TOOLS_MAX, strict=False)] | None = None
    #: "none", "auto", "required", or the name of the function to call, as an object that holds it
    tool_choice: str | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[tuple[Any, ...], Field(max_length=0, strict=False)] | None = None
    function_call: Literal["none"] | None = None
    modalities: Annotated[tuple[Literal["text"], ...], Field(strict=False)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    reasoning_effort: Literal["none"] | None = None
    verbosity: Literal["medium"] | None = None
    #: variables for the template, such as enable_thinking
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: None = None  # templates come from the operator
    documents: None = None
    # What only a completion has.
    echo: OnlyFalse | None = None
    best_of: OnlyOne | None = None
    suffix: Literal[""] | None = None
    prompt: None = None
    add_generation_prompt: OnlyTrue | None = None
    continue_final_message: OnlyFalse | None = None
    add_special_tokens: OnlyFalse | None = None

    @field_validator("tool_choice", mode="plain", json_schema_input_type=ToolChoiceInput)
    @classmethod
    def _tool_choice(cls, value: object) -> str | None:
        """A function's name comes with a colon before it, so that it is none of the words."""
        if value is None or value in ("none", "auto", "required"):
            return value if isinstance(value, str) else None
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(value, dict) or value.get("type") != "function" or not name:
            raise problem(
                'expected "none", "auto", "required" or '
                '{"type": "function", "function": {"name": …}}'
            )
        return f":{name}"

    @model_validator(mode="after")
    def _tools(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise at("tools", "two functions have the same name")
        if self.tool_choice == "required" and not names:
            raise at("tool_choice", "is required, but there are no tools")
        if (wanted := self.function_wanted) is not None and wanted not in names:
            raise at("tool_choice", f"names {_shown(wanted)}, which is none of the tools")
        if names and self.grammar is not None:
            raise at("grammar", "and tools both say what the answer looks like")
        return self

    @property
    def function_wanted(self) -> str | None:
        choice = self.tool_choice
        return choice[1:] if choice is not None and choice.startswith(":") else None

    @property
    def tools_offered(self) -> tuple[Tool, ...]:
        """Those that the model is told of."""
        return () if self.tool_choice == "none" else self.tools or ()

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
        if self.top_logprobs and not self.logprobs:
            raise at("top_logprobs", "needs logprobs = true")
        return self

    @property
    def logprobs_wanted(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

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
