"""A replica's connector numbers reach Ray's metrics, at the steps that bring some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("default")  # importing vLLM warns about its dependencies


def test_numbers_are_set_when_a_step_brings_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util import metrics as ray_metrics
    from vllm.config import ECTransferConfig

    from serving.replica_metrics import EncoderCacheMetrics

    seen: list[tuple[str, float, dict[str, str]]] = []

    def note(self: Any, value: float, tags: dict[str, str]) -> None:
        seen.append((self.info["name"], value, tags))

    monkeypatch.setattr(ray_metrics.Gauge, "set", note)
    monkeypatch.setattr(ray_metrics.Counter, "inc", note)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="a-model"),
        ec_transfer_config=ECTransferConfig(
            ec_connector="TriptychECConnector",
            ec_connector_module_path="ec_connector.connector",
            ec_role="ec_producer",
        ),
    )
    metrics = EncoderCacheMetrics(config)
    metrics.record(SimpleNamespace(ec_connector_stats=None), None)
    assert seen == []
    metrics.record(SimpleNamespace(ec_connector_stats={"saves": 2.0, "open_pins": 1.0}), None)
    numbers = {name: value for name, value, _ in seen if value}
    assert numbers == {"vllm_triptych_ec_saves_total": 2.0, "vllm_triptych_ec_open_pins": 1.0}
    assert {tags["model_name"] for _, _, tags in seen} == {"a-model"}
    assert {tags["ec_role"] for _, _, tags in seen} == {"ec_producer"}
