"""The live facts that top and the web page show, and the page itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from skippy_sched.server.live import GAPS_MAX, ITERATIONS_MAX

SLOW = {"clock": "real", "cost_fixed_us": 3000}


def entries(facts):
    """lane -> what it did, iteration by iteration: tokens of a chunk, or "decode"."""
    seen = {}
    for _, _, _, index, chunks, _ in facts["iterations"]:
        flat = facts["decodes"][index]
        for lane in flat[::2]:
            seen.setdefault(lane, []).append("decode")
        for lane, _, tokens in chunks:
            seen.setdefault(lane, []).append(tokens)
    return seen


async def test_an_idle_daemon_has_facts_too(serving):
    async with serving(engine={"lanes": 3}) as client:
        facts = (await client.get("/admin/live")).json
        assert (facts["model"], facts["state"], facts["lanes"]) == ("sim", "ready", 3)
        assert (facts["running"], facts["tenants"], facts["iterations"]) == ([], [], [])
        assert facts["queue"] == {"requests": 0, "tokens": 0, "first": []}
        assert facts["rates"] is None
        assert facts["latency"]["itl_ms"] == {"p50": None, "p95": None, "p99": None}


async def test_a_view_can_tell_one_run_of_the_daemon_from_another(serving):
    """Both count iterations from one, on a clock that may go on: the start differs."""
    began = []
    for _ in range(2):
        async with serving() as client:
            facts = (await client.get("/admin/live")).json
            await client.complete("x", max_tokens=3)
            assert (await client.get("/admin/live")).json["began_at"] == facts["began_at"]
            began.append(facts["began_at"])
    assert began[0] != began[1]


async def test_running_and_waiting_requests_are_shown_with_lane_tenant_and_reason(serving):
    async with serving(model=SLOW, engine={"lanes": 1}) as client:
        body = {"prompt": "abc", "max_tokens": 60, "stream": True, "ignore_eos": True}
        async with client.calling("/v1/completions", {**body, "user": "first"}) as running:
            await running.next_write()
            async with client.calling("/v1/completions", {**body, "user": "second"}) as waiting:
                while not (facts := (await client.get("/admin/live")).json)["queue"]["requests"]:
                    await running.next_write()
                waiting.closed.set()
                running.closed.set()
    (runs,) = facts["running"]
    assert (runs["lane"], runs["tenant"], runs["state"]) == (0, "first", "decode")
    assert runs["id"].startswith("cmpl-")
    assert (runs["prompt_tokens"], runs["completion_tokens_max"]) == (3, 60)
    (waits,) = facts["queue"]["first"]
    assert (waits["position"], waits["tenant"]) == (1, "second")
    assert waits["waits_for"] in ("a free lane", "the next plan")
    assert {row["tenant"]: (row["running"], row["waiting"]) for row in facts["tenants"]} == {
        "first": (1, 0),
        "second": (0, 1),
    }


async def test_iterations_tell_which_lane_did_what(serving):
    """The prompt's chunks on the request's lane, then a decode for each token but the first."""
    async with serving(engine={"batch_tokens": 8, "lanes": 2}) as client:
        done = (await client.complete(list(range(300, 320)), max_tokens=5, ignore_eos=True)).json
        facts = (await client.get("/admin/live")).json
        assert entries(facts) == {0: [8, 8, 4, *["decode"] * 4]}
        assert list(facts["requests"].values()) == [[done["id"], "default"]]
        numbers = [iteration[0] for iteration in facts["iterations"]]
        assert numbers == list(range(1, 8))
        for _, submitted_at, reconciled_at, _, _, tokens in facts["iterations"]:
            assert submitted_at <= reconciled_at <= facts["at"]
            assert tokens <= facts["budget_tokens"] == 8
        later = (await client.get("/admin/live?after=5")).json
        assert [iteration[0] for iteration in later["iterations"]] == [6, 7]


async def test_requests_side_by_side_are_on_lanes_of_their_own(serving):
    async with serving(model=SLOW, engine={"lanes": 4}) as client:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 30, "stream": True, "ignore_eos": True}
        async with client.calling("/v1/completions", body) as call:
            while client.statistics().decoding < 3:
                await call.next_write()
            facts = (await client.get("/admin/live")).json
            call.closed.set()
        assert [each["lane"] for each in facts["running"]] == [0, 1, 2]


async def test_a_verified_draft_counts_as_a_decode_of_its_lane(serving, script):
    async with serving(speculation={"method": "ngram"}) as client:
        prompt = script("abcdabcdabceabcd")
        await client.complete(prompt, max_tokens=17)
        facts = (await client.get("/admin/live")).json
        assert client.statistics().drafted_tokens > 0
        prefill, *decodes = entries(facts)[0]
        assert prefill == len(prompt)
        assert set(decodes) == {"decode"}
        assert len(decodes) == len(facts["iterations"]) - 1
        assert any(tokens > 1 for *_, tokens in facts["iterations"][1:])


async def test_what_is_kept_is_bounded(serving):
    async with serving() as client:
        await client.complete("x", max_tokens=ITERATIONS_MAX + 50, ignore_eos=True)
        facts = (await client.get("/admin/live")).json
        assert len(facts["iterations"]) == ITERATIONS_MAX
        kept = client.live
        assert kept._gaps_kept == sum(len(gaps) for _, gaps in kept._gaps) <= GAPS_MAX


async def test_samples_bring_rates_latencies_and_history(serving):
    async with serving() as client:
        response = await client.complete("hello", max_tokens=40, ignore_eos=True, user="busy")
        assert response.json["usage"]["completion_tokens"] == 40
        client.live.sample()
        facts = (await client.get("/admin/live")).json
        span_s = facts["history"][-1]["at"] - client.live.samples[0].at
        assert facts["rates"]["generated_tokens_per_s"] * span_s == pytest.approx(40, rel=1e-3)
        assert facts["rates"]["requests_per_s"] * span_s == pytest.approx(1, rel=1e-3)
        assert facts["rates"]["decodes_per_iteration"] == 1
        (tenant,) = facts["tenants"]
        assert tenant["tenant"] == "busy"
        assert tenant["tokens_per_s"] * span_s == pytest.approx(40, rel=1e-3)
        assert facts["counted"]["finished"] == 1
        for latency in facts["latency"].values():
            assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
        last_at = facts["history"][-1]["at"]
        later = (await client.get(f"/admin/live?since={last_at}")).json
        assert later["history"] == []


@pytest.mark.parametrize("query", ["after=x", "since=", "after=1;2", "after=nan", "affter=1"])
async def test_a_wrong_question_is_named(serving, query):
    async with serving() as client:
        response = await client.get(f"/admin/live?{query}")
        assert response.status == 400
        assert response.error["param"] == query.partition("=")[0]


async def test_facts_want_a_key_and_the_page_does_not(serving):
    async with serving(server={"api_keys": ["secret"]}) as client:
        assert (await client.get("/admin/live")).status == 401
        page = await client.get("/")
        assert page.status == 200
        assert b"secret" not in page.body


async def test_while_the_model_loads_there_are_no_facts(serving):
    async with serving() as client:
        client.app.served = None
        assert (await client.get("/admin/live")).error["code"] == "loading"
        assert (await client.get("/")).status == 200


class References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.found += [given[name] for name in ("src", "href") if name in given]
        if "style" in given or any(name.startswith("on") for name in given):
            self.inline.append(tag)
        if tag == "style" or (tag == "script" and "src" not in given):
            self.inline.append(tag)


async def test_the_page_loads_only_its_own_files_and_allows_no_others(serving):
    async with serving() as client:
        page = await client.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        parsed = References()
        parsed.feed(page.body.decode())
        assert parsed.inline == []  # the policy would block it
        assert len(parsed.found) > 4
        for path in parsed.found:
            assert path.startswith("/page/")
            file = await client.get(path)
            assert file.status == 200
            assert file.headers["x-content-type-options"] == "nosniff"
            assert not re.search(rb"(fetch|import|url)\(['\"]?https?:", file.body)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/..", "/page/../app.py"])
async def test_the_page_has_no_other_files(serving, path):
    async with serving() as client:
        assert (await client.get(path)).status == 404
