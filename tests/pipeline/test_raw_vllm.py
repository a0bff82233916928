"""What vLLM's own server does where the policy refuses: `pytest tests/pipeline/test_raw_vllm.py`. Not in CI.

docs/feature_contract.md quotes what is seen here. A newer vLLM that answers with a 4xx fails these tests, which is the
time to say so on that page.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from models import pictures
from models.registry import resolve
from serving.local import free_ports
from tests.aggregated import ENVIRONMENT
from tests.pipeline.cases import encoded

pytestmark = [pytest.mark.raw_vllm, pytest.mark.timeout(600)]

MODEL = "tiny-qwen3-vl"
_START_TIMEOUT_S = 300.0


class Server:
    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.client = httpx.Client(base_url=url, timeout=60.0, limits=httpx.Limits(max_keepalive_connections=0))
        self.process = process
        self.log = log

    def render(self, **more: Any) -> dict[str, Any]:
        """A rendered prompt with one picture; the processor's cache off, as every disaggregated engine has it."""
        url = f"data:image/png;base64,{encoded(pictures.tiles(pictures.HELD_OUT, layout=(2, 2)).image)}"
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
        response = self.client.post("/v1/chat/completions/render", json={"model": MODEL, "messages": [message], **more})
        assert response.status_code == 200, response.text
        rendered = response.json()
        sampling = {"temperature": 0, "max_tokens": 8}
        return {key: rendered[key] for key in ("token_ids", "features")} | {"sampling_params": sampling, "model": MODEL}

    def is_well(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (port,) = free_ports(1)
    arguments = (
        f"--model={resolve(f'builtin:{MODEL}')}",
        f"--served-model-name={MODEL}",
        "--host=127.0.0.1",
        f"--port={port}",
        "--max-model-len=1024",
        "--gpu-memory-utilization=0.05",
        "--kv-cache-memory-bytes=67108864",
        "--mm-processor-cache-gb=0",
        "--enforce-eager",
        "--enable-scale-out",
    )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    log = tmp_path / "server.log"
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        started = Server(f"http://127.0.0.1:{port}", process, log)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not started.is_well():
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline
            time.sleep(1.0)
        yield started
    finally:
        process.terminate()
        process.wait(60.0)


def test_a_layout_only_request_ends_the_engine(server: Server) -> None:
    """The pipeline answers this very request 400 `feature_data_required` and goes on: `test_admission.py`."""
    whole = server.render()
    assert server.client.post("/inference/v1/generate", json=whole).status_code == 200
    bare = server.render(mm_payload="none")
    response = server.client.post("/inference/v1/generate", json=bare)
    print(f"layout only: {response.status_code} {response.text[:300]}")
    assert response.status_code == 500
    assert "EngineDeadError" in server.log.read_text(errors="replace")
    assert not server.is_well()
    again = None
    try:
        again = server.client.post("/inference/v1/generate", json=whole)
    except httpx.TransportError as error:
        print(f"the whole one afterwards: {error!r}")
    else:
        print(f"the whole one afterwards: {again.status_code} {again.text[:300]}")
    assert again is None or again.status_code >= 500
