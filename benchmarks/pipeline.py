"""One request through the three stages beside one engine: `python -m benchmarks.pipeline [--quick] [--json FILE]`.

Both serve the same built-in model over HTTP on this machine, in the same run, with the same engine settings: the
pipeline's `/generate`, and vLLM's own server with one aggregated engine and its chat route. Requests alternate between
them, so that what else the machine does meets both alike. Each picture is new unless the metric says `repeated`.

Metrics: `e2e_p50_ms/aggregated/TOKENS` (baseline: the aggregated server), the overhead in ms beside it, the share of
each stage as the pipeline reports it, and the bytes that one request sends to prefill and decode.
"""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx

import configs
from benchmarks.records import Record, options, percentile, publish, ratio
from benchmarks.servers import aggregated
from configs.schema import load
from models.pictures import HELD_OUT, tiles
from serving.local import LocalPipeline

_QUESTION = "Describe the image."
_STAGES = ("render", "encode", "ec_transfer", "prefill", "first_token", "decode")
_pictures = count()


def measure(repeats: int) -> list[Record]:
    config = Path(configs.__path__[0]) / "pipeline.yaml"
    with LocalPipeline(config) as pipeline, aggregated(load(config)) as engine:
        engine.await_ready()
        ours = httpx.Client(base_url=pipeline.url, timeout=120.0)
        theirs = httpx.Client(base_url=engine.url, timeout=120.0)
        with ours, theirs:
            model = theirs.get("/v1/models").json()["data"][0]["id"]
            records: list[Record] = []
            for tokens in (16, 128):
                for fresh in (True, False):
                    records += _compare(ours, theirs, model, tokens, fresh=fresh, repeats=repeats)
            return records + _hops(ours)


def _hops(ours: httpx.Client) -> list[Record]:
    """Bytes that one request with one new picture sends to each stage, by the ingress's own counters."""
    before = _hop_bytes(ours)
    ours.post("/generate", json=_generate_body(_picture(), 16)).raise_for_status()
    after = _hop_bytes(ours)
    return [Record(f"hop_bytes/{stage}", after[stage] - before[stage], "bytes") for stage in after]


def _hop_bytes(ours: httpx.Client) -> dict[str, float]:
    text = ours.get("/metrics").raise_for_status().text
    found = re.findall(r'^triptych_hop_bytes_total\{stage="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {stage: float(value) for stage, value in found}


def _compare(
    ours: httpx.Client, theirs: httpx.Client, model: str, tokens: int, *, fresh: bool, repeats: int
) -> list[Record]:
    """Alternate `repeats` requests between both servers, after one each that warms them up."""
    fixed = _picture()
    next_picture: Callable[[], str] = _picture if fresh else lambda: fixed
    stages: dict[str, list[float]] = {stage: [] for stage in _STAGES}
    mine, other = [], []
    for index in range(repeats + 1):
        image = next_picture()
        took, answer = _timed(ours, "/generate", _generate_body(image, tokens))
        baseline, _ = _timed(theirs, "/v1/chat/completions", _chat_body(model, image, tokens))
        if index == 0:
            continue
        mine.append(took)
        other.append(baseline)
        for stage in _STAGES:
            stages[stage].append(answer["stages"][stage])
    kind = "" if fresh else "/repeated"
    value, beside = percentile(mine, 0.5), percentile(other, 0.5)
    records = [
        ratio(f"e2e_p50_ms/aggregated/{tokens}{kind}", value, beside, "ms"),
        Record(f"e2e_p50_overhead_ms/aggregated/{tokens}{kind}", value - beside, "ms"),
    ]
    return records + [
        Record(f"stage_p50_ms/{stage}/{tokens}{kind}", percentile(times, 0.5), "ms") for stage, times in stages.items()
    ]


def _timed(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    started = time.perf_counter()
    response = client.post(path, json=body)
    took_ms = (time.perf_counter() - started) * 1e3
    response.raise_for_status()
    return took_ms, response.json()


def _generate_body(image: str, tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    return {"prompt": _QUESTION, "images": [image], "sampling_params": sampling}


def _chat_body(model: str, image: str, tokens: int) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": _QUESTION},
    ]
    messages = [{"role": "user", "content": content}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}


def _picture() -> str:
    buffer = io.BytesIO()
    tiles(HELD_OUT + 1000 + next(_pictures), layout=(2, 3)).image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    chosen = options(__doc__)
    publish(measure(6 if chosen.quick else 40), chosen.json)
