"""The one application that all flow tests share: engines take minutes to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.collector import Collector, collecting
from tests.serving_process import Application, application, small_model, small_stage

MODEL = "tiny-qwen2-vl"
LEASE_S = 12
"""Short, so that tests can wait for its end."""


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Application]:
    """One encoder and one prefill replica, so that a killed engine leaves nobody to ask until Serve has replaced it;
    two of decode, where answers live longest and go on elsewhere."""
    quick = {"health_check_period_s": 1.0}
    stages = {
        "encoder": small_stage(**quick),
        "prefill": small_stage(receiver_cache_bytes="64MiB", **quick),
        "decode": small_stage(num_replicas=2, **quick),
    }
    cluster = {"kv_lease_s": LEASE_S, "handoff_margin_s": 3.0}
    tracing = {"otlp_endpoint": collector.url, "protocol": "http/protobuf"}
    model = small_model(MODEL, **stages)
    with application(tmp_path_factory.mktemp("flow"), model, cluster=cluster, tracing=tracing) as running:
        yield running
