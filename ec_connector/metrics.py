"""The connector's numbers as vLLM's EC stats: in its log line and among its Prometheus metrics.

The scheduler's half hands them out with a step, once a second at most; an idle engine reports nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from ec_connector.counters import COUNTERS, GAUGES

_LOGGED = ("saves", "reads", "read_bytes", "read_seconds", "hits", "evictions", "tcp_fallbacks")


class ECStats(ECConnectorStats):  # type: ignore[misc]
    """`data` are one agent's numbers since its start; of two, the later says more."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> ECStats:
        return ECStats(data=other.data or self.data)

    def reduce(self) -> dict[str, int | float]:
        return {name: self.data[name] for name in _LOGGED if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class ECPromMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:triptych_ec_NAME` for what goes up and down, `vllm:triptych_ec_NAME_total` for what only grows.

    With vLLM's prefix, so that a second engine in one process replaces them as it does vLLM's own: it unregisters
    whatever bears that name before it makes this object.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Gauge | Counter | Histogram], Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._gauges = {name: self._make(self._gauge_cls, name) for name in sorted(GAUGES)}
        self._counters = {name: self._make(self._counter_cls, f"{name}_total") for name in sorted(COUNTERS)}
        self._last: dict[tuple[int, str], float] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, gauge in self._gauges.items():
            gauge.labels(*labels).set(transfer_stats_data.get(name, 0.0))
        for name, counter in self._counters.items():
            value = transfer_stats_data.get(name, 0.0)
            counter.labels(*labels).inc(max(value - self._last.get((engine_idx, name), 0.0), 0.0))
            self._last[engine_idx, name] = value

    def _make(self, kind: Any, name: str) -> Any:
        words = name.removesuffix("_total").replace("_", " ")
        return kind(
            name=f"vllm:triptych_ec_{name}", documentation=f"EC connector: {words}.", labelnames=self._labelnames
        )
