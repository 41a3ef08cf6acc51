"""The loaded model as the server needs it: a name, an engine, a chat template.

Knows how a chat becomes prompt tokens and how a request becomes parameters. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from skippy_sched import clock
from skippy_sched.config import Config
from skippy_sched.default_model import MODEL_FILE
from skippy_sched.errors import ContextLengthExceeded, InvalidRequest, StartupError
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.server.chat_template import ChatTemplate
from skippy_sched.server.wire import Generation, Message

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

    async def chat_prompt(self, messages: tuple[Message, ...]) -> list[int]:
        """Tokens that ask for the next message; raises InvalidRequest."""
        if sum(len(message.content) for message in messages) > RENDER_INLINE_CHARS:
            text = await asyncio.to_thread(self.template.render, messages)
        else:
            text = self.template.render(messages)
        # Some templates write the first token themselves; the model must not see it twice.
        has_bos = bool(self.bos) and text.startswith(self.bos)
        return await self.engine.tokenize(text, add_special=not has_bos)


def model_name(config: Config) -> str:
    """The name that clients and metrics use, known before the model is there."""
    return config.model.name or Path(config.model.path or MODEL_FILE).stem


def serve_model(config: Config, engine: Engine) -> ServedModel:
    """Raises StartupError when the chat template is broken."""
    facts = engine.facts
    bos = engine.special_text(facts.token_bos) if facts.add_bos else ""
    try:
        template = ChatTemplate(
            facts.chat_template,
            bos=engine.special_text(facts.token_bos),
            eos=engine.special_text(facts.token_eos),
        )
    except ValueError as error:
        raise StartupError(f"{config.model.path}: {error}") from error
    return ServedModel(model_name(config), engine, template, bos, int(clock.wall_time()))


def request_params(request: Generation, max_tokens: int | None, choice: int) -> RequestParams:
    """``choice`` k of a seeded request gives what a single choice with seed + k gives."""
    return RequestParams(
        max_tokens=max_tokens,
        sampling=_sampling(request, choice),
        stop=request.stop,
        stop_token_ids=frozenset(request.stop_token_ids),
        ignore_eos=request.ignore_eos is True,
        tenant=request.user or "default",
        priority=request.priority_class,
        timeout_s=request.timeout,
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
    return b"".join(map(engine.piece, prompt)).decode("utf-8", "replace")
