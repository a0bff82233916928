"""OpenTelemetry spans of one request: the request itself, and what it spends in each stage.

Parents are passed explicitly. The pipeline's generators are advanced by several tasks, so that a context variable would
not lead from a span to its children. W3C trace context goes along with every message to a stage, whose engine hangs its
own span below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.errors import TriptychError

__all__ = ["RequestTrace", "TraceHeaders"]

TraceHeaders = Mapping[str, str]
"""`traceparent` and `tracestate`."""

Attribute = str | int | float | bool

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTrace:
    """The spans of one request.

    Args:
        tracer: Makes spans; OpenTelemetry's `NoOpTracer` where nobody collects them.
        headers: The caller's trace context, if it has one.
        request_id: The id that stands in every log line about the request.
    """

    def __init__(self, tracer: Tracer, headers: TraceHeaders | None, request_id: str, model: str) -> None:
        self._tracer = tracer
        parent = _PROPAGATOR.extract(headers) if headers else None
        self._span = tracer.start_span(
            "triptych.request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={"gen_ai.request.id": request_id, "gen_ai.request.model": model},
        )

    def event(self, name: str, **attributes: Attribute) -> None:
        """Something happened to the request: a retry, the first token."""
        self._span.add_event(name, attributes)

    def end(self, outcome: str) -> None:
        """The request is over: `completed`, `cancelled`, or an error's code."""
        self._span.set_attribute("triptych.outcome", outcome)
        if outcome not in ("completed", "cancelled"):
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end()

    @contextmanager
    def stage(self, name: str, **attributes: Attribute) -> Iterator[StageSpan]:
        """A stage's share, from the call to its last answer."""
        span = self._tracer.start_span(
            f"triptych.{name}",
            context=trace.set_span_in_context(self._span),
            kind=SpanKind.CLIENT,
            attributes=attributes,
        )
        try:
            yield StageSpan(span)
        except TriptychError as error:
            span.set_status(Status(StatusCode.ERROR, error.code))
            raise
        finally:
            span.end()


class StageSpan:
    """One call of a stage."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def headers(self) -> dict[str, str] | None:
        """What the stage needs to hang its spans below this one; None where nobody collects spans."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(self._span))
        return carrier or None

    def note(self, **attributes: Attribute) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(name, value)
