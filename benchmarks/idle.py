"""What the default pipeline costs at rest: `python -m benchmarks.idle [--quick] [--json FILE]`.

Starts configs/pipeline.yaml, sends it one picture, lets it come to rest and measures the CPU time of its processes
over ten seconds (four with --quick), as a fraction of one core: engines (with their replicas), the ingress, and Ray's
own processes beside them.
"""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path

import httpx
import psutil

import configs
from benchmarks.records import Record, options, publish
from models.pictures import HELD_OUT, tiles
from serving.local import LocalPipeline

_KINDS = ("engines", "ingress", "ray")
_REST_S = 5.0
"""How long after the last request the engines are left alone: leases and heartbeats of that request have ended."""


def measure(seconds: float) -> list[Record]:
    config = Path(configs.__path__[0]) / "pipeline.yaml"
    with LocalPipeline(config) as pipeline:
        _one_request(pipeline.url)
        time.sleep(_REST_S)
        before = _cpu_seconds(pipeline)
        started = time.monotonic()
        time.sleep(seconds)  # the measurement itself: CPU time of a pipeline that nobody asks anything
        elapsed = time.monotonic() - started
        after = _cpu_seconds(pipeline)
    used = {kind: after[kind] - before[kind] for kind in _KINDS}
    return [
        Record("idle_cpu_fraction", used["engines"] / elapsed, "cores"),
        Record("idle_cpu_fraction_ingress", used["ingress"] / elapsed, "cores"),
        Record("idle_cpu_fraction_ray", used["ray"] / elapsed, "cores"),
    ]


def _one_request(url: str) -> None:
    picture = io.BytesIO()
    tiles(HELD_OUT).image.save(picture, "PNG")
    body = {"prompt": "Describe the image.", "images": [base64.b64encode(picture.getvalue()).decode()]}
    httpx.post(f"{url}/generate", json=body, timeout=120.0).raise_for_status()


def _cpu_seconds(pipeline: LocalPipeline) -> dict[str, float]:
    """CPU seconds used so far, by kind of process."""
    used: dict[str, float] = dict.fromkeys(_KINDS, 0.0)
    for pid in pipeline.survivors():
        try:
            process = psutil.Process(pid)
            times, kind = process.cpu_times(), _kind(process)
        except psutil.NoSuchProcess:
            continue
        used[kind] += times.user + times.system
    return used


def _kind(process: psutil.Process) -> str:
    """Engines and their replicas, the ingress replica, or Ray itself.

    vLLM and Ray name their processes; what an engine's process starts is the engine's.
    """
    names = [" ".join(each.cmdline()) for each in (process, *process.parents())]
    if any(name.startswith("ray::ServeReplica") and ":ingress" in name for name in names):
        return "ingress"
    if any(name.startswith(("VLLM::", "ray::ServeReplica")) for name in names):
        return "engines"
    return "ray"


if __name__ == "__main__":
    chosen = options(__doc__)
    publish(measure(4.0 if chosen.quick else 10.0), chosen.json)
