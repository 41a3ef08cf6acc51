"""OpenTelemetry: a span for each request, made at its end from its record.

Knows spans and where they are sent. Imported only where tracing is asked for: the SDK is optional.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from skippy_sched import clock
from skippy_sched.clock import Clock, MonotonicClock
from skippy_sched.scheduler.history import What
from skippy_sched.scheduler.observe import IterationRecord, Observer, RequestRecord

#: A collector that does not answer holds up the thread that sends, and the end of the daemon.
EXPORT_TIMEOUT_S = 2.0

#: Steps of a request's history that a span tells; chunks are too many.
_TOLD: Mapping[What, str] = {
    "swapped out": "preempted",
    "preempted": "preempted",
    "restarted": "restarted",
    "engine lost": "restarted",
}


def provider_to(endpoint: str) -> TracerProvider:
    """Sends spans by OTLP over HTTP, from a thread of its own; ``shutdown`` sends the rest.

    ``OTEL_*`` variables set what is not set here, such as the sampler and headers.
    """
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "skippy-sched"}))
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class Traces:
    """An observer that makes spans and hands everything on to the next observer.

    A request that came with a W3C ``traceparent`` is a child of that span, and is sampled with it.
    """

    def __init__(
        self, following: Observer, tracer: Tracer, model: str, clock: Clock | None = None
    ) -> None:
        """``clock`` is the engine's."""
        self._following = following
        self._tracer = tracer
        self._model = model
        self._clock = clock or MonotonicClock()
        self._propagator = TraceContextTextMapPropagator()

    def on_iteration(self, record: IterationRecord) -> None:
        self._following.on_iteration(record)

    def on_request_end(self, record: RequestRecord) -> None:
        self._following.on_request_end(record)
        offset_s = clock.wall_time() - self._clock.now()

        def nanoseconds(instant: float) -> int:
            return int((instant + offset_s) * 1e9)

        operation = "chat" if record.request_id.startswith("chatcmpl-") else "text_completion"
        parent = record.trace_parent
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract({} if parent is None else {"traceparent": parent}),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(record.arrived_at),
            attributes=_attributes(record, operation, self._model),
        )
        if span.is_recording():
            for name, at in _events(record):
                span.add_event(name, timestamp=nanoseconds(at))
            if record.error is not None:
                span.set_status(Status(StatusCode.ERROR, record.error.message[:200]))
        span.end(nanoseconds(record.finished_at))


def _attributes(record: RequestRecord, operation: str, model: str) -> dict[str, str | int | float]:
    """By OpenTelemetry's conventions for generative AI where they have a name."""
    usage = record.usage
    found: dict[str, str | int | float | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "skippy-sched",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.request_id,
        "gen_ai.request.seed": record.seed,
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "skippy.usage.cached_tokens": usage.cached_tokens,
        "skippy.tenant": record.tenant,
        "skippy.outcome": record.outcome,
        "skippy.finish_reason": record.finish_reason,
        "skippy.preemptions": record.preemptions,
        "error.type": None if record.error is None else record.error.code or "error",
    }
    return {name: value for name, value in found.items() if value is not None}


def _events(record: RequestRecord) -> list[tuple[str, float]]:
    """In the order of time."""
    events = [("queued", record.arrived_at)]
    if record.planned_at is not None:
        events.append(("first chunk", record.planned_at))
    if record.first_token_at is not None:
        events.append(("first token", record.first_token_at))
    events += [(_TOLD[step.what], step.at) for step in record.steps if step.what in _TOLD]
    events.sort(key=lambda event: event[1])
    return [*events, ("end", record.finished_at)]
