"""The real application in processes of its own: `serve run`, as a user starts it, on ports of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from serving.local import LocalPipeline


def small_stage(**changes: Any) -> dict[str, Any]:
    """Sizes with which three engines fit on a laptop."""
    return {
        "num_cpus": 0.25,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": "64MiB",
        "slab_bytes": "16MiB",
        "inflight_bytes": "4MiB",
    } | changes


def small_model(builtin: str, **changes: Any) -> dict[str, Any]:
    """A built-in model with KV blocks so small that short prompts fill some: else no prefix is ever cached."""
    return {
        "name": builtin,
        "model": f"builtin:{builtin}",
        "max_model_len": 1024,
        "block_size": 32,
        "limit_mm_per_prompt": {"image": 4},
        "encoder": small_stage(),
        "prefill": small_stage(receiver_cache_bytes="64MiB"),
        "decode": small_stage(),
    } | changes


class Application:
    """A running application. `client` speaks HTTP to it, `pipeline` knows its processes."""

    def __init__(self, pipeline: LocalPipeline) -> None:
        self.pipeline = pipeline
        self.client = httpx.Client(base_url=pipeline.url, timeout=120.0)

    def generate(self, **body: Any) -> dict[str, Any]:
        """The answer of `POST /generate`, which must be 200."""
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, **body: Any) -> dict[str, Any]:
        """As `generate`, put together from the events of a stream."""
        response = self.client.post("/generate", json={**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines]
        assert "error" not in events[-1], events[-1]
        tokens = [token for event in events for token in event["token_ids"]]
        return {**events[-1], "token_ids": tokens, "text": "".join(event["text"] for event in events)}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series that have these labels."""
        text = self.client.get("/metrics").text
        series = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for have, value in series if all(label in have for label in wanted))


@contextmanager
def application(folder: Path, *models: Mapping[str, Any], **args: Any) -> Iterator[Application]:
    """Start an application that serves `models`, and stop it without a trace.

    Raises:
        PipelineFailed: It did not start; the message ends with its log.
    """
    config = folder / "application.yaml"
    application = {
        "name": "triptych",
        "route_prefix": "/",
        "import_path": "serving.app:build",
        "args": {"models": list(models), "ingress": {"num_cpus": 0.25}, **args},
    }
    config.write_text(yaml.safe_dump({"proxy_location": "HeadOnly", "applications": [application]}))
    with LocalPipeline(config) as pipeline:
        app = Application(pipeline)
        with app.client:
            yield app
    assert pipeline.survivors() == []
