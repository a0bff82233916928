"""An OTLP collector's HTTP door on loopback. It keeps what it is sent and stores or shows nothing."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span as it came; ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str


class Collector:
    """Attributes:
    url: What exporters are given.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._spans: list[Received] = []

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            for scope in resource.scope_spans:
                self._spans += [
                    Received(span.name, span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    for span in scope.spans
                ]

    def trace(self, trace_id: str) -> list[Received]:
        return [span for span in self._spans if span.trace_id == trace_id]

    def names(self) -> list[str]:
        return [span.name for span in self._spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listen until the context ends."""

    class Door(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            collector.take(gzip.decompress(data) if self.headers.get("content-encoding") == "gzip" else data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
