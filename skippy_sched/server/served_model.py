"""The loaded model as the server needs it: a name, an engine, a chat template.

Knows how a chat becomes prompt tokens and how a request becomes parameters. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skippy_sched import clock
from skippy_sched.config import Config
from skippy_sched.default_model import MODEL_FILE
from skippy_sched.errors import ContextLengthExceeded, InvalidRequest, StartupError
from skippy_sched.native.facts import ModelFacts
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.grammar import Grammar, GrammarError
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.server.chat_template import ChatTemplate
from skippy_sched.server.tool_calls import OPEN, arguments_schema, calls_grammar, is_lenient
from skippy_sched.server.wire import ChatRequest, Generation

#: Rendering more text than this takes milliseconds: it is done off the loop.
RENDER_INLINE_CHARS = 65536

_SEED_MASK = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    engine: Engine
    template: ChatTemplate
    bos: str
    created: int
    #: the tokens before a prefix, a suffix and the middle; None: the model has none
    infill: tuple[int, int, int] | None

    async def chat_prompt(self, request: ChatRequest) -> list[int]:
        """Tokens that ask for the next message; raises InvalidRequest."""
        messages, tools = request.messages, request.tools_offered
        variables = request.chat_template_kwargs or {}
        if sum(len(message.content) for message in messages) > RENDER_INLINE_CHARS:
            text = await asyncio.to_thread(self.template.render, messages, tools, variables)
        else:
            text = self.template.render(messages, tools, variables)
        # Some templates write the first token themselves; the model must not see it twice.
        has_bos = bool(self.bos) and text.startswith(self.bos)
        return await self.engine.vocabulary.tokenize(text, add_special=not has_bos)

    async def infill_prompt(self, prompt: str | list[int], suffix: str) -> list[int]:
        """Tokens that ask for what belongs between the two; raises InvalidRequest."""
        if self.infill is None:
            raise InvalidRequest(
                "suffix is not supported: this model has no tokens for filling in the middle; "
                "leave it out, or use a model that was trained for that",
                param="suffix",
            )
        before, after, middle = self.infill
        if isinstance(prompt, str):
            prompt = await self.engine.vocabulary.tokenize(prompt, add_special=False)
        rest = await self.engine.vocabulary.tokenize(suffix, add_special=False)
        facts = self.engine.facts
        start = [facts.token_bos] if facts.add_bos else []
        return [*start, before, *prompt, after, *rest, middle]

    def check_tools(self, request: ChatRequest) -> None:
        """Raises InvalidRequest where the template could not tell the model of tools."""
        if request.tools_offered and not self.template.reads_calls:
            why = (
                f"writes calls in another notation than {OPEN}, which this server cannot read"
                if self.template.takes_tools
                else "has none"
            )
            raise InvalidRequest(
                f"tools are not supported: the model's chat template {why}; leave tools out, or "
                "set model.chat_template to a template for this model that has them",
                param="tools",
            )
        if self.template.takes_tools:
            return
        for index, message in enumerate(request.messages):
            if message.role == "tool" or message.tool_calls:
                raise InvalidRequest(
                    f"messages.{index} is about a call of a tool; the model's chat template has no "
                    "tools",
                    param="messages",
                )

    async def calls_grammar(self, request: ChatRequest) -> Grammar:
        """Calls of the offered tools, or what else may be answered; raises InvalidRequest."""
        tools = [tool.function.model_dump(exclude_none=True) for tool in request.tools_offered]
        wanted = request.function_wanted
        form = request.response_format
        text = calls_grammar(
            [tool for tool in tools if wanted in (None, tool["name"])],
            required=wanted is not None or request.tool_choice == "required",
            parallel=wanted is None and request.parallel_tool_calls is not False,
            otherwise=None if form is None else form.schema_wanted,
        )
        try:
            return await self.engine.compile_lark(text)
        except GrammarError as error:
            for index, tool in enumerate(tools):
                place = f"tools.{index}.function.parameters"
                schema = arguments_schema(tool)
                await self._check_schema(schema, place, "tools", lenient=is_lenient(tool))
            raise InvalidRequest(f"tools: {error}", param="tools") from None

    async def _check_schema(
        self, schema: dict[str, Any], place: str, param: str, *, lenient: bool = False
    ) -> Grammar:
        try:
            return await self.engine.compile_schema(schema, lenient=lenient)
        except GrammarError as error:
            place = ".".join(filter(None, [place, error.place]))
            raise InvalidRequest(f"{place}: {error}", param=param) from None

    async def grammar(self, request: Generation) -> Grammar | None:
        """What the answer has to fit, compiled off the loop; raises InvalidRequest."""
        if isinstance(request, ChatRequest) and request.tools_offered:
            return await self.calls_grammar(request)
        form = request.response_format
        if form is not None and (schema := form.schema_wanted) is not None:
            place = "response_format.json_schema.schema"
            return await self._check_schema(schema, place, "response_format")
        if request.grammar is None:
            return None
        try:
            return await self.engine.compile_gbnf(request.grammar)
        except GrammarError as error:
            raise InvalidRequest(f"grammar: {error}", param="grammar") from None


def model_name(config: Config) -> str:
    """The name that clients and metrics use, known before the model is there."""
    return config.model.name or Path(config.model.path or MODEL_FILE).stem


def serve_model(config: Config, engine: Engine) -> ServedModel:
    """Raises StartupError when the chat template is broken."""
    facts = engine.facts
    bos = engine.vocabulary.special_text(facts.token_bos) if facts.add_bos else ""
    try:
        template = ChatTemplate(
            _template_source(config, facts),
            bos=engine.vocabulary.special_text(facts.token_bos),
            eos=engine.vocabulary.special_text(facts.token_eos),
        )
    except ValueError as error:
        where = config.model.chat_template or config.model.path
        raise StartupError(f"{where}: {error}") from error
    infill = _infill_tokens(engine)
    return ServedModel(model_name(config), engine, template, bos, int(clock.wall_time()), infill)


#: How families of models write what comes before a prefix, a suffix and the middle.
_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - it is written so
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)


def _infill_tokens(engine: Engine) -> tuple[int, int, int] | None:
    for texts in _INFILL:
        before, after, middle = map(engine.vocabulary.token_of, texts)
        if before is not None and after is not None and middle is not None:
            return before, after, middle
    return None


def _template_source(config: Config, facts: ModelFacts) -> str | None:
    """Blocking, for a few kilobytes at start-up; raises StartupError."""
    if config.model.chat_template is None:
        return facts.chat_template
    path = Path(config.model.chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"model.chat_template: cannot read {path}: {error}") from error


def request_params(
    request: Generation, max_tokens: int | None, choice: int, grammar: Grammar | None
) -> RequestParams:
    """``choice`` k of a seeded request gives what a single choice with seed + k gives."""
    return RequestParams(
        max_tokens=max_tokens,
        sampling=_sampling(request, choice),
        stop=request.stop,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos is True,
        tenant=request.user or request.safety_identifier or "default",
        priority=request.priority_class,
        timeout_s=request.timeout,
        logprobs=request.logprobs_wanted,
        grammar=grammar,
    )


def _sampling(request: Generation, choice: int) -> SamplingConfig:
    temperature = _given(request.temperature, 1.0)
    presence = _given(request.presence_penalty, 0.0)
    frequency = _given(request.frequency_penalty, 0.0)
    repeat = _given(request.repeat_penalty, _given(request.repetition_penalty, 1.0))
    shaped = presence != 0 or frequency != 0 or repeat != 1 or bool(request.logit_bias)
    if temperature == 0 and not shaped:
        return SamplingConfig()  # greedy, the library's quick way
    return SamplingConfig(
        enabled=True,
        seed=0 if request.seed is None else _library_seed(request.seed + choice),
        temperature=temperature,
        top_p=_given(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_given(request.min_p, 0.0),
        typical_p=_given(request.typical_p, 1.0),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repeat_penalty=repeat,
        logit_bias=request.logit_bias,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _library_seed(seed: int) -> int:
    """The library's seeds have 32 bits and its 0 means random; ours have 64 and 0 is a seed."""
    seed &= 2**64 - 1
    return (seed ^ (seed >> 32)) & _SEED_MASK or _SEED_MASK


def check_prompt_fits(engine: Engine, tokens: int) -> None:
    """For a request that generates nothing, which the engine is not asked to run."""
    if tokens > engine.context_tokens:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {engine.context_tokens} tokens; the prompt "
            f"has {tokens}, {tokens - engine.context_tokens} too many",
            prompt_tokens=tokens,
            context_tokens=engine.context_tokens,
        )


def prompt_text(engine: Engine, prompt: str | list[int]) -> str:
    """A prompt as text; raises InvalidRequest for ids that are no tokens."""
    if isinstance(prompt, str):
        return prompt
    known = range(engine.facts.n_vocab)
    for token in prompt:
        if token not in known:
            raise InvalidRequest(
                f"token {token} is outside the model's vocabulary (0 to {len(known) - 1})",
                param="prompt",
            )
    return b"".join(map(engine.vocabulary.piece, prompt)).decode("utf-8", "replace")
