"""Makes a request out of what a client sent, or says exactly why not.

Knows the model's bounds. Nothing that fails here has touched a queue or the engine.
"""

from __future__ import annotations

import random
from dataclasses import replace

from skippy_sched.errors import ContextLengthExceeded, InvalidRequest
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.request import Request, RequestParams


class Intake:
    """``context_tokens`` bounds prompt and completion together."""

    def __init__(
        self, n_vocab: int, context_tokens: int, end_tokens: frozenset[int], rng: random.Random
    ) -> None:
        self._n_vocab = n_vocab
        self._context_tokens = context_tokens
        self._end_tokens = end_tokens
        self._rng = rng
        self._next_key = 1
        self._sound_sampling: SamplingConfig | None = None

    def request(
        self, tokens: list[int], params: RequestParams, name: str | None, now: float
    ) -> Request:
        """Raises InvalidRequest or ContextLengthExceeded."""
        self._check_tokens(tokens)
        self._check_params(params)
        limit = self._token_limit(len(tokens), params.max_tokens)
        key = self._next_key
        self._next_key += 1
        stop_tokens = self._end_tokens
        if params.ignore_eos:
            stop_tokens = params.stop_token_ids
        elif params.stop_token_ids:
            stop_tokens |= params.stop_token_ids
        return Request(
            key=key,
            name=name or f"request-{key}",
            prompt=tokens,
            token_limit=limit,
            params=params,
            sampling=self._seeded(params.sampling),
            stop_tokens=stop_tokens,
            arrived_at=now,
        )

    def _check_tokens(self, tokens: list[int]) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
        if min(tokens) >= 0 and max(tokens) < self._n_vocab:
            return
        index, token = next(
            (index, token) for index, token in enumerate(tokens) if not 0 <= token < self._n_vocab
        )
        raise InvalidRequest(
            f"prompt token {token} at index {index} is outside the model's vocabulary "
            f"(0 to {self._n_vocab - 1})",
            param="prompt",
        )

    def _check_params(self, params: RequestParams) -> None:
        if "" in params.stop:
            raise InvalidRequest("a stop string is empty; leave it out", param="stop")
        for token, _ in params.sampling.logit_bias:
            if not 0 <= token < self._n_vocab:
                raise InvalidRequest(
                    f"token {token} is outside the model's vocabulary (0 to {self._n_vocab - 1})",
                    param="logit_bias",
                )
        if params.grammar is not None and params.ignore_eos:
            raise InvalidRequest(
                "ignore_eos = true and a grammar contradict each other: an answer that is complete "
                "has to end; send one of them",
                param="ignore_eos",
            )
        if params.prompt_logprobs and params.logprobs is None:
            raise InvalidRequest("prompt_logprobs needs logprobs", param="logprobs")
        if params.logprobs is not None and not 0 <= params.logprobs <= self._n_vocab:
            raise InvalidRequest(
                f"logprobs is {params.logprobs}, not a count of tokens (0 to {self._n_vocab})",
                param="logprobs",
            )
        if params.timeout_s is not None and not params.timeout_s > 0:
            raise InvalidRequest(f"timeout is {params.timeout_s} s, not above 0", param="timeout")
        if params.sampling is self._sound_sampling:
            return  # many requests share their settings
        try:
            params.sampling.validate()
        except ValueError as error:
            raise InvalidRequest(str(error)) from error
        self._sound_sampling = params.sampling

    def _token_limit(self, prompt_tokens: int, max_tokens: int | None) -> int:
        context = self._context_tokens
        if max_tokens is not None and max_tokens < 1:
            raise InvalidRequest(f"max_tokens is {max_tokens}, below 1", param="max_tokens")
        # Clients know this refusal by its first words.
        known = f"this model's maximum context length is {context} tokens"
        if prompt_tokens >= context:
            problem = (
                f"{known}; the prompt has {prompt_tokens} tokens and at least one is generated: "
                f"shorten it by {prompt_tokens - context + 1}"
            )
        elif max_tokens is not None and prompt_tokens + max_tokens > context:
            total = prompt_tokens + max_tokens
            problem = (
                f"{known}; the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: "
                f"together {total}, {total - context} too many; "
                "shorten the prompt or lower max_tokens"
            )
        else:
            return context if max_tokens is None else prompt_tokens + max_tokens
        raise ContextLengthExceeded(problem, prompt_tokens=prompt_tokens, context_tokens=context)

    def _seeded(self, sampling: SamplingConfig) -> SamplingConfig:
        """A sampled request always has a seed, so that it can be told and repeated."""
        if sampling.enabled and sampling.seed == 0:
            return replace(sampling, seed=self._rng.randrange(1, 2**32))
        return sampling
