"""Journals: a recorded run is decided again in the same way, and says what it measured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skippy_sched.cli import main
from skippy_sched.config import Config
from skippy_sched.errors import StartupError
from skippy_sched.native.sampling import SamplingConfig
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.journal import is_journal
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.simulate.calibrate import calibrate
from skippy_sched.simulate.replay import Difference, JournalError, Replay, recorded_arrivals

MakeConfig = Callable[..., Config]


async def generate(engine: Engine, number: int) -> None:
    params = RequestParams(
        max_tokens=5 + 7 * (number % 4),
        stop=("zzz",) if number % 5 else ("e",),
        tenant="ab"[number % 2],
        priority=number % 3,
        stop_token_ids=frozenset((300 + number,)),
        sampling=SamplingConfig(enabled=number % 2 == 1, seed=number, logit_bias=((7, 1.0),)),
    )
    async with await engine.submit([number + 1] * (3 + 13 * number), params) as stream:
        if number % 7 == 6:
            return  # the client goes away
        async for _ in stream:
            pass


@pytest.fixture(params=["run.journal", "run.journal.gz"])
async def journal(request: pytest.FixtureRequest, tmp_path: Path, sim_config: MakeConfig) -> Path:
    """Of requests that are cancelled, stopped, preempted, and one that makes the engine fail."""
    path = tmp_path / str(request.param)
    config = sim_config(
        {"fault": "call=iteration status=RUNTIME_ERROR token=5 count=0"},
        engine={"kv": "shared", "pool_tokens": 520},
        scheduler={"journal": str(path), "tenant_weights": {"a": 2.0}, "stream_buffer_tokens": 2},
    )
    async with Engine.open(config, seed=1) as engine:
        results = await asyncio.gather(
            *(generate(engine, number) for number in range(16)), return_exceptions=True
        )
        assert sum(isinstance(result, Exception) for result in results) == 1
    return path


def test_a_recorded_run_is_decided_again_in_the_same_way(journal: Path) -> None:
    assert is_journal(journal)
    replay = Replay(journal)
    scheduler = replay.run()
    scheduler.state.check()
    totals = scheduler.state.totals
    assert totals.accepted == 16
    assert totals.failed == 1
    assert totals.finished + totals.cancelled == 15
    # The last one only closed sessions; nobody waited for its outcome.
    assert replay.counts["plan"] - replay.counts["outcome"] in (0, 1)
    assert replay.counts["outcome"] == totals.iterations


def test_the_command_says_so(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(journal)]) == 0
    assert "are the same as recorded, for 16 requests" in capsys.readouterr().out


async def a_plain_journal(sim_config: MakeConfig, path: Path, requests: int = 12) -> None:
    keys = {"cost_fixed_us": 300, "cost_token_us": 20, "cost_sequence_us": 50, "clock": "real"}
    async with Engine.open(sim_config(keys, scheduler={"journal": str(path)})) as engine:
        params = RequestParams(max_tokens=20, ignore_eos=True)

        async def one(number: int) -> None:
            async with await engine.submit([number + 1] * (5 + number), params) as stream:
                async for _ in stream:
                    pass

        await asyncio.gather(*(one(number) for number in range(requests)))


async def test_a_run_in_which_the_engine_was_lost_is_decided_again(
    tmp_path: Path, sim_config: MakeConfig
) -> None:
    path = tmp_path / "run"
    config = sim_config(
        {"fault": "call=iteration effect=hang token=9 count=0"},
        scheduler={"journal": str(path), "watchdog_s": 0.5},
    )
    params = RequestParams(max_tokens=6, ignore_eos=True)

    async def one(engine: Engine, number: int) -> None:
        async with await engine.submit([number + 1] * 5, params) as stream:
            async for _ in stream:
                pass

    async with Engine.open(config) as engine:
        results = await asyncio.gather(
            *(one(engine, number) for number in range(10)), return_exceptions=True
        )
        assert sum(isinstance(result, Exception) for result in results) == 1
    replay = Replay(path)
    totals = replay.run().state.totals
    assert replay.counts["lost"] >= 2
    assert (totals.finished, totals.failed) == (9, 1)


async def test_another_decision_is_shown_with_line_and_iteration(
    tmp_path: Path, sim_config: MakeConfig
) -> None:
    path = tmp_path / "run"
    await a_plain_journal(sim_config, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    index = next(i for i, line in enumerate(lines) if line["is"] == "plan" and "chunks" in line)
    lines[index]["chunks"][0][2] += 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    number = lines[index]["number"]
    with pytest.raises(Difference, match=rf"run:{index + 1}: iteration {number} at .* chunks"):
        Replay(path).run()


@pytest.mark.parametrize("name", ["run", "run.gz"])
async def test_a_journal_that_was_cut_off_ends_there_and_says_so(
    tmp_path: Path, sim_config: MakeConfig, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    await a_plain_journal(sim_config, path)
    assert main(["replay", str(path)]) == 0
    assert "cut off" not in capsys.readouterr().err
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    assert main(["replay", str(path)]) == 0
    assert f"{path} was cut off" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "run.gz"])
async def test_only_its_owner_may_read_a_journal(
    tmp_path: Path, sim_config: MakeConfig, name: str
) -> None:
    path = tmp_path / name
    await a_plain_journal(sim_config, path)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_costs_are_found_and_arrivals_are_those_of_the_run(
    tmp_path: Path, sim_config: MakeConfig
) -> None:
    path = tmp_path / "run"
    await a_plain_journal(sim_config, path)
    found = calibrate(path)
    # A busy machine adds to what the engine sleeps, and never takes away.
    assert found.fixed_us + found.sequence_us + found.token_us > 300
    saved = tmp_path / "saved.json"
    assert main(["calibrate", str(path), "--json", str(saved)]) == 0
    assert calibrate(saved) == found
    arrivals = recorded_arrivals(path)
    assert sorted(a.prompt_tokens for a in arrivals) == [5 + n for n in range(12)]
    assert all(arrival.output_tokens == 20 for arrival in arrivals)
    assert main(["simulate", str(path), "--calibrate", str(saved)]) == 0


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "hello\n", '{"is":"skippy-journal 1"}\n'])
def test_what_is_no_journal_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(JournalError, match="file"):
        Replay(path).run()


async def test_a_journal_that_cannot_be_written_stops_the_start(
    tmp_path: Path, sim_config: MakeConfig
) -> None:
    config = sim_config(scheduler={"journal": str(tmp_path / "no" / "run")})
    with pytest.raises(StartupError, match=r"scheduler\.journal"):
        async with Engine.open(config):
            raise AssertionError("it opened")
