"""The encoder-cache connector's numbers among Ray's metrics, which Prometheus scrapes from each node.

A replica's engine reports them to vLLM's stat loggers, whose own registry nobody reads inside a replica. vLLM's whole
set could go the same way (`RayPrometheusStatLogger`), but sets some sixty metrics at every engine step; these are set
once a second at most.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorProm
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.ray_wrappers import RayCounterWrapper, RayGaugeWrapper, RayHistogramWrapper

__all__ = ["EncoderCacheMetrics"]


class _RayProm(ECConnectorProm):  # type: ignore[misc]
    _gauge_cls = RayGaugeWrapper
    _counter_cls = RayCounterWrapper
    _histogram_cls = RayHistogramWrapper


class EncoderCacheMetrics(StatLoggerBase):  # type: ignore[misc]
    """Sets `ray_vllm_triptych_ec_*`, labelled by model, the engine's part in transfers, and replica."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._index = engine_index
        labels: list[object] = [vllm_config.model_config.served_model_name, vllm_config.ec_transfer_config.ec_role]
        self._metrics = _RayProm(vllm_config, ["model_name", "ec_role"], {engine_index: labels})

    def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        """Called at every engine step; most steps bring nothing new."""
        if scheduler_stats is not None and scheduler_stats.ec_connector_stats:
            self._metrics.observe(scheduler_stats.ec_connector_stats, self._index)

    def log_engine_initialized(self) -> None:
        return
