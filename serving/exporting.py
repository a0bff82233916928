"""Where spans go: an OTLP collector, if the configuration names one."""

from __future__ import annotations

import os

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as ExportingProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import NoOpTracerProvider, TracerProvider

__all__ = ["spans_to"]


def spans_to(endpoint: str | None, protocol: str) -> TracerProvider:
    """Tracers whose spans are sent to `endpoint` in the background; without an endpoint, tracers that make none.

    Args:
        endpoint: Of the collector.
        protocol: `grpc` or `http/protobuf`.
    """
    if endpoint is None:
        return NoOpTracerProvider()
    exporter: SpanExporter = (
        GrpcExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
        if protocol == "grpc"
        else HttpExporter(endpoint=endpoint)
    )
    provider = ExportingProvider(
        resource=Resource.create({"service.name": "triptych-ingress", "process.pid": os.getpid()})
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
