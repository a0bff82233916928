"""What vLLM's own server does where the policy refuses: `pytest tests/pipeline/test_raw_vllm.py`. Not in CI.

docs/feature_contract.md quotes what is seen here. A newer vLLM that answers with a 4xx fails this test, which is the
time to say so on that page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.servers import VllmServer
from models import pictures
from models.registry import resolve
from tests.aggregated import ENVIRONMENT
from tests.pipeline.cases import encoded

pytestmark = [pytest.mark.raw_vllm, pytest.mark.timeout(600)]

MODEL = "tiny-qwen3-vl"


@pytest.fixture
def server() -> Iterator[VllmServer]:
    """One engine behind vLLM's server, without a processor cache, as every disaggregated engine runs."""
    options = {
        "model": resolve(f"builtin:{MODEL}"),
        "served-model-name": MODEL,
        "max-model-len": 1024,
        "gpu-memory-utilization": 0.05,
        "kv-cache-memory-bytes": 64 << 20,
        "mm-processor-cache-gb": 0,
        "distributed-executor-backend": "uni",
    }
    environment = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with VllmServer(options, ["enforce-eager", "enable-scale-out"], environment) as started:
        started.await_ready()
        yield started


def test_a_layout_only_request_ends_the_engine(server: VllmServer) -> None:
    """The pipeline answers this very request 400 `feature_data_required` and goes on: `test_admission.py`."""
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        whole, bare = _render(client), _render(client, mm_payload="none")
        assert client.post("/inference/v1/generate", json=whole).status_code == 200
        response = client.post("/inference/v1/generate", json=bare)
        print(f"layout only: {response.status_code} {response.text[:300]}")
        assert response.status_code == 500
        after = _status(client, whole)
        print(f"the whole request afterwards: {after}")
        assert after is None or after >= 500
    assert "EngineDeadError" in server.log_tail(1 << 20)


def _render(client: httpx.Client, **more: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{encoded(pictures.tiles(pictures.HELD_OUT, layout=(2, 2)).image)}"
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    response = client.post("/v1/chat/completions/render", json={"model": MODEL, "messages": [message], **more})
    assert response.status_code == 200, response.text
    sampling = {"temperature": 0, "max_tokens": 8}
    rendered = {key: response.json()[key] for key in ("token_ids", "features")}
    return {"model": MODEL, "sampling_params": sampling, **rendered}


def _status(client: httpx.Client, body: dict[str, Any]) -> int | None:
    """The status of a request; None when nobody answers any more."""
    try:
        return client.post("/inference/v1/generate", json=body).status_code
    except httpx.TransportError:
        return None
