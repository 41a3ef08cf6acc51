"""The engine on a split model: a thread per stage, several iterations under way at once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from skippy_sched.config import Config
from skippy_sched.native import Library, find_library
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.scheduler.runner import ModelRunner, Passage
from skippy_sched.split.manifest import MANIFEST_FILE
from skippy_sched.split.slices import split
from tests.gguf_files import attention_bytes

from .conftest import Answer, answer, assert_books_balance

PROMPTS = [[300 + 11 * number + place for place in range(20)] for number in range(12)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "whole.gguf"
    path.write_bytes(attention_bytes())
    return path


@pytest.fixture(scope="module")
def manifest(whole: Path) -> Path:
    folder = whole.parent / "stages"
    split(whole, folder, Library.load(find_library("llama")), stages=2)
    return folder / MANIFEST_FILE


async def answers(model: Path, leaving: int | None = None) -> list[Answer]:
    """Of all prompts at once; every second consumer leaves after so many tokens."""
    engine_keys = {"lanes": 6, "context_tokens": 128, "threads": 1}
    config = Config.model_validate({"model": {"path": str(model)}, "engine": engine_keys})
    async with Engine.open(config) as engine:
        told = await asyncio.gather(
            *(
                answer(
                    engine,
                    prompt,
                    RequestParams(max_tokens=24),
                    leave_after=leaving if number % 2 else None,
                )
                for number, prompt in enumerate(PROMPTS)
            )
        )
        await engine.drain(30)
        assert_books_balance(engine)
    return told


async def test_a_split_model_says_what_the_whole_one_says(whole: Path, manifest: Path) -> None:
    expected = [told.tokens for told in await answers(whole)]
    assert all(len(tokens) > 1 for tokens in expected)
    assert [told.tokens for told in await answers(manifest)] == expected
    left = await answers(manifest, leaving=3)
    assert [told.tokens for told in left[::2]] == expected[::2]


async def test_a_stage_runs_the_next_iteration_while_the_one_behind_it_is_busy(
    manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last stage does not begin iteration 4 before the first stage is in a later one: half of
    the requests decode here while the other half is there."""
    advance, is_next_under_way = ModelRunner.advance, threading.Event()
    overlapped: list[bool] = []

    def meet(runner: ModelRunner, passage: Passage, number: int) -> None:
        if number == 0 and passage.iteration.number > 4:
            is_next_under_way.set()
        if number == 1 and passage.iteration.number == 4:
            overlapped.append(is_next_under_way.wait(timeout=10))
        advance(runner, passage, number)

    monkeypatch.setattr(ModelRunner, "advance", meet)
    await answers(manifest)
    assert overlapped == [True]
