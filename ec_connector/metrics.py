"""The connector's numbers as vLLM's EC stats: in its log line and among its Prometheus metrics.

The scheduler's half hands them out with a step, once a second at most; an idle engine reports nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from ec_connector.counters import GAUGES

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
    """`triptych_ec_NAME` for what goes up and down, `triptych_ec_NAME_total` for what only grows."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type[Gauge | Counter | Histogram], Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._last: dict[tuple[int, str], float] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name) or self._metrics.setdefault(name, self._make(name))
            if name in GAUGES:
                metric.labels(*labels).set(value)
                continue
            grown = value - self._last.get((engine_idx, name), 0.0)
            self._last[engine_idx, name] = value
            if grown > 0:
                metric.labels(*labels).inc(grown)

    def _make(self, name: str) -> Any:
        words = name.replace("_", " ")
        if name in GAUGES:
            return self._gauge_cls(
                name=f"triptych_ec_{name}", documentation=f"EC connector: {words}.", labelnames=self._labelnames
            )
        return self._counter_cls(
            name=f"triptych_ec_{name}_total", documentation=f"EC connector: {words}.", labelnames=self._labelnames
        )
