"""What a request gets when it has the engine to itself: the measure for what it gets in company."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skippy_sched.config import Config
from skippy_sched.native import Library, Model, ModelOptions, find_library
from skippy_sched.scheduler.grammar import grammars_of
from skippy_sched.scheduler.request import Request, TokenLogprobs


@contextmanager
def alone(path: Path, config: Config) -> Iterator[Model]:
    """The same model, faultless, with room for one request."""
    library = Library.load(find_library(config.engine.library))
    context = config.engine.context_tokens
    with Model.open(library, path, ModelOptions(ctx_size=context, n_batch=context)) as model:
        yield model


def continue_alone(
    model: Model, prompt: Sequence[int], request: Request, tokens: int
) -> tuple[list[int], list[TokenLogprobs], list[TokenLogprobs]]:
    """The request's text when it has the engine to itself; the log-probabilities of its prompt,
    and those of the text, if they were asked for."""
    params = request.params
    of_prompt: list[TokenLogprobs] = []
    of_text: list[TokenLogprobs] = []
    guide = None
    if params.grammar is not None:
        guide = grammars_of(model).guide(params.grammar, 0, ())
    text: list[int] = []
    with model.create_session() as session:

        def tell(token: int, to: list[TokenLogprobs]) -> None:
            if params.logprobs is not None and (told := session.logprobs(token, params.logprobs)):
                to.append(TokenLogprobs(token, told[0], tuple(told[1])))

        ahead = prompt[:-1] if params.prompt_logprobs else ()
        for token, following in zip(ahead, prompt[1:], strict=False):
            session.decode_step_sampled(token, request.sampling)
            tell(following, of_prompt)
        new = prompt[len(ahead) :]
        while len(text) < tokens:
            if guide is not None:
                session.set_mask(guide.mask())
            token, _ = session.prefill_chunk_frame_sampled(new, request.sampling)
            tell(token, of_text)
            text.append(token)
            new = [token]
            if token in request.stop_tokens:
                break
            if guide is not None:
                guide.advance(len(text) - 1, new)
    return text, of_prompt, of_text
