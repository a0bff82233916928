"""The connector's numbers reach vLLM's EC stats and Prometheus."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import Counter, Gauge, Histogram

from ec_connector.gate import Gate
from ec_connector.protocol import Count, Counted, ToAgent
from tests.unit.ec_connector.ec_fakes import FakeLink

pytestmark = pytest.mark.filterwarnings("default")  # importing vLLM warns about its dependencies


class FakeMetric:
    """Keeps the value of the one label set; knows neither buckets nor label names."""

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        self.value = 0.0
        MADE[name] = self

    def labels(self, *values: object) -> FakeMetric:
        return self

    def set(self, value: float) -> None:
        self.value = value

    def inc(self, amount: float) -> None:
        self.value += amount


MADE: dict[str, FakeMetric] = {}


def test_gauges_follow_and_counters_grow_by_the_difference() -> None:
    from ec_connector.metrics import ECPromMetrics

    MADE.clear()
    config: Any = SimpleNamespace(ec_transfer_config=None)
    metrics = ECPromMetrics(config, dict.fromkeys((Gauge, Counter, Histogram), FakeMetric), ["engine"], {0: ["0"]})
    metrics.observe({"saves": 3.0, "open_pins": 2.0})
    metrics.observe({"saves": 5.0, "open_pins": 1.0})
    seen = {name: metric.value for name, metric in MADE.items() if metric.value}
    assert seen == {"vllm:triptych_ec_saves_total": 5.0, "vllm:triptych_ec_open_pins": 1.0}


def test_two_engines_of_one_process_do_not_meet_in_the_registry() -> None:
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from ec_connector.metrics import ECPromMetrics

    config: Any = SimpleNamespace(ec_transfer_config=None)
    kinds: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    for _ in range(2):
        unregister_vllm_metrics()  # as vLLM's logger does before it asks for ours
        metrics = ECPromMetrics(config, kinds, ["engine"], {0: ["0"]})
        metrics.observe({"saves": 1.0, "a number of another version": 1.0})
    unregister_vllm_metrics()


def test_the_later_of_two_reports_counts() -> None:
    from ec_connector.metrics import ECStats

    both = ECStats(data={"saves": 1.0}).aggregate(ECStats(data={"saves": 4.0}))
    assert both.reduce() == {"saves": 4.0}
    assert ECStats().is_empty()


def test_the_gate_asks_once_a_second_and_hands_out_once() -> None:
    link = FakeLink()
    gate = Gate([link], loads=True)
    for now in (10.0, 10.5, 11.1):
        gate.ask_counts(now)
    assert [msgspec.msgpack.decode(sent, type=ToAgent) for sent in link.sent] == [Count(), Count()]
    link.say(Counted({"saves": 1.0}))
    gate.take_unavailable()
    assert gate.take_counts() == {"saves": 1.0}
    assert gate.take_counts() is None
