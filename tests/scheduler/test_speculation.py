"""Drafts: the same texts and counts as without, fewer iterations, and only one request at fault."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.config import Config
from skippy_sched.errors import EngineFailure, StartupError
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.iteration import (
    Chunk,
    Fate,
    Iteration,
    OpenSession,
    SettleVerify,
    SwapOut,
    Verify,
)
from skippy_sched.scheduler.journal import read_journal
from skippy_sched.scheduler.loading import open_models
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.scheduler.runner import ModelRunner
from skippy_sched.scheduler.speculation import NgramHistory
from skippy_sched.simulate.driver import open_engine
from skippy_sched.simulate.replay import Replay

from .conftest import Answer, answer, assert_books_balance

MakeConfig = Callable[..., Config]

NGRAM = {"method": "ngram", "requests_max": 4}
MTP = {"method": "mtp", "requests_max": 4}
#: Of the simulated model: heads that are wrong now and then.
HEADS = {"mtp_heads": 3, "mtp_wrong_every": 5}
METHODS = pytest.mark.parametrize("speculation", [NGRAM, MTP], ids=["ngram", "mtp"])
SCRIPT, END = 258, 259
#: Its answer has a stop string in the middle.
STOPPING = [SCRIPT, *b"abcdefgh" * 2, *b"-TOKENS-", 260, *b"abcdefgh" * 3, END]


def scripted(seed: int, length: int = 60) -> list[int]:
    """A prompt whose answer repeats parts of itself in random order."""
    rng = random.Random(seed)
    parts = [[rng.randrange(97, 123) for _ in range(rng.randrange(2, 6))] for _ in range(4)]
    text: list[int] = []
    while len(text) < length:
        text += rng.choice(parts)
    return [SCRIPT, *text, END]


def drafted(answers: list[Answer]) -> tuple[int, int]:
    """Accepted and rejected draft tokens."""
    usages = [got.usage for got in answers if got.usage is not None]
    return (
        sum(usage.accepted_draft_tokens for usage in usages),
        sum(usage.rejected_draft_tokens for usage in usages),
    )


async def serve(
    config: Config, requests: list[tuple[list[int], RequestParams]], *, together: bool = True
) -> tuple[list[Answer], int]:
    """The answers, and the iterations that they took."""
    async with Engine.open(config, seed=1) as engine:
        if together:
            got = list(await asyncio.gather(*(answer(engine, *one) for one in requests)))
        else:
            got = [await answer(engine, *one) for one in requests]
        assert_books_balance(engine)
        now = engine.statistics()
        accepted, rejected = drafted(got)
        assert (now.accepted_tokens, now.drafted_tokens) == (accepted, accepted + rejected)
        assert now.generated_tokens == sum(len(one.tokens) for one in got)
    return got, now.iterations


def assert_same(got: list[Answer], expected: list[Answer]) -> None:
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    assert [one.text for one in got] == [one.text for one in expected]
    assert [one.finish_reason for one in got] == [one.finish_reason for one in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.usage is not None
        same = replace(one.usage, accepted_draft_tokens=0, rejected_draft_tokens=0)
        assert same == other.usage


# --- drafts -----------------------------------------------------------------------------------


def test_a_draft_is_what_followed_the_longest_then_latest_match() -> None:
    assert NgramHistory().draft([7, 8, 1, 7, 8, 2, 7, 8], 1) == [2]
    assert NgramHistory().draft([6, 7, 8, 1, 5, 7, 8, 2, 6, 7, 8], 3) == [1, 5, 7]


def test_a_repetition_is_drafted_beyond_its_end() -> None:
    assert NgramHistory().draft([9, 1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2, 3], [3, 1, 5, 1]])
def test_without_two_tokens_that_came_before_there_is_no_draft(tokens: list[int]) -> None:
    assert NgramHistory().draft(tokens, 4) == []


def test_bytes_that_match_across_tokens_are_no_match() -> None:
    shifted = [0x01000000, 0x02000000, 0x03000000]  # 1, 2 begin three bytes into it
    assert NgramHistory().draft([*shifted, 9, 1, 2], 4) == []
    assert NgramHistory().draft([1, 2, 9, *shifted, 1, 2], 1) == [9]


def test_a_history_that_grew_drafts_as_one_that_is_new() -> None:
    rng, grown = random.Random(3), NgramHistory()
    tokens: list[int] = []
    for _ in range(200):
        tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        assert grown.draft(tokens, 5) == NgramHistory().draft(tokens, 5)


# --- texts ------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("together", [True, False])
async def test_texts_are_those_without_drafts_in_fewer_iterations(
    sim_config: MakeConfig, speculation: dict[str, Any], together: bool
) -> None:
    sampling = SamplingConfig(enabled=True, temperature=0.8, seed=5)
    sampled = RequestParams(max_tokens=30, sampling=sampling, ignore_eos=True)
    requests = [(scripted(seed), RequestParams(max_tokens=80)) for seed in range(3)]
    requests.append(([1, 2, 3], sampled))
    without, iterations = await serve(sim_config(HEADS), requests, together=together)
    with_, fewer = await serve(
        sim_config(HEADS, speculation=speculation), requests, together=together
    )
    assert_same(with_, without)
    accepted, rejected = drafted(with_)
    assert accepted > 20
    assert rejected > 0
    assert fewer < iterations


@METHODS
async def test_sampled_texts_keep_their_distribution(
    sim_config: MakeConfig, speculation: dict[str, Any]
) -> None:
    """Two sampled tokens of 1,600 seeds, each with a draft for the second: 64 equal chances."""
    words = range(260, 268)
    prompt = [token for word in words for token in (260, word, 267 - word % 8)] + [260]
    config = sim_config(
        engine={"lanes": 8}, speculation={**speculation, "draft_tokens": 1, "requests_max": 8}
    )
    pairs: Counter[tuple[int, ...]] = Counter()
    wrong = {"mtp_heads": 1, "mtp_wrong_every": 1}
    with open_engine(config, {}, words_only="true", vocab=268, **wrong) as engine:
        for seed in range(1, 1601):
            sampling = SamplingConfig(enabled=True, temperature=1.0, seed=seed)
            params = RequestParams(max_tokens=4, ignore_eos=True, sampling=sampling)
            request = engine.intake.request(list(prompt), params, None, 0.0)
            engine.scheduler.submit(request)
            while not request.status.is_final:
                engine.step()
            pairs[tuple(request.tokens[len(prompt) + 1 : len(prompt) + 3])] += 1
        totals = engine.scheduler.state.totals
    assert totals.drafted_tokens >= 1600
    expected = 1600 / 64
    assert sum(pairs.values()) == 1600
    chi_squared = sum((pairs[a, b] - expected) ** 2 / expected for a in words for b in words)
    assert chi_squared < 103.4  # 63 degrees of freedom exceed this once in a thousand times


@METHODS
@pytest.mark.parametrize(
    ("ends", "length"),
    [
        ({"max_tokens": 23}, 23),
        ({"stop_token_ids": frozenset((SCRIPT + 2,))}, 25),
        ({"stop": ("TOKENS",)}, 23),
        ({"max_tokens": 24, "stop": ("TOKENS",)}, 23),
    ],
    ids=["limit", "token", "string", "both"],
)
async def test_an_end_within_an_accepted_draft_ends_the_request_there(
    sim_config: MakeConfig, speculation: dict[str, Any], ends: dict[str, Any], length: int
) -> None:
    """By its limit, an end token, or a stop string: what was accepted behind it never counts."""
    params = RequestParams(**{"max_tokens": 100, "stop_token_ids": frozenset(), **ends})
    heads = {"mtp_heads": 8}
    without, _ = await serve(sim_config(heads), [(STOPPING, params)])
    assert len(without[0].tokens) == length
    for draft_tokens in range(1, 9):  # the end is now here, now there in a draft
        config = sim_config(heads, speculation={**speculation, "draft_tokens": draft_tokens})
        with_, _ = await serve(config, [(STOPPING, params)])
        assert_same(with_, without)
        assert drafted(with_)[0] > 8


# --- when, and what it may take ---------------------------------------------------------------


async def test_drafts_are_off_by_default_and_when_more_requests_run(
    sim_config: MakeConfig,
) -> None:
    # They begin together and end together.
    requests = [(scripted(seed, 30), RequestParams(max_tokens=30)) for seed in range(4)]
    together = {"batch_tokens": 256}
    by_default, _ = await serve(sim_config(engine=together), requests)
    assert drafted(by_default) == (0, 0)
    for requests_max in (3, 4):
        few = {**NGRAM, "requests_max": requests_max}
        many, _ = await serve(sim_config(engine=together, speculation=few), requests)
        assert (drafted(many) == (0, 0)) == (requests_max == 3)
        assert_same(many, by_default)


async def test_drafts_take_only_cells_that_nobody_else_needs(sim_config: MakeConfig) -> None:
    """With a pool of little more than one request's cells: as many preemptions as without."""
    engine = {"kv": "shared", "pool_tokens": 16 * 16, "context_tokens": 200}
    requests = [(scripted(seed, 70), RequestParams(max_tokens=71)) for seed in range(4)]
    config = sim_config({"pool_cells": 210}, engine=engine, speculation=NGRAM)
    without, _ = await serve(sim_config({"pool_cells": 210}, engine=engine), requests)
    with_, _ = await serve(config, requests)
    assert_same(with_, without)
    assert drafted(with_)[0] > 0


async def test_a_consumer_that_does_not_read_is_ahead_by_tokens_not_by_events(
    sim_config: MakeConfig,
) -> None:
    config = sim_config(
        {"mtp_heads": 8},
        scheduler={"stream_buffer_tokens": 4},
        speculation={**MTP, "draft_tokens": 8},
    )
    async with Engine.open(config) as engine:
        params = RequestParams(max_tokens=200, ignore_eos=True)
        async with await engine.submit([1, 2, 3], params) as stream:
            while not stream.request.paused:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            # The buffer, the run that filled it, and the one that was under way by then.
            assert 4 <= engine.statistics().generated_tokens <= 4 + 9 + 9
            assert len([event async for event in stream]) < 200


def test_a_tenant_is_charged_for_what_was_computed_wrong_drafts_too(
    sim_config: MakeConfig,
) -> None:
    prompt = scripted(4)
    with open_engine(sim_config(speculation=NGRAM), {}) as engine:
        params = RequestParams(max_tokens=60, tenant="one")
        engine.scheduler.submit(engine.intake.request(list(prompt), params, None, 0.0))
        state = engine.scheduler.state
        while state.live:
            totals = state.totals
            rows = totals.prefill_tokens + totals.decode_rows + totals.drafted_tokens
            assert state.share.served["one"] == rows
            engine.step()
        assert state.totals.drafted_tokens > state.totals.accepted_tokens > 0


async def test_a_recurrent_model_goes_back_to_its_checkpoints(sim_config: MakeConfig) -> None:
    """More verifies than checkpoints can be held: each is retired or cut back to."""
    model = {"recurrent": True, "mtp_heads": 2, "mtp_wrong_every": 3}
    requests = [([1, 2, 3], RequestParams(max_tokens=300, ignore_eos=True))]
    without, _ = await serve(sim_config(model), requests)
    with_, iterations = await serve(sim_config(model, speculation=MTP), requests)
    assert_same(with_, without)
    accepted, rejected = drafted(with_)
    assert accepted > 0
    assert rejected > 0
    assert iterations > 64


@pytest.mark.parametrize(
    ("method", "feature"), [("mtp", "NATIVE_MTP_N1"), ("ngram", None), ("off", None)]
)
def test_a_library_that_cannot_draft_is_refused_with_what_it_lacks(
    sim_config: MakeConfig, method: str, feature: str | None
) -> None:
    config = sim_config(engine={"library": "llama"}, speculation={"method": method})
    with pytest.raises(StartupError) as refused:  # the model is none of llama's in any case
        open_models(config)
    assert ("speculation.method" in str(refused.value)) == (feature is not None)
    if feature is not None:
        assert f"does not offer {feature}; use a library with native drafts" in str(refused.value)


# --- faults -----------------------------------------------------------------------------------

MARK = 200


@pytest.mark.parametrize(
    "fault",
    [
        "status=RUNTIME_ERROR when=before",
        "status=RUNTIME_ERROR when=after",
        "status=RUNTIME_ERROR when=middle",
        "status=INVALID_ARGUMENT",
        "effect=no_error_object",
        "effect=wrong_count",
        "effect=token_out_of_range",
        "effect=position_off_by_one",
        "effect=silent_drop",
    ],
)
async def test_a_failing_verify_fails_its_own_request_alone(
    sim_config: MakeConfig, fault: str
) -> None:
    guilty = [SCRIPT, *[*b"abcd"] * 4, MARK, *[*b"abcd"] * 4, END]
    requests = [(scripted(1), RequestParams(max_tokens=61)), (guilty, RequestParams(max_tokens=35))]
    without, _ = await serve(sim_config(), requests)
    rule = f"call=verify token={MARK} {fault} count=0"
    config = sim_config({"fault": rule}, speculation={**NGRAM, "draft_tokens": 8})
    got, _ = await serve_with_failures(config, requests)
    assert got[0].tokens == without[0].tokens
    assert isinstance(got[1].error, EngineFailure)
    assert got[1].tokens == without[1].tokens[: len(got[1].tokens)]


async def test_a_verify_that_answers_too_little_is_a_fault(sim_config: MakeConfig) -> None:
    rule = "call=verify effect=fewer_samples count=0"
    config = sim_config({"fault": rule, "mtp_heads": 2}, speculation=MTP)
    got, _ = await serve_with_failures(config, [([1, 2], RequestParams(max_tokens=9))])
    assert isinstance(got[0].error, EngineFailure)
    assert "none of them differs from the draft" in str(got[0].error)


@pytest.mark.parametrize("when", ["before", "after", "middle"])
@pytest.mark.parametrize("call", ["trim", "retire"])
async def test_a_session_that_cannot_be_cut_back_is_computed_again(
    sim_config: MakeConfig, call: str, when: str
) -> None:
    model = {**HEADS, "recurrent": True}
    requests = [([9, 8, 7], RequestParams(max_tokens=60, ignore_eos=True))]
    without, _ = await serve(sim_config(model), requests)
    rule = f"call={call} status=RUNTIME_ERROR when={when} nth=2 count=2"
    async with Engine.open(sim_config({**model, "fault": rule}, speculation=MTP)) as engine:
        got = await answer(engine, *requests[0])
        assert engine.statistics().recomputed_tokens > 0
        assert_books_balance(engine)
    assert_same([got], without)


def test_a_session_that_was_not_cut_back_is_never_swapped_out(sim_config: MakeConfig) -> None:
    """Its state would be of tokens that were rejected; so it is computed again."""
    config = sim_config({"fault": "call=trim status=RUNTIME_ERROR"})
    runner = ModelRunner(*open_models(config))
    try:
        greedy = SamplingConfig()
        chunk = Chunk(7, 0, [1, 2, 3], True)
        runner.execute(Iteration(1, [OpenSession(7, greedy)], [], [], [chunk]))
        runner.execute(Iteration(2, [], [], [], [], [Verify(7, [4, 5, 6])]))
        failed = runner.execute(Iteration(3, [SettleVerify(7, 3, 3, 1), SwapOut(7)], [], [], []))
        assert failed.faults[7].fate is Fate.LOST
        back = runner.execute(Iteration(4, [OpenSession(7, greedy, swapped=True)], [], [], []))
        assert back.faults[7].fate is Fate.LOST
        assert "could not be swapped out" in str(back.faults[7].error)
    finally:
        runner.close()


async def serve_with_failures(
    config: Config, requests: list[tuple[list[int], RequestParams]]
) -> tuple[list[Answer], int]:
    async with Engine.open(config, seed=1) as engine:
        got = list(await asyncio.gather(*(answer(engine, *one) for one in requests)))
        assert_books_balance(engine)
        return got, engine.statistics().drafted_tokens


# --- replay -----------------------------------------------------------------------------------


@METHODS
async def test_a_run_with_drafts_is_decided_again_in_the_same_way(
    sim_config: MakeConfig, tmp_path: Path, speculation: dict[str, Any]
) -> None:
    path = tmp_path / "run.journal"
    config = sim_config(
        {"mtp_heads": 8},
        scheduler={"journal": str(path)},
        speculation={**speculation, "draft_tokens": 8},
    )
    params = RequestParams(max_tokens=70, stop=("TOKENS",))
    prompts = [STOPPING, *(scripted(seed) for seed in range(7))]
    got, _ = await serve(config, [(prompt, params) for prompt in prompts])
    behind = [record["behind"] for _, record in read_journal(path) if record["is"] == "stop"]
    assert max(behind) > 0
    replay = Replay(path)
    totals = replay.run().state.totals
    assert (totals.accepted_tokens, totals.drafted_tokens) == (
        drafted(got)[0],
        sum(drafted(got)),
    )
    assert totals.drafted_tokens > 0
    assert totals.generated_tokens == sum(len(one.tokens) for one in got)
