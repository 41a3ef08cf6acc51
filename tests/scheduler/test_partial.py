"""A batch that ran one entry at a time and stopped part way: exact for every failure point.

Two stages of a simulated recurrent model: the exporting one may not batch, so its entries run
one at a time, and a failure at entry i leaves the entries before it advanced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from skippy_sched.config import SpeculationSection
from skippy_sched.errors import EngineFailure
from skippy_sched.native import Library, Model, ModelOptions, find_library
from skippy_sched.scheduler.core import Scheduler
from skippy_sched.scheduler.grammar import grammars_of
from skippy_sched.scheduler.iteration import OpenSession, SettleVerify
from skippy_sched.scheduler.request import Request, RequestParams, Status
from skippy_sched.scheduler.runner import ModelRunner
from skippy_sched.scheduler.speculation import Speculation
from skippy_sched.scheduler.state import Limits
from tests.conftest import SimModel

LANES = 8
CUT = "c" * 64


@contextmanager
def two_stages(sim_model: SimModel, faults_of_first: list[str]) -> Iterator[ModelRunner]:
    library = Library.load(find_library("sim"))

    def stage(start: int, end: int, faults: list[str]) -> Model:
        return Model.open(
            library,
            sim_model(recurrent=True, fault=faults),
            ModelOptions(
                ctx_size=128,
                lanes=LANES,
                n_batch=64,
                n_ubatch=64,
                stage_index=int(start > 0),
                layer_start=start,
                layer_end=end,
                resident_tensor_names=("blk",),
                import_identities=(CUT,) if start else (),
                export_identities=() if start else (CUT,),
            ),
        )

    runner = ModelRunner(stage(0, 2, faults_of_first), stage(2, 4, []))
    try:
        yield runner
    finally:
        runner.close()


def run(
    runner: ModelRunner,
    prompts: list[list[int]],
    max_tokens: int,
    speculation: Speculation | None = None,
    **fields: Any,
) -> list[Request]:
    """Drive the scheduler over the stages until all has ended; invariants after each step.

    ``fields`` are those of the requests' parameters.
    """
    limits = Limits(
        lanes=LANES,
        batch_tokens=64,
        context_tokens=128,
        chunk_tokens=64,
        waiting_requests=100,
        waiting_tokens=10_000,
    )
    scheduler = Scheduler(limits, speculation=speculation)
    requests = []
    for key, prompt in enumerate(prompts):
        params = RequestParams(max_tokens=max_tokens, **fields)
        requests.append(
            Request(
                key=key,
                name=str(key),
                prompt=list(prompt),
                token_limit=len(prompt) + max_tokens,
                params=params,
                sampling=params.sampling,
                stop_tokens=frozenset(),
                arrived_at=0.0,
            )
        )
        scheduler.submit(requests[-1])
    for _ in range(200):
        iteration = scheduler.next_iteration(0.0)
        if iteration is None:
            break
        opened = {c.key for c in iteration.commands if isinstance(c, OpenSession)}
        outcome = runner.execute(iteration)
        scheduler.on_outcome(outcome, 0.0)
        scheduler.state.check()
        ahead = {c.key for c in scheduler.state.commands if isinstance(c, SettleVerify)}
        for request in requests:
            if request.key in ahead:  # to be cut back to what was accepted
                continue
            if request.status in (Status.PREFILL, Status.DECODE) or request.key in opened:
                for session in runner.sessions(request.key):
                    assert session.position == session.token_count
                    assert request.status.is_final or session.position == request.computed
    assert all(request.status.is_final for request in requests)
    assert scheduler.state.totals.partial_batches == outcome_partials(requests)
    return requests


def outcome_partials(requests: list[Request]) -> int:
    return sum(1 for request in requests if request.status is Status.FAILED)


PROMPTS = [[n + 1, n + 2, n + 3] for n in range(LANES)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("entry", range(LANES))
def test_only_the_request_at_the_failure_point_fails(
    sim_model: SimModel, entry: int, when: str
) -> None:
    with two_stages(sim_model, []) as runner:
        clean = run(runner, PROMPTS, 6)
    # The third iteration decodes all eight: call 2 * 8 + entry of the decode calls.
    fault = f"call=decode nth={LANES + entry + 1} status=RUNTIME_ERROR when={when}"
    with two_stages(sim_model, [fault]) as runner:
        requests = run(runner, PROMPTS, 6)
    for index, (request, expected) in enumerate(zip(requests, clean, strict=True)):
        if index == entry:
            assert isinstance(request.error, EngineFailure)
            assert "RuntimeError" in str(request.error)
            assert request.completion_tokens == 2
        else:
            assert request.status is Status.FINISHED
            assert request.tokens == expected.tokens


def test_a_whole_model_in_two_stages_gives_the_whole_models_text(sim_model: SimModel) -> None:
    library = Library.load(find_library("sim"))
    options = ModelOptions(ctx_size=128, lanes=LANES, n_batch=64, n_ubatch=64)
    runner = ModelRunner(Model.open(library, sim_model(), options))
    try:
        whole = run(runner, PROMPTS, 6)
    finally:
        runner.close()
    with two_stages(sim_model, []) as staged:
        split = run(staged, PROMPTS, 6)
    assert [r.tokens for r in split] == [r.tokens for r in whole]


def test_the_last_stage_scores_prompts_and_holds_answers(sim_model: SimModel) -> None:
    """As a whole model does, also beside a request that fails on the first stage."""
    library = Library.load(find_library("sim"))
    options = ModelOptions(ctx_size=128, lanes=LANES, n_batch=64, n_ubatch=64)
    wishes = {"logprobs": 2, "prompt_logprobs": True}
    with Model.open(library, sim_model(), options) as model:
        runner = ModelRunner(model)
        schema = {"type": "array", "items": {"enum": [1, 22]}, "minItems": 6}
        grammar = grammars_of(model).compile_schema(schema)
        whole = run(runner, PROMPTS, 6, grammar=grammar, **wishes)
    with two_stages(sim_model, ["call=decode lane=3 nth=4 status=RUNTIME_ERROR"]) as staged:
        split = run(staged, PROMPTS, 6, grammar=grammar, **wishes)
    for index, (got, expected) in enumerate(zip(split, whole, strict=True)):
        assert expected.tokens[3:][0] == ord("[")
        if index == 3:
            assert isinstance(got.error, EngineFailure)
            continue
        assert got.tokens == expected.tokens
        assert got.prompt_logprobs == expected.prompt_logprobs
        assert len(got.prompt_logprobs) == 2


@pytest.mark.parametrize("entry", [None, 0, 3])
def test_verifies_pass_both_stages_and_a_batch_that_stops_leaves_them_alone(
    sim_model: SimModel, entry: int | None
) -> None:
    """Half of the requests have drafts; one of the others fails."""
    scripts = [[258, *[n + 10, n + 11, n + 12] * 3, n, n + 10, n + 11, 259] for n in range(4)]
    prompts = [*PROMPTS[:4], *scripts]
    drafts = Speculation(SpeculationSection(method="ngram", requests_max=LANES))
    with two_stages(sim_model, []) as runner:
        without = run(runner, prompts, 12)
    faults = [] if entry is None else [f"call=decode lane={entry} nth=3 status=RUNTIME_ERROR"]
    with two_stages(sim_model, faults) as runner:
        requests = run(runner, prompts, 12, drafts)
    for index, (request, expected) in enumerate(zip(requests, without, strict=True)):
        if index == entry:
            assert isinstance(request.error, EngineFailure)
        else:
            assert request.tokens == expected.tokens
    for request in requests[4:]:
        assert request.usage.accepted_draft_tokens > 0
        assert request.usage.rejected_draft_tokens > 0
