"""docs/grafana.json asks for metrics that exist, by labels that they have, and for all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from serving import metrics
from serving.metrics import PipelineMetrics

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES += [variable["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]


def exported() -> dict[str, set[str]]:
    """The labels of each sample name that a scrape of an ingress process shows, for the families that are ours."""
    PipelineMetrics("test")
    metrics.HOP_BYTES.labels("encode")
    labels: dict[str, set[str]] = {}
    for family in REGISTRY.collect():
        if family.name.startswith("triptych_"):
            kinds = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}[family.type]
            for suffix in kinds:
                labels[family.name + suffix] = {"le"} if suffix == "_bucket" else set()
            for sample in family.samples:
                labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_asks_for_what_is_exported(query: str) -> None:
    names = re.findall(r"\b(triptych_\w+)", query)
    assert names
    for name in names:
        assert name in exported()


def test_every_metric_is_shown() -> None:
    shown = {name for query in QUERIES for name in re.findall(r"\b(triptych_\w+)", query)}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported() if not name.endswith("_created")}
    assert families <= {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}


def test_labels_are_those_of_the_metrics() -> None:
    declared = Path(metrics.__file__).read_text()
    used = {label for query in QUERIES for group in re.findall(r"by \((.*?)\)", query) for label in group.split(", ")}
    used |= {label for query in QUERIES for label in re.findall(r"[{,]\s*(\w+)=", query)}
    for label in used - {"le"}:
        assert f'"{label}"' in declared


def test_panels_do_not_overlap() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
