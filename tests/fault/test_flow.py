"""The running application under loss: killed engines, clients that leave. Nothing stays held; answers are right."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from models import pictures
from tests.collector import Collector
from tests.fault.conftest import LEASE_S, MODEL
from tests.pipeline.cases import encoded
from tests.serving_process import Application
from tests.stage_stats import StageStats, stage_stats

pytestmark = [pytest.mark.fault, pytest.mark.flow, pytest.mark.timeout(900)]

_RECOVERY_S = 240.0
_LONG = 300
"""Tokens of an answer that is being written when its replica dies: seconds."""
_CALM_S = 30.0
_FREED_S = 2.0


@pytest.fixture(scope="module")
def stats(app: Application) -> Iterator[StageStats]:
    with stage_stats(app.pipeline, MODEL) as driver:
        yield driver


@pytest.fixture
def question() -> dict[str, Any]:
    """A picture that no earlier test has sent, and the settings of a deterministic answer."""
    picture = pictures.shape(pictures.HELD_OUT + time.time_ns() % 1_000_000)
    return {
        "prompt": picture.question,
        "images": [encoded(picture.image)],
        "sampling_params": {"temperature": 0, "max_tokens": 32},
    }


def test_a_request_is_one_trace_down_into_the_engines(
    app: Application, collector: Collector, question: dict[str, Any]
) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
    assert app.client.post("/generate", json=question, headers=headers).status_code == 200
    wanted = {"triptych.request": 1, "triptych.encode": 1, "triptych.prefill": 1, "triptych.decode": 1}
    _await(lambda: len(collector.trace(trace_id)) >= len(wanted) + 3, within_s=_CALM_S)
    spans = collector.trace(trace_id)
    ours = {span.name: span for span in spans if span.name in wanted}
    assert ours["triptych.request"].parent_id == caller
    stages = {ours[name].span_id for name in wanted if name != "triptych.request"}
    assert {ours[name].parent_id for name in wanted if name != "triptych.request"} == {ours["triptych.request"].span_id}
    assert {span.parent_id for span in spans if span.name not in wanted} == stages


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8])
def test_a_client_that_leaves_frees_everything(
    app: Application, stats: StageStats, question: dict[str, Any], after_s: float, stream: bool
) -> None:
    """Wherever the request is by then: rendered, encoded, prefilled, between the stages or decoded."""
    _await_replicas(app)
    _await(lambda: not stats.held())
    body = question | {"stream": stream, "sampling_params": {"temperature": 0, "max_tokens": 900, "ignore_eos": True}}
    _leave(app, body, after_s)
    _assert_freed(app, stats, within_s=_FREED_S)
    _assert_every_hand_off_ended(app)
    assert app.generate(**question)["finish_reason"] == "stop"


def test_two_hundred_at_once_are_all_answered(app: Application, stats: StageStats, question: dict[str, Any]) -> None:
    _await_replicas(app)
    expected = app.generate(**question)
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=app.pipeline.url, timeout=_RECOVERY_S, limits=limits) as client:

        def ask(number: int) -> httpx.Response:
            body = question if number % 20 == 0 else question | {"images": [_new_picture()]}
            return client.post("/generate", json=body)

        with ThreadPoolExecutor(200) as pool:
            answers = list(pool.map(ask, range(200)))
    for number, answer in enumerate(answers):
        if answer.status_code == 200:
            assert answer.json()["finish_reason"] in {"stop", "length"}
            assert number % 20 or answer.json()["token_ids"] == expected["token_ids"]
        else:
            assert answer.status_code in {429, 503}, answer.text
            assert answer.json()["error"]["retryable"]
            assert answer.headers["retry-after"]
    statuses = Counter(answer.status_code for answer in answers)
    print(f"statuses: {dict(statuses)}")
    assert statuses[200] >= 100
    _assert_freed(app, stats, within_s=_CALM_S)
    _assert_every_hand_off_ended(app)
    assert app.generate(**question)["token_ids"] == expected["token_ids"]


def test_a_decode_queue_that_outlives_the_lease_costs_a_prefill_and_no_wrong_token(
    app: Application, question: dict[str, Any]
) -> None:
    _await_replicas(app)
    expected = app.generate(**question)
    expired = app.metric("triptych_retries_total", reason="handoff_expired")
    held = [process for engine in _engines(app, "decode") for process in (engine, engine.parent()) if process]
    with ThreadPoolExecutor(1) as pool:
        for process in held:
            process.suspend()
        try:
            answer = pool.submit(app.generate, **question)
            time.sleep(LEASE_S + 1)
        finally:
            for process in held:
                process.resume()
        assert answer.result()["token_ids"] == expected["token_ids"]
        assert answer.result()["text"] == expected["text"]
    assert app.metric("triptych_retries_total", reason="handoff_expired") > expired
    _assert_calm(app)


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_killed_engine_costs_typed_errors_at_most(app: Application, question: dict[str, Any], stage: str) -> None:
    before = app.generate(**question)
    engine = _engines(app, stage)[0]
    engine.kill()
    answer = _ask_until_served(app, question | {"images": [_new_picture()]})
    assert answer["finish_reason"] in {"stop", "length"}
    after = app.generate(**question)
    assert after["token_ids"] == before["token_ids"]
    assert engine.pid not in [process.pid for process in _engines(app, stage)]
    _assert_calm(app)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_answers_go_on_when_a_decode_replica_dies(
    app: Application, question: dict[str, Any], victim: str, stream: bool
) -> None:
    """Several answers, so that some are written by the replica that dies; all are what they would have been."""
    _await_replicas(app)
    body = question | {"sampling_params": {"temperature": 0, "max_tokens": _LONG, "ignore_eos": True}}
    expected = app.generate(**body)
    resumed, begun = app.metric("triptych_resumed_total"), app.metric("triptych_first_tokens_total")
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(app.stream if stream else app.generate, **body) for _ in range(6)]
        _await(lambda: app.metric("triptych_first_tokens_total") == begun + 6)
        engine = _engines(app, "decode")[0]
        (engine if victim == "engine" else engine.parent() or engine).kill()
        got = [answer.result() for answer in answers]
    for answer in got:
        assert answer["token_ids"] == expected["token_ids"]
        assert answer["text"] == expected["text"]
        assert answer["usage"] == got[0]["usage"]
        assert answer["finish_reason"] == "length"
    assert app.metric("triptych_resumed_total") > resumed
    _assert_calm(app)


def _leave(app: Application, body: dict[str, Any], after_s: float) -> None:
    """Send a request and close its connection some time later."""
    url = urlsplit(app.pipeline.url)
    content = json.dumps(body).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        time.sleep(after_s)


def _held(app: Application, stats: StageStats) -> dict[str, float]:
    """What requests hold anywhere."""
    in_flight = app.metric("triptych_requests_in_flight")
    return ({"in_flight": in_flight} if in_flight else {}) | stats.held()


def _assert_freed(app: Application, stats: StageStats, *, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while held := _held(app, stats):
        assert time.monotonic() < deadline, held
        time.sleep(0.02)


def _assert_every_hand_off_ended(app: Application) -> None:
    """Each prompt that prefill held for decode was read or returned."""
    prefilled = app.metric("triptych_stage_seconds_count", stage="prefill")
    assert app.metric("triptych_handoffs_total") == prefilled


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
    """No request holds a slot."""
    _await(lambda: app.metric("triptych_requests_in_flight") == 0, within_s=_CALM_S)


def _await_replicas(app: Application) -> None:
    """Serve has replaced whatever an earlier test killed."""
    _await(lambda: set(app.pipeline.states().values()) <= {"RUNNING", "RUNNING 2/2"})


def _await(condition: Callable[[], bool], *, within_s: float = _RECOVERY_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _new_picture() -> str:
    return encoded(pictures.shape(pictures.HELD_OUT + time.time_ns() % 1_000_000 + 1_000_000).image)
