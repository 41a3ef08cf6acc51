"""Spans of requests: their times, events, parents, and that they arrive at a collector."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from skippy_sched.cli import main
from skippy_sched.scheduler.observe import Observer
from tests.daemon_process import Start

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (  # type: ignore[import-not-found,unused-ignore]
    ExportTraceServiceRequest,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import StatusCode

from skippy_sched.server.traces import Traces

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Callable[[Observer], Observer]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return lambda following: Traces(following, provider.get_tracer("test"), "sim")


def names(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_a_request_is_a_span_with_the_events_of_its_life(serving, traced, exporter):
    async with serving(observed_by=traced) as client:
        response = await client.complete("a secret", max_tokens=7)
        (span,) = exporter.get_finished_spans()
        assert span.name == "text_completion sim"
        assert span.parent is None
        assert names(span) == ["queued", "first chunk", "first token", "end"]
        instants = [event.timestamp for event in span.events]
        assert instants == sorted(instants)
        assert (span.start_time, span.end_time) == (instants[0], instants[-1])
        attributes = dict(span.attributes)
        assert attributes["gen_ai.response.id"] == response.json["id"]
        assert attributes["gen_ai.usage.input_tokens"] == len("a secret")
        assert attributes["gen_ai.usage.output_tokens"] == 7
        assert attributes["skippy.finish_reason"] == "length"
        assert "secret" not in span.to_json()
        assert (await client.metrics())["skippy:generation_tokens_total"] == 7


async def test_a_traceparent_makes_it_a_child_of_the_clients_span(serving, traced, exporter):
    async with serving(observed_by=traced) as client:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2}
        for parent in (f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", "nonsense"):
            await client.post("/v1/chat/completions", body, traceparent=parent)
        sampled, other = exporter.get_finished_spans()[:2], exporter.get_finished_spans()[2:]
        for span in sampled:
            assert span.name == "chat sim"
            assert f"{span.context.trace_id:032x}" == TRACE
            assert f"{span.parent.span_id:016x}" == SPAN
        assert len(other) == 2, "the client's decision not to sample holds"
        assert all(span.parent is None for span in other)


async def test_preemptions_are_told(serving, traced, exporter):
    engine = {"kv": "shared", "lanes": 12, "context_tokens": 200, "pool_tokens": 400}
    async with serving(observed_by=traced, engine=engine) as client:
        await client.complete(["x" * 20 + str(i) for i in range(12)], max_tokens=130)
        preempted = client.statistics().preemptions
    spans = exporter.get_finished_spans()
    assert sum(span.attributes["skippy.preemptions"] for span in spans) == preempted > 0
    assert sum(names(span).count("preempted") for span in spans) == preempted


async def test_a_failure_is_the_spans_status(serving, traced, exporter):
    fault = "call=iteration nth=3 index=0 status=RUNTIME_ERROR count=0"
    async with serving(observed_by=traced, model={"fault": fault}) as client:
        assert (await client.complete("x", max_tokens=9)).status == 500
    (span, *_) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "engine_error"


class Collector(HTTPServer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), _Taker)


class _Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert isinstance(self.server, Collector)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_daemon_has_sent_its_spans_when_it_ends(start: Start, collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with start(server=f'[tracing]\notlp_endpoint = "{endpoint}"') as daemon:
        daemon.ask(max_tokens=3, headers={"traceparent": f"00-{TRACE}-{SPAN}-01"}).read()
        daemon.send_signal(signal.SIGTERM)
        assert daemon.exit_code() == 0
    (span,) = collector.spans
    assert span.name == "text_completion sim"
    assert span.trace_id.hex() == TRACE


def test_a_collector_that_is_not_there_holds_up_nobody(start: Start) -> None:
    endpoint = "http://127.0.0.1:9/v1/traces"
    with start(server=f'[tracing]\notlp_endpoint = "{endpoint}"') as daemon:
        assert daemon.ask(max_tokens=3).status == 200
        daemon.send_signal(signal.SIGTERM)
        assert daemon.exit_code() == 0


def test_without_the_extra_its_name_is_told(tmp_path, monkeypatch, capsys, sim_model) -> None:
    monkeypatch.setitem(sys.modules, "skippy_sched.server.traces", None)
    monkeypatch.setattr("skippy_sched.logs.configure", lambda section: None)
    monkeypatch.setenv("SKIPPY_SCHED__TRACING__OTLP_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    model = str(sim_model())
    assert main(["serve", "--port", "0", "--library", "sim", "--model", model]) == 78
    assert "extra otel" in capsys.readouterr().err
