"""The running application under loss: killed engines, clients that leave. Nothing stays held; answers are right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from models import pictures
from tests.pipeline.cases import encoded
from tests.serving_process import Application, application, small_model, small_stage

pytestmark = [pytest.mark.fault, pytest.mark.flow, pytest.mark.timeout(900)]

MODEL = "tiny-qwen2-vl"
_RECOVERY_S = 240.0
_CALM_S = 30.0


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """One replica a stage, so that a killed engine leaves nobody to ask until Serve has replaced it."""
    quick = {"health_check_period_s": 1.0}
    stages = {
        "encoder": small_stage(**quick),
        "prefill": small_stage(receiver_cache_bytes="64MiB", **quick),
        "decode": small_stage(**quick),
    }
    with application(tmp_path_factory.mktemp("flow"), small_model(MODEL, **stages)) as running:
        yield running


@pytest.fixture
def question() -> dict[str, Any]:
    """A picture that no earlier test has sent, and the settings of a deterministic answer."""
    picture = pictures.shape(pictures.HELD_OUT + time.time_ns() % 1_000_000)
    return {
        "prompt": picture.question,
        "images": [encoded(picture.image)],
        "sampling_params": {"temperature": 0, "max_tokens": 32},
    }


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_killed_engine_costs_typed_errors_at_most(app: Application, question: dict[str, Any], stage: str) -> None:
    before = app.generate(**question)
    (engine,) = _engines(app, stage)
    engine.kill()
    answer = _ask_until_served(app, question | {"images": [_new_picture()]})
    assert answer["finish_reason"] in {"stop", "length"}
    after = app.generate(**question)
    assert after["token_ids"] == before["token_ids"]
    assert [process.pid for process in _engines(app, stage)] != [engine.pid]
    _assert_calm(app)


@pytest.mark.parametrize("after_bytes", [0, 200])
def test_a_client_that_leaves_frees_everything(app: Application, question: dict[str, Any], after_bytes: int) -> None:
    body = question | {"stream": True, "sampling_params": {"temperature": 0, "max_tokens": 900, "ignore_eos": True}}
    with suppress(httpx.ReadTimeout):
        timeout = httpx.Timeout(60.0, read=0.05 if after_bytes == 0 else 60.0)
        with app.client.stream("POST", "/generate", json=body, timeout=timeout) as response:
            read = 0
            for data in response.iter_bytes():
                read += len(data)
                if read > after_bytes:
                    break
    _assert_calm(app)
    assert app.generate(**question)["items"][0]["provenance"] != "receiver_cache"


def _ask_until_served(app: Application, body: dict[str, Any]) -> dict[str, Any]:
    """Ask until the answer is 200. Whatever else comes must be a retryable 503 of our own."""
    deadline = time.monotonic() + _RECOVERY_S
    while time.monotonic() < deadline:
        response = app.client.post("/generate", json=body, timeout=_RECOVERY_S)
        if response.status_code == 200:
            answer: dict[str, Any] = response.json()
            return answer
        assert response.status_code == 503, response.text
        assert response.json()["error"]["retryable"]
        assert response.headers["retry-after"]
        time.sleep(1.0)
    raise AssertionError("the application did not recover")


def _engines(app: Application, stage: str) -> list[psutil.Process]:
    """The engine processes of a stage's replicas."""
    found = []
    for pid in app.pipeline.survivors():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            parent = process.parent()
            named = " ".join(process.cmdline()).startswith("VLLM::EngineCore")
            if named and parent is not None and f"{MODEL}-{stage}" in " ".join(parent.cmdline()):
                found.append(process)
    return found


def _assert_calm(app: Application) -> None:
    """No request holds a slot, and soon no engine runs one."""
    deadline = time.monotonic() + _CALM_S
    while (in_flight := _in_flight(app)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert in_flight == 0


def _in_flight(app: Application) -> float:
    text = app.client.get("/metrics").text
    values = re.findall(r"^triptych_requests_in_flight\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in values)


def _new_picture() -> str:
    return encoded(pictures.shape(pictures.HELD_OUT + time.time_ns() % 1_000_000 + 1_000_000).image)
