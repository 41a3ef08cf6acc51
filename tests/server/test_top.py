"""The terminal view: it fits, it leaves out what there is no room for, it says what is wrong."""

from __future__ import annotations

import io
from contextlib import AsyncExitStack

import pytest
from rich.console import Console

from skippy_sched.cli import main
from skippy_sched.top import Screen

SLOW = {"clock": "real", "cost_fixed_us": 3000}


def drawn(screen: Screen, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(screen.draw(width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.fixture
async def facts(serving):
    """Twelve lanes in use by three tenants, and twelve requests that wait."""
    async with serving(model=SLOW, engine={"lanes": 12}) as client, AsyncExitStack() as stack:
        calls = []
        for number in range(24):
            body = {"prompt": f"request {number}", "max_tokens": 300, "stream": True}
            body |= {"ignore_eos": True, "user": f"tenant-{number % 3}"}
            calls.append(await stack.enter_async_context(client.calling("/v1/completions", body)))
        while client.statistics().decoding < 12 or client.statistics().waiting < 12:
            await calls[0].next_write()
        client.live.sample()
        found = (await client.get("/admin/live")).json
        for call in calls:
            call.closed.set()
    return found


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 12), (100, 40), (200, 60), (60, 20)])
async def test_it_fits_into_the_terminal(facts, width, height):
    screen = Screen("http://127.0.0.1:8080")
    screen.take(facts)
    lines = drawn(screen, width, height)
    assert len(lines) <= max(height, 19)
    assert max(map(len, lines)) <= width


async def test_a_common_terminal_shows_lanes_queue_tenants_and_rates(facts):
    screen = Screen("http://127.0.0.1:8080")
    screen.take(facts)
    lines = drawn(screen, 80, 24)
    text = "\n".join(lines)
    assert "lanes 12/12" in text
    assert "waiting 12" in text
    for request in facts["running"]:
        assert f"{request['completion_tokens']}/{request['completion_tokens_max']}" in text
    for word in (
        "TTFT ms",
        "ITL ms",
        "tokens/s",
        "KV",
        "batch",
        "tenant-0",
        "tenant-1",
        "tenant-2",
    ):
        assert word in text
    assert facts["queue"]["first"][0]["waits_for"] in text


async def test_what_does_not_fit_is_counted(facts):
    screen = Screen("http://127.0.0.1:8080")
    screen.take(facts)
    assert any(line.startswith("and ") and "more" in line for line in drawn(screen, 80, 18))


async def test_a_clients_text_has_no_meaning_to_the_terminal(facts):
    screen = Screen("http://127.0.0.1:8080")
    facts["running"][0]["tenant"] = facts["running"][0]["id"] = "\x1b[2J[red]\n"
    screen.take(facts)
    text = "\n".join(drawn(screen, 200, 60))
    assert "\x1b" not in text
    assert "?[2J[red]?" in text


async def test_a_daemon_that_goes_away_is_told_beside_the_last_facts(facts):
    screen = Screen("http://127.0.0.1:8080")
    screen.take(facts)
    screen.trouble = "no daemon answers; trying again"
    lines = drawn(screen, 80, 24)
    assert "trying again" in lines[0]
    assert "lanes 12/12" in lines[1]


def test_without_a_daemon_it_says_so_in_one_line(capsys):
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 69
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skippy-sched: error: no daemon answers at http://127.0.0.1:9")
