"""Metrics: what was served is counted, each histogram moves, and vLLM's names are there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from skippy_sched.config import Config
from skippy_sched.server.app import App
from skippy_sched.server.metrics import VLLM_NAMES, Histogram, Metrics

GUIDE = Path(__file__).parents[2] / "docs" / "operating.md"


async def test_metrics_count_what_was_served(serving):
    async with serving() as client:
        await client.complete("hello", max_tokens=10)
        await client.complete("hello", max_tokens=-1)
        metrics = await client.metrics()
        assert metrics['skippy:requests_total{outcome="finished"}'] == 1
        assert metrics['skippy:request_success_total{finished_reason="length"}'] == 1
        assert metrics['skippy:requests_refused_total{reason="invalid_value"}'] == 1
        assert metrics["skippy:generation_tokens_total"] == 10
        assert metrics["skippy:request_generation_tokens_sum"] == 10
        assert metrics["skippy:inter_token_latency_seconds_count"] == 9
        for name in ("time_to_first_token", "e2e_request_latency", "time_per_output_token"):
            assert metrics[f"skippy:{name}_seconds_count"] == 1


async def test_the_mean_batch_can_be_read_from_the_metrics(serving):
    async with serving() as client:
        await client.complete(["a", "b", "c", "d"], max_tokens=20)
        metrics = await client.metrics()
        iterations = metrics["skippy:decode_iterations_total"]
        sequences = metrics["skippy:decode_sequences_total"]
        assert sequences == 4 * 19
        assert sequences / iterations > 3
        assert metrics["skippy:decode_batch_size_sum"] == sequences
        assert metrics["skippy:decode_batch_size_count"] == iterations


async def test_the_parts_of_an_iteration_are_told_apart(serving):
    async with serving() as client:
        await client.complete("a", max_tokens=5)
        metrics = await client.metrics()
        for part in ("plan", "native", "reconcile"):
            name = f'skippy:iteration_seconds_count{{part="{part}"}}'
            assert metrics[name] == metrics["skippy:iterations_total"]


async def test_metrics_are_served_before_there_is_an_engine() -> None:
    metrics = Metrics("sim")
    App(Config(), metrics)
    content_type, text = metrics.exposition("")
    assert content_type.startswith("text/plain")
    assert b"skippy:requests_refused_total" in text
    assert metrics.exposition("application/openmetrics-text")[1].endswith(b"# EOF\n")


def test_a_histograms_bounds_are_inclusive_and_its_buckets_cumulative() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert histogram.total == 8


async def test_every_histogram_moves_with_what_it_counts(serving) -> None:
    """Prompts that share a prefix, and more of them than the KV cells can hold."""
    engine = {"kv": "shared", "lanes": 12, "context_tokens": 200, "pool_tokens": 400}
    async with serving(engine=engine) as client, asyncio.TaskGroup() as tasks:
        probe = tasks.create_task(client.app.metrics.probe_lag())
        before = await client.metrics()
        histograms = [name for name in before if re.search(r"_count\b", name)]
        assert len(histograms) == 18
        assert all(before[name] == 0 for name in histograms)
        shared = "a prefix that is long enough to be kept, and longer"
        await client.complete(shared, max_tokens=2)
        await client.complete([shared + str(i) for i in range(12)], max_tokens=130)
        name = "skippy:loop_lag_seconds_count"
        while (after := await client.metrics())[name] == 0:
            await asyncio.sleep(0)
        probe.cancel()
    for name in histograms:
        assert after[name] > 0, name
        assert after[name.replace("_count", "_sum")] > 0, name


async def test_what_waits_is_told_by_what_it_waits_for(serving) -> None:
    slow = {"clock": "real", "cost_fixed_us": 2000}
    async with serving(model=slow, engine={"lanes": 1}) as client:
        assert (await client.metrics())["skippy:predicted_wait_seconds"] == 0
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        async with (
            client.calling("/v1/completions", body) as first,
            client.calling("/v1/completions", body) as second,
            client.calling("/v1/completions", body) as third,
        ):
            await first.next_write()
            while client.statistics().waiting < 2:
                await first.next_write()
            await first.next_write()
            metrics = await client.metrics()
            by_reason = {k: v for k, v in metrics.items() if "waiting_by_reason" in k}
            assert sum(by_reason.values()) == 2
            assert by_reason['skippy:num_requests_waiting_by_reason{reason="lane"}'] == 1
            for call in (first, second, third):
                call.closed.set()


async def test_vllms_dashboards_find_their_names_where_asked_for() -> None:
    ours = Metrics("sim").exposition("")[1].decode()
    assert "vllm:" not in ours
    both = Metrics("sim", vllm_names=True).exposition("")[1].decode()
    assert both.startswith(ours)
    for name in ("time_to_first_token_seconds_bucket", "request_time_per_output_token_seconds_sum"):
        assert f"\nvllm:{name}{{" in both
    assert "vllm:loop_lag" not in both


async def test_names_in_both_have_the_same_values(serving) -> None:
    async with serving(metrics={"compat": "vllm"}) as client:
        await client.complete("hello", max_tokens=5)
        metrics = await client.metrics()
        theirs = {name: value for name, value in metrics.items() if name.startswith("vllm:")}
        assert theirs["vllm:generation_tokens_total"] == 5
        assert theirs['vllm:request_success_total{finished_reason="length"}'] == 1
        for name, value in theirs.items():
            own = name.replace("vllm:request_time_per_output", "vllm:time_per_output")
            assert metrics[own.replace("vllm:", "skippy:")] == value


async def test_the_guide_tells_every_metric_and_its_name_in_vllm(serving) -> None:
    async with serving() as client:
        await client.complete("x", max_tokens=-1)
        text = (await client.get("/metrics")).body.decode()
    exported = set(re.findall(r"^# TYPE skippy:(\w+)", text, re.MULTILINE))
    table = GUIDE.read_text().partition("| metric | vLLM |")[2].partition("\n\n")[0]
    told: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        ours, vllm, *_ = (cell.strip() for cell in row.strip("| ").split("|"))
        names = re.findall(r"`(\w+)", ours)
        theirs = names if vllm == "same" else re.findall(r"`(\w+)", vllm)
        told |= dict(zip(names, theirs or [""] * len(names), strict=True))
    plain = {_plain(name): _plain(theirs) for name, theirs in told.items()}
    # Connections are the daemon's own, which no bare application has.
    assert {_plain(name) for name in exported} | {"connections"} == set(plain)
    same = {name: theirs for name, theirs in plain.items() if theirs}
    assert same == {_plain(ours): _plain(theirs) for ours, theirs in VLLM_NAMES.items()}


def _plain(name: str) -> str:
    """Without the suffix that only samples of counters have."""
    return name.removesuffix("_total")
