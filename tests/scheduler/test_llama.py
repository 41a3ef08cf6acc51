"""The engine on a real model: in deterministic mode company never changes a text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.config import Config
from skippy_sched.errors import StartupError
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams

from .conftest import answer, assert_books_balance

pytestmark = pytest.mark.llama

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "My favourite colour is blue, because",
    "1, 2, 3, 4,",
    "The quick brown fox",
    "In the year 1969, " * 12,
]
MakeConfig = Callable[..., Config]


@pytest.fixture
def llama_config(default_model: Path) -> MakeConfig:
    def make(**engine: Any) -> Config:
        settings = {"lanes": 8, "context_tokens": 256, "threads": 1, **engine}
        return Config.model_validate({"model": {"path": str(default_model)}, "engine": settings})

    return make


@pytest.mark.timeout(240)
async def test_deterministic_mode_gives_every_text_as_if_alone(llama_config: MakeConfig) -> None:
    greedy = RequestParams(max_tokens=32, ignore_eos=True)
    sampling = SamplingConfig(enabled=True, temperature=0.8, top_k=40, seed=42)
    sampled = RequestParams(max_tokens=16, ignore_eos=True, sampling=sampling)
    requests = [(prompt, greedy) for prompt in PROMPTS] + [(PROMPTS[0], sampled)]
    async with Engine.open(llama_config(deterministic=True)) as engine:
        alone = [await answer(engine, prompt, params) for prompt, params in requests]
        together = await asyncio.gather(*(answer(engine, *request) for request in requests))
        assert [a.tokens for a in together] == [a.tokens for a in alone]
        assert alone[0].text.startswith(" Paris")
        assert alone[0].tokens[:16] != alone[-1].tokens
        assert_books_balance(engine)
    async with Engine.open(llama_config(deterministic=True, batch_tokens=16)) as engine:
        chunked = await asyncio.gather(*(answer(engine, *request) for request in requests))
        assert [a.tokens for a in chunked] == [a.tokens for a in alone]


async def test_deterministic_mode_is_refused_where_it_cannot_hold(
    llama_config: MakeConfig, default_model: Path
) -> None:
    with pytest.raises(ValueError, match="per_lane"):
        llama_config(deterministic=True, kv="shared")
    with pytest.raises(ValueError, match="threads"):
        llama_config(deterministic=True, threads=2)


@pytest.mark.parametrize("kv", ["per_lane", "shared"])
@pytest.mark.timeout(120)
async def test_prefixes_swaps_and_cancellations_leave_a_real_model_in_order(
    llama_config: MakeConfig, kv: str
) -> None:
    shared = kv == "shared"
    config = llama_config(kv=kv, **({"pool_tokens": 512} if shared else {}))
    prefix = "You are a helpful assistant that answers every question in one short sentence. " * 3
    params = RequestParams(max_tokens=64, ignore_eos=True)
    async with Engine.open(config) as engine:
        leave = [None] * 8 if shared else [None, 5, None, 1, None, 12, None, None]
        got = await asyncio.gather(
            *(
                answer(engine, prefix + prompt, params, leave_after=after)
                for prompt, after in zip(PROMPTS[:7] + PROMPTS[:1], leave, strict=True)
            )
        )
        assert [len(a.tokens) for a in got] == [after or 64 for after in leave]
        while engine.statistics().running:
            await asyncio.sleep(0)
        assert engine.statistics().cached_tokens > 0
        assert (engine.statistics().preemptions > 0) == shared
        assert_books_balance(engine)


@pytest.mark.parametrize("damage", ["truncated", "noise", "empty"])
async def test_a_corrupt_model_file_is_one_line(
    default_model: Path, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "damaged.gguf"
    with default_model.open("rb") as file:
        head = file.read(20 * 2**20)
    noise = bytes((index * 7919 >> 3) & 0xFF for index in range(2**20))
    path.write_bytes({"truncated": head, "noise": noise, "empty": b""}[damage])
    config = Config.model_validate({"model": {"path": str(path)}})
    with pytest.raises(StartupError) as caught:
        async with Engine.open(config):
            pass
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.timeout(240)
async def test_drafts_do_not_change_a_text(default_model: Path) -> None:
    """Greedy and sampled, alone and in company, on a prompt that the model goes on repeating."""
    prompt = "One, two, three, four.\n" * 6
    greedy = RequestParams(max_tokens=48, ignore_eos=True)
    sampling = SamplingConfig(enabled=True, temperature=0.7, top_k=40, seed=11)
    requests = [
        (prompt, greedy),
        (PROMPTS[2], greedy),
        (prompt, RequestParams(max_tokens=48, ignore_eos=True, sampling=sampling)),
    ]
    answers = []
    for method in ("off", "ngram"):
        given = {
            "model": {"path": str(default_model)},
            "engine": {"lanes": 3, "context_tokens": 256, "deterministic": True},
            "speculation": {"method": method, "requests_max": 3},
        }
        async with Engine.open(Config.model_validate(given)) as engine:
            answers.append(await asyncio.gather(*(answer(engine, *one) for one in requests)))
            assert_books_balance(engine)
            accepted = engine.statistics().accepted_tokens
    assert [a.tokens for a in answers[1]] == [a.tokens for a in answers[0]]
    assert accepted > 30
