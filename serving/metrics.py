"""Prometheus metrics of one ingress process. vLLM's `/metrics` route exposes them with its own.

Labels stay few: models, stages, and outcomes from fixed sets (error codes, provenances).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
_FIRST_TOKENS = Counter("triptych_first_tokens_total", "Answers begun, by the stage whose token came first.", [
    "model", "stage"
])  # fmt: skip
_HANDOFFS = Counter("triptych_handoffs_total", "Prompts held for decode, by what became of them.", ["model", "outcome"])
_RESUMED = Counter("triptych_resumed_total", "Answers that went on elsewhere after a loss.", ["model"])
_TOKENS = Histogram(
    "triptych_token_seconds", "Time between an answer's tokens, averaged over each chunk.", ["model"], buckets=_SECONDS
)
_WAITING = Gauge("triptych_requests_waiting", "Admitted requests that wait for a slot.", ["model"])
_IN_FLIGHT = Gauge("triptych_requests_in_flight", "Admitted requests that hold a slot.", ["model"])


class PipelineMetrics:
    """What one model's pipeline reports.

    Args:
        model: The served name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._in_flight = _IN_FLIGHT.labels(model)
        self._waiting = _WAITING.labels(model)
        self._token = _TOKENS.labels(model)

    def judged(self, outcome: str) -> None:
        """Admission admitted a request, or refused it with an error's code."""
        _ADMISSION.labels(self._model, outcome).inc()

    @contextmanager
    def queued(self) -> Iterator[None]:
        """A request waits for a slot."""
        began_at = time.monotonic()
        with self._waiting.track_inprogress():
            yield
        _STAGES.labels(self._model, "queue").observe(time.monotonic() - began_at)

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """A request holds a slot."""
        with self._in_flight.track_inprogress():
            yield

    def ended(self, outcome: str, seconds: float) -> None:
        _REQUESTS.labels(self._model, outcome).inc()
        _STAGES.labels(self._model, "total").observe(seconds)

    def prefilled(self, report: Report) -> None:
        for item in report.items:
            _ITEMS.labels(self._model, item.provenance).inc()
        stages = {"encode": report.encode_s, "ec_transfer": report.ec_transfer_s} if report.items else {}
        for stage, seconds in (stages | {"prefill": report.prefill_s}).items():
            _STAGES.labels(self._model, stage).observe(seconds)

    def first_token(self, seconds: float, *, early: bool) -> None:
        """The answer begins; `early` says that prefill's own token begins it."""
        _STAGES.labels(self._model, "first_token").observe(seconds)
        _FIRST_TOKENS.labels(self._model, "prefill" if early else "decode").inc()

    def token(self, seconds: float) -> None:
        self._token.observe(seconds)

    def handed_off(self, outcome: str) -> None:
        """Decode has `read` a prompt's KV blocks, or they were `returned` to prefill."""
        _HANDOFFS.labels(self._model, outcome).inc()

    def resumed(self) -> None:
        _RESUMED.labels(self._model).inc()

    def retried(self, reason: str) -> None:
        _RETRIES.labels(self._model, reason).inc()
