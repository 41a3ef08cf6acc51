"""The live page in a real browser: what it shows, asks for and survives.

Needs the extra ``browser`` and a Chromium on the path; skipped without.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon_process import Daemon, Start

api = pytest.importorskip("playwright.sync_api", reason="the extra browser is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]

SLOW = {"clock": "real", "cost_fixed_us": 5000}
HOSTILE = "<img src=x onerror=\"document.title='hit'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page on which nothing may go wrong: no exception, no blocked file, no message."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text))
    yield page
    page.close()
    unexpected = [text for text in troubles if "status of 401" not in text]
    assert unexpected == []


def show(page: Any, daemon: Daemon) -> None:
    page.goto(f"http://127.0.0.1:{daemon.port}/")


def test_it_shows_lanes_queue_tenants_numbers_and_charts(start: Start, page: Any) -> None:
    with start(SLOW, engine="lanes = 1") as daemon:
        daemon.stream(max_tokens=1500, user="team-a")
        daemon.send(max_tokens=5, user=HOSTILE)
        daemon.metrics_until('skippy:num_requests_waiting{model_name="sim"} 1.0')
        show(page, daemon)
        api.expect(page.locator("#state")).to_have_text("ready")
        api.expect(page.locator("#model")).to_have_text("sim")
        api.expect(page.locator("#lanes tbody tr")).to_contain_text(["team-a"])
        api.expect(page.locator("#queue tbody tr")).to_contain_text([HOSTILE])
        api.expect(page.locator("#numbers .number").first).to_contain_text("1 / 1")
        api.expect(page.locator(".charts .u-wrap")).to_have_count(4)
        assert page.title() == "skippy-sched", "a tenant's name is text"
        assert page.locator("#queue img").count() == 0

        painted = """() => {
            const canvas = document.getElementById("timeline");
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(pixels.data.buffer)).size;
        }"""
        page.wait_for_function(f"({painted})() > 2")
        first = page.locator("#lanes tbody tr td").nth(6).inner_text()
        page.wait_for_function(
            "(was) => document.querySelectorAll('#lanes tbody tr td')[6].innerText !== was",
            arg=first,
        )


def test_it_asks_for_a_key_and_shows_the_facts_for_the_right_one(start: Start, page: Any) -> None:
    with start(server='api_keys = ["user"]\nadmin_keys = ["admin"]') as daemon:
        show(page, daemon)
        api.expect(page.locator("#key-form")).to_be_visible()
        page.fill("#key", "wrong")
        page.click("#key-form button")
        api.expect(page.locator("#key-error")).to_contain_text("not one of this server's")
        page.fill("#key", "admin")
        page.click("#key-form button")
        api.expect(page.locator("#state")).to_have_text("ready")
        api.expect(page.locator("#key-form")).to_be_hidden()
        page.reload()
        api.expect(page.locator("#state")).to_have_text("ready")


def test_it_says_when_the_daemon_drains(start: Start, page: Any) -> None:
    with start(SLOW) as daemon:
        daemon.stream(max_tokens=1500)
        show(page, daemon)
        api.expect(page.locator("#state")).to_have_text("ready")
        daemon.process.terminate()
        api.expect(page.locator("#state")).to_have_text("draining")
