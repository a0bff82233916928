"""Where spans of requests go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.base import Frozen

__all__ = ["TracingConfig"]


class TracingConfig(Frozen):
    """OpenTelemetry spans of requests, from the ingress and from every engine."""

    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Collector that spans are sent to, such as `http://collector:4317`; with `http/protobuf` the whole "
        "URL, such as `http://collector:4318/v1/traces`. Left out, no spans are made.",
    )
    protocol: Literal["grpc", "http/protobuf"] = Field("grpc", description="How the collector is spoken to.")
