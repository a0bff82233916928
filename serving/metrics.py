"""Prometheus metrics of one ingress process. vLLM's `/metrics` route exposes them with its own.

Labels stay few: models, stages, and outcomes from fixed sets (error codes, provenances).
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from serving.stages import Report

__all__ = ["HOP_BYTES", "PipelineMetrics"]

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

HOP_BYTES = Counter("triptych_hop_bytes_total", "Bytes of messages sent to a stage.", ["stage"])
_ADMISSION = Counter("triptych_admission_total", "Requests judged, by outcome.", ["model", "outcome"])
_REQUESTS = Counter("triptych_requests_total", "Admitted requests that ended, by outcome.", ["model", "outcome"])
_ITEMS = Counter("triptych_items_total", "Items of prefilled requests, by where their encoding came from.", [
    "model", "provenance"
])  # fmt: skip
_STAGES = Histogram("triptych_stage_seconds", "Time a request spent in a stage.", ["model", "stage"], buckets=_SECONDS)
_RETRIES = Counter("triptych_retries_total", "Stages run once more for one request.", ["model", "reason"])
_IN_FLIGHT = Gauge("triptych_requests_in_flight", "Admitted requests that hold a slot.", ["model"])


class PipelineMetrics:
    """What one model's pipeline reports.

    Args:
        model: The served name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._in_flight = _IN_FLIGHT.labels(model)

    def judged(self, outcome: str) -> None:
        """Admission admitted a request, or refused it with an error's code."""
        _ADMISSION.labels(self._model, outcome).inc()

    def began(self) -> None:
        self._in_flight.inc()

    def ended(self, outcome: str, seconds: float) -> None:
        self._in_flight.dec()
        _REQUESTS.labels(self._model, outcome).inc()
        _STAGES.labels(self._model, "total").observe(seconds)

    def prefilled(self, report: Report) -> None:
        for item in report.items:
            _ITEMS.labels(self._model, item.provenance).inc()
        stages = {"encode": report.encode_s, "ec_transfer": report.ec_transfer_s} if report.items else {}
        for stage, seconds in (stages | {"prefill": report.prefill_s}).items():
            _STAGES.labels(self._model, stage).observe(seconds)

    def first_token(self, seconds: float) -> None:
        _STAGES.labels(self._model, "first_token").observe(seconds)

    def retried(self, reason: str) -> None:
        _RETRIES.labels(self._model, reason).inc()
