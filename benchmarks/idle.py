"""What the default pipeline costs at rest: `python -m benchmarks.idle [--quick] [--json FILE]`.

Starts configs/pipeline.yaml, sends it one picture, lets it come to rest and measures the CPU time of its processes
over ten seconds (four with --quick), as a fraction of one core: engines (with their replicas), the ingress, and Ray's
own processes beside them.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import httpx

import configs
from benchmarks.records import Record, options, publish
from benchmarks.rest import cpu_at_rest
from models.pictures import HELD_OUT, tiles
from serving.local import LocalPipeline


def measure(seconds: float) -> list[Record]:
    config = Path(configs.__path__[0]) / "pipeline.yaml"
    with LocalPipeline(config) as pipeline:
        _one_request(pipeline.url)
        used = cpu_at_rest(pipeline.survivors, seconds)
    return [
        Record("idle_cpu_fraction", used["engines"], "cores"),
        Record("idle_cpu_fraction_ingress", used["ingress"], "cores"),
        Record("idle_cpu_fraction_ray", used["ray"], "cores"),
    ]


def _one_request(url: str) -> None:
    picture = io.BytesIO()
    tiles(HELD_OUT).image.save(picture, "PNG")
    body = {"prompt": "Describe the image.", "images": [base64.b64encode(picture.getvalue()).decode()]}
    httpx.post(f"{url}/generate", json=body, timeout=120.0).raise_for_status()


if __name__ == "__main__":
    chosen = options(__doc__)
    publish(measure(4.0 if chosen.quick else 10.0), chosen.json)
