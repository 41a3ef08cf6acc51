"""What each route does, given an exchange and the served model.

Knows OpenAI's endpoints. Does not know routing, keys or how errors are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skippy_sched.errors import InvalidRequest
from skippy_sched.scheduler.request import Usage
from skippy_sched.server.exchange import Exchange
from skippy_sched.server.generation import Generation, Order
from skippy_sched.server.problems import ModelNotFound
from skippy_sched.server.replies import DONE, ChatFormat, Choice, CompletionFormat, Format, Head
from skippy_sched.server.served_model import (
    ServedModel,
    check_prompt_fits,
    prompt_text,
    request_params,
)
from skippy_sched.server.wire import ChatRequest, CompletionRequest
from skippy_sched.server.wire import Generation as GenerationRequest

#: That of version 00 has 55; what is longer is no such header.
TRACE_PARENT_CHARS = 100


async def completions(
    exchange: Exchange, served: ServedModel, request: CompletionRequest, head: Head, idle_s: float
) -> None:
    form = CompletionFormat(head, request.include_usage, request.logprobs_wanted is not None)
    scores_prompt = request.echo is True and request.logprobs is not None
    if request.max_tokens == 0 and not scores_prompt:
        await _no_tokens(exchange, served, request, form)
        return
    best = None
    if request.candidates > request.choices_per_prompt:
        best = request.choices_per_prompt, request.candidates
    drops_answer = request.max_tokens == 0
    grammar = await served.grammar(request)
    orders: list[Order] = []
    for prompt in request.prompt:
        echo = prompt_text(served.engine, prompt) if request.echo else ""
        if request.suffix:
            prompt = await served.infill_prompt(prompt, request.suffix)
        for k in range(request.candidates):
            params = request_params(request, 1 if drops_answer else request.max_tokens, k, grammar)
            if best is not None:
                params = replace(params, logprobs=request.logprobs or 0)
            if scores_prompt:
                params = replace(params, prompt_logprobs=True)
            orders.append(Order(prompt, params, echo, k == 0, drops_answer))
    await _generate(exchange, served, request, form, orders, idle_s, best)


async def chat_completions(
    exchange: Exchange, served: ServedModel, request: ChatRequest, head: Head, idle_s: float
) -> None:
    served.check_tools(request)
    form = ChatFormat(
        head,
        request.include_usage,
        request.logprobs_wanted is not None,
        reads_calls=bool(request.tools_offered),
    )
    grammar = await served.grammar(request)
    prompt = await served.chat_prompt(request)
    orders = [
        Order(
            prompt, request_params(request, request.token_limit, k, grammar), counts_prompt=k == 0
        )
        for k in range(request.choices_per_prompt)
    ]
    await _generate(exchange, served, request, form, orders, idle_s)


async def embeddings(exchange: Exchange) -> None:
    raise InvalidRequest(
        "this server makes no embeddings: the native interface to its model has no call for them; "
        "send them to a server with an embedding model",
        param="model",
    )


async def models(exchange: Exchange, served: ServedModel) -> None:
    await exchange.answer_json(200, {"object": "list", "data": [_card(served)]})


async def model(exchange: Exchange, served: ServedModel, name: str) -> None:
    check_model(served, name)
    await exchange.answer_json(200, _card(served))


def check_model(served: ServedModel, name: str | None) -> None:
    """No name means the model that is there."""
    if name is not None and name != served.name:
        raise ModelNotFound(
            f"there is no model {name[:80]!r}; this server has {served.name!r}", param="model"
        )


def _card(served: ServedModel) -> dict[str, object]:
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "skippy-sched",
        "max_model_len": served.engine.context_tokens,
    }


async def _generate(
    exchange: Exchange,
    served: ServedModel,
    request: GenerationRequest,
    form: Format,
    orders: Sequence[Order],
    idle_s: float,
    best: tuple[int, int] | None = None,
) -> None:
    if (parent := exchange.header(b"traceparent")) is not None:
        orders = [
            replace(order, params=replace(order.params, trace_parent=parent[:TRACE_PARENT_CHARS]))
            for order in orders
        ]
    async with Generation.submitted(served.engine, orders, form.head.id) as generation:
        exchange.charge(generation.prompt_tokens)
        try:
            if request.stream:
                await generation.stream(exchange, form, idle_s)
            else:
                await generation.answer(exchange, form, idle_s, best)
        finally:
            exchange.charge(generation.generated_tokens)


async def _no_tokens(
    exchange: Exchange, served: ServedModel, request: CompletionRequest, form: Format
) -> None:
    """max_tokens = 0: the prompt is checked and counted, and nothing is generated."""
    choices = []
    prompt_tokens = 0
    for prompt in request.prompt:
        text = prompt_text(served.engine, prompt)
        tokens = (
            await served.engine.vocabulary.tokenize(prompt) if isinstance(prompt, str) else prompt
        )
        check_prompt_fits(served.engine, len(tokens))
        prompt_tokens += len(tokens)
        echo = text if request.echo else ""
        choices += [Choice(echo, "length") for _ in range(request.choices_per_prompt)]
    usage = Usage(prompt_tokens, 0)
    exchange.charge(prompt_tokens)
    if not request.stream:
        await exchange.answer_json(200, form.whole(choices, usage))
        return
    form.prepare_stream(len(choices))
    events = []
    for index, choice in enumerate(choices):
        if choice.text:
            events.append(form.delta(index, choice.text))
        events.append(form.finish(index, choice))
    if form.include_usage:
        events.append(form.usage_event(usage))
    await exchange.write("".join(events).encode() + DONE)
    await exchange.end()
