"""The real application in a process of its own: `serve run`, as a user starts it, on ports of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

_START_TIMEOUT_S = 420.0
_STOP_TIMEOUT_S = 60.0


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
    return {
        "name": builtin,
        "model": f"builtin:{builtin}",
        "max_model_len": 1024,
        "limit_mm_per_prompt": {"image": 4},
        "encoder": small_stage(),
        "prefill": small_stage(receiver_cache_bytes="64MiB"),
        "decode": small_stage(),
    } | changes


class Application:
    """A running application. `client` speaks HTTP to it."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.client = httpx.Client(base_url=url, timeout=120.0)

    def generate(self, **body: Any) -> dict[str, Any]:
        response = self.client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def processes(self) -> list[psutil.Process]:
        """Everything that the application has started, Ray included."""
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def application(folder: Path, *models: Mapping[str, Any], **args: Any) -> Iterator[Application]:
    """Start the application with `models` and stop it without a trace.

    Raises:
        RuntimeError: It did not start; the message ends with its log.
    """
    port = _free_port()
    config = folder / "serve.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "proxy_location": "HeadOnly",
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [
                    {
                        "name": "triptych",
                        "route_prefix": "/",
                        "import_path": "serving.app:build",
                        "args": {"models": list(models), "ingress": {"num_cpus": 0.25}, **args},
                    }
                ],
            }
        )
    )
    log = folder / "serve.log"
    environment = os.environ | {"RAY_ADDRESS": "local", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    started: list[psutil.Process] = []
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
        started = psutil.Process(process.pid).children(recursive=True)
        app = Application(f"http://127.0.0.1:{port}", process, log)
        with app.client:
            yield app
            started += app.processes()
    finally:
        _stop(process, started)


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        if b"DEPLOY_FAILED" in log.read_bytes():
            break
        try:
            if httpx.get(f"{url}/health", timeout=10.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    raise RuntimeError(f"the application did not start:\n{log.read_text()[-6000:]}")


def _stop(process: subprocess.Popen[bytes], started: list[psutil.Process]) -> None:
    """Stop as Ctrl-C does, and fail if anything outlives it."""
    if process.poll() is None:
        started = [*started, *psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    _, left = psutil.wait_procs(started, timeout=15.0)
    for orphan in left:
        orphan.kill()
    assert not left, f"processes outlived the application: {left}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
