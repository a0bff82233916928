"""Two ingress replicas: no request depends on which of them it meets, and one that dies takes only its own along."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from models import pictures
from tests.pipeline.cases import encoded
from tests.serving_process import Application, application, small_model
from tests.stage_stats import stage_stats

pytestmark = [pytest.mark.fault, pytest.mark.flow, pytest.mark.timeout(900)]

MODEL = "tiny-qwen2-vl"
REPLICAS = 2
_CALLS = 12
"""Enough to meet both, but for once in two thousand times."""
_RECOVERY_S = 240.0
_LONG = 600


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    folder = tmp_path_factory.mktemp("ingress")
    with application(folder, small_model(MODEL), ingress={"num_cpus": 0.25, "num_replicas": REPLICAS}) as running:
        yield running


def test_a_name_means_the_same_in_one_session_and_is_a_typed_miss_elsewhere(two: Application) -> None:
    before = _answered(two)
    picture = pictures.shape(pictures.HELD_OUT + time.time_ns() % 1_000_000)
    whole = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{encoded(picture.image)}"},
        "uuid": "one",
    }
    bare = whole | {"image_url": None}
    session = {"x-session-id": "a session"}
    expected = _chat(two, picture.question, whole, session)
    assert expected.status_code == 200, expected.text
    for answer in [_chat(two, picture.question, bare, session) for _ in range(_CALLS)]:
        assert _text(answer) == _text(expected)
    answers = [_chat(two, picture.question, bare, {}) for _ in range(_CALLS)]
    missed = [answer.json()["error"] for answer in answers if answer.status_code != 200]
    assert {answer.status_code for answer in answers} == {200, 400}
    assert all(error["type"] == "multimodal_cache_miss" and error["retryable"] for error in missed)
    assert {_text(answer) for answer in answers if answer.status_code == 200} == {_text(expected)}
    assert all(_text(_chat(two, picture.question, whole, {})) == _text(expected) for _ in range(_CALLS))
    after = _answered(two)
    assert len(after) == REPLICAS
    assert all(after[replica] > before.get(replica, 0) for replica in after)


def test_what_would_be_kept_in_one_of_them_is_refused(two: Application) -> None:
    for _ in range(_CALLS):
        stored = two.client.post("/v1/responses", json={"model": MODEL, "input": "hi", "store": True})
        assert stored.status_code == 200, stored.text
        found = two.client.get(f"/v1/responses/{stored.json()['id']}")
        assert found.status_code == 404, found.text
        follows = {"model": MODEL, "input": "hi", "previous_response_id": stored.json()["id"]}
        assert two.client.post("/v1/responses", json=follows).status_code == 404


def test_one_that_dies_takes_only_its_own_requests_along(two: Application) -> None:
    body = {"prompt": "Describe.", "sampling_params": {"temperature": 0, "max_tokens": _LONG, "ignore_eos": True}}
    expected = two.generate(**body)
    with stage_stats(two.pipeline, MODEL) as stats, ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(_try, two.pipeline.url, body) for _ in range(8)]
        _await(lambda: stats.ask()["decode"]["requests"] == 8)
        _ingresses(two)[0].kill()
        answers = [call.result() for call in calls]
        served = [answer for answer in answers if answer is not None]
        assert 0 < len(served) < len(answers)
        assert all(answer["token_ids"] == expected["token_ids"] for answer in served)
        _await(lambda: not stats.held())
    whole = {"RUNNING", f"RUNNING {REPLICAS}/{REPLICAS}"}
    _await(lambda: len(_ingresses(two)) == REPLICAS and set(two.pipeline.states().values()) <= whole)
    assert two.generate(**body)["token_ids"] == expected["token_ids"]


def _chat(app: Application, question: str, image: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    content = [image, {"type": "text", "text": question}]
    body = {"model": MODEL, "temperature": 0, "max_tokens": 16, "messages": [{"role": "user", "content": content}]}
    return app.client.post("/v1/chat/completions", json=body, headers=headers)


def _text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def _answered(app: Application) -> dict[str, float]:
    """Answers begun, by ingress replica: each tells its own metrics, and when its process started."""
    found = {}
    for _ in range(_CALLS):
        text = app.client.get("/metrics").text
        started = re.search(r"^process_start_time_seconds (\S+)$", text, re.MULTILINE)
        assert started is not None
        begun = re.findall(r"^triptych_first_tokens_total(?:{.*})? (\S+)$", text, re.MULTILINE)
        found[started[1]] = sum(map(float, begun))
    return found


def _try(url: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The answer; None where the connection broke or the answer is an error that may be tried again."""
    with suppress(httpx.TransportError):
        response = httpx.post(f"{url}/generate", json=body, timeout=_RECOVERY_S)
        if response.status_code == 200:
            answer: dict[str, Any] = response.json()
            return answer
        assert response.status_code >= 500, response.text
    return None


def _ingresses(app: Application) -> list[psutil.Process]:
    found = []
    for pid in app.pipeline.survivors():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).strip().startswith("ray::ServeReplica:triptych:ingress"):
                found.append(process)
    return found


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _RECOVERY_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
