"""The first token with and without prefill's own: `python -m benchmarks.first_token [--quick] [--json FILE]`.

Streams of `/generate` on the default pipeline, requests alternating. One kind may begin with prefill's token; the other
has a stop string that is never said and waits for decode's, as every request did before. Time counts at the client from
sending the request to the first event with text. Prompts are new, and so are the pictures.

Metrics: `first_token/p50_ms/KIND` and `p90`; baseline: the same requests with the stop string.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import httpx

import configs
from benchmarks.records import Record, options, percentile, publish, ratio
from models.pictures import HELD_OUT, tiles
from serving.local import LocalPipeline

_NEVER_SAID = "never said"
_TOKENS = 8
_numbers = count(HELD_OUT + 900_000)


def measure(repeats: int) -> list[Record]:
    config = Path(configs.__path__[0]) / "pipeline.yaml"
    with LocalPipeline(config) as pipeline, httpx.Client(base_url=pipeline.url, timeout=120.0) as client:
        return [record for kind in ("text", "image") for record in _compare(client, kind, repeats)]


def _compare(client: httpx.Client, kind: str, repeats: int) -> list[Record]:
    early: list[float] = []
    late: list[float] = []
    for number in range(repeats + 2):
        for times, stop in ((early, []), (late, [_NEVER_SAID])):
            seconds = _first_token_s(client, _body(kind, stop))
            if number >= 2:  # the first ones warm the processors up
                times.append(seconds * 1e3)
    return [
        ratio(f"first_token/p{round(share * 100)}_ms/{kind}", percentile(early, share), percentile(late, share), "ms")
        for share in (0.5, 0.9)
    ]


def _body(kind: str, stop: list[str]) -> dict[str, Any]:
    number = next(_numbers)
    sampling = {"temperature": 0, "max_tokens": _TOKENS, "ignore_eos": True, "stop": stop}
    body: dict[str, Any] = {"prompt": f"Count to five, {number}.", "stream": True, "sampling_params": sampling}
    if kind == "image":
        buffer = io.BytesIO()
        tiles(number, layout=(2, 2)).image.save(buffer, "PNG")
        body |= {"prompt": "Name the tiles.", "images": [base64.b64encode(buffer.getvalue()).decode()]}
    return body


def _first_token_s(client: httpx.Client, body: dict[str, Any]) -> float:
    sent_at = time.monotonic()
    first_at = 0.0
    with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not first_at and line.startswith("data: {") and json.loads(line[6:])["token_ids"]:
                first_at = time.monotonic()
    return first_at - sent_at


def main() -> int:
    chosen = options(__doc__)
    publish(measure(10 if chosen.quick else 60), chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
