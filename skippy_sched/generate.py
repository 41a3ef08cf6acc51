"""The generate command: one request on an engine of its own, its text to standard output."""

from __future__ import annotations

import asyncio
import sys

from rich.console import Console

from skippy_sched.config import Config
from skippy_sched.default_model import Progress, with_model_path
from skippy_sched.errors import InvalidRequest
from skippy_sched.scheduler.engine import Engine
from skippy_sched.server.exchange import encode_json
from skippy_sched.server.served_model import request_params, serve_model
from skippy_sched.server.wire import ChatRequest, CompletionRequest, parse


def generate(
    config: Config,
    prompt: str,
    *,
    is_chat: bool,
    max_tokens: int | None,
    temperature: float,
    seed: int | None,
    progress: Progress | None,
) -> int:
    """Raises SkippySchedError."""
    config = with_model_path(config, progress)
    fields: dict[str, object] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    return asyncio.run(_generate(config, prompt, is_chat, fields))


async def _generate(config: Config, prompt: str, is_chat: bool, fields: dict[str, object]) -> int:
    status = Console(stderr=True).status("loading the model") if sys.stderr.isatty() else None
    if status is not None:
        status.start()
    try:
        async with Engine.open(config) as engine:
            if status is not None:
                status.stop()
            await _write(config, engine, prompt, is_chat, fields)
    finally:
        if status is not None:
            status.stop()
    return 0


async def _write(
    config: Config, engine: Engine, prompt: str, is_chat: bool, fields: dict[str, object]
) -> None:
    """Checks what a server would check, so that the same request behaves the same there."""
    request: ChatRequest | CompletionRequest
    tokens: str | list[int] = prompt
    served = serve_model(config, engine)
    try:
        if is_chat:
            messages = [{"role": "user", "content": prompt}]
            request = parse(ChatRequest, encode_json({"messages": messages, **fields}).encode())
            tokens = await served.chat_prompt(request)
        else:
            request = parse(CompletionRequest, encode_json({"prompt": prompt, **fields}).encode())
    except UnicodeEncodeError:
        raise InvalidRequest("the prompt is not valid UTF-8", param="prompt") from None
    params = request_params(request, request.max_tokens, 0, await served.grammar(request))
    async for event in engine.generate(tokens, params):
        sys.stdout.write(event.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
