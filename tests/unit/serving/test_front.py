"""vLLM's own routes over the pipeline: statuses, streams, headers, clients that leave."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from serving.errors import FeatureDataRequired, HandoffExpired, Overloaded
from serving.front import Front
from serving.protocol import Tensors
from tests.unit.serving.front_fakes import (
    BOTH,
    EACH,
    MODEL,
    PICTURE,
    FakePipeline,
    body,
    data_url,
)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of each server-sent event."""
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(answer: Any) -> str:
    """All text in an answer of any route, wherever it stands."""
    if isinstance(answer, dict):
        own = answer.get("text") if isinstance(answer.get("text"), str) else ""
        content = answer.get("content") if isinstance(answer.get("content"), str) else ""
        rest = [value for key, value in answer.items() if key not in ("text", "content") or not isinstance(value, str)]
        return f"{own}{content}" + "".join(map(text_of, rest))
    return "".join(map(text_of, answer)) if isinstance(answer, list) else ""


@EACH
async def test_an_answer(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json=body(path, **({"output_mode": "text"} if "inference" in path else {})))
    assert response.status_code == 200
    assert "Hello" in text_of(response.json())


@EACH
async def test_a_streamed_answer(http: httpx.AsyncClient, path: str) -> None:
    extra = {"output_mode": "text"} if "inference" in path else {}
    response = await http.post(path, json=body(path, stream=True, **extra))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "Hel" in response.text
    assert not [event for event in events(response) if event.get("error")]


@BOTH
@EACH
async def test_a_refusal_is_the_status_on_every_route(
    http: httpx.AsyncClient, pipeline: FakePipeline, path: str, stream: bool
) -> None:
    pipeline.error = FeatureDataRequired
    pipeline.error_args = {"param": "features.image[1]", "hashes": ["abc"]}
    response = await http.post(path, json=body(path, stream))
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"] == {
        "message": "refused by the test",
        "type": "feature_data_required",
        "param": "features.image[1]",
        "code": 400,
        "hashes": ["abc"],
        "retryable": False,
    }


@BOTH
@EACH
async def test_overload_says_when_to_come_back(
    http: httpx.AsyncClient, pipeline: FakePipeline, path: str, stream: bool
) -> None:
    pipeline.error, pipeline.error_args = Overloaded, {"retry_after_s": 3.0}
    response = await http.post(path, json=body(path, stream))
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")
    assert response.json()["error"]["retryable"] is True


@EACH
async def test_an_error_after_the_first_output_ends_the_stream(
    http: httpx.AsyncClient, pipeline: FakePipeline, path: str
) -> None:
    pipeline.error, pipeline.fail_after = HandoffExpired, 1
    response = await http.post(path, json=body(path, stream=True))
    assert response.status_code == 200
    last = events(response)[-1]
    assert last["error"]["type"] == "handoff_expired"
    assert last["error"]["code"] == 503


@EACH
async def test_a_late_error_of_a_whole_answer_is_still_its_status(
    http: httpx.AsyncClient, pipeline: FakePipeline, path: str
) -> None:
    pipeline.error, pipeline.fail_after = HandoffExpired, 1
    response = await http.post(path, json=body(path))
    assert response.status_code == 503


@EACH
async def test_costs_are_in_the_headers(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json=body(path, stream=True))
    timing = dict(entry.split(";dur=") for entry in response.headers["server-timing"].split(", "))
    assert list(timing) == ["render", "encode", "ec_transfer", "prefill", "first_token"]
    assert timing["prefill"] == "20.0"
    assert "x-triptych-items" not in response.headers  # a text prompt has none


async def test_provenance_of_pictures_is_in_the_headers(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "what?"}]}]
    response = await http.post("/v1/chat/completions", json=body("/v1/chat/completions", messages=messages))
    assert response.status_code == 200
    (feature,) = pipeline.requests[0].features
    assert isinstance(feature.payload, Tensors)
    assert list(feature.payload.metadata) == ["image_grid_thw"]
    assert response.headers["x-triptych-items"] == f'"{feature.identifier}";modality=image;provenance=encoded'


async def test_the_same_picture_has_the_same_name_on_every_route(
    http: httpx.AsyncClient, pipeline: FakePipeline
) -> None:
    content = [PICTURE, {"type": "text", "text": "what?"}]
    await http.post(
        "/v1/chat/completions", json=body("/v1/chat/completions", messages=[{"role": "user", "content": content}])
    )
    await http.post("/generate", json=body("/generate", images=[data_url(5)]))
    source = {"type": "base64", "media_type": "image/png", "data": data_url(5).partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]}]
    await http.post("/v1/messages", json=body("/v1/messages", messages=messages))
    names = {feature.identifier for request in pipeline.requests for feature in request.features}
    assert len(pipeline.requests) == 3
    assert len(names) == 1


@BOTH
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_a_picture_by_its_name_alone_that_nobody_sent_is_a_miss(
    http: httpx.AsyncClient, path: str, stream: bool
) -> None:
    content = [{"type": "image_url", "image_url": None, "uuid": "cat"}, {"type": "text", "text": "what?"}]
    said = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": stream}
    response = await http.post(path, json=said)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["retryable"], error["param"]) == ("multimodal_cache_miss", True, "messages")


@BOTH
async def test_one_refused_prompt_of_several_refuses_all(
    http: httpx.AsyncClient, pipeline: FakePipeline, stream: bool
) -> None:
    path = "/v1/completions"
    response = await http.post(path, json=body(path, stream, prompt=["one", "two"]))
    assert response.status_code == 200
    assert len(pipeline.requests) == 2
    response = await http.post(path, json=body(path, stream, prompt=["one", "two" * 2000]))
    assert response.status_code == 400


async def test_two_answers(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    response = await http.post("/v1/chat/completions", json=body("/v1/chat/completions", n=2, seed=4))
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == ["Hello", "Hello"]
    assert len(pipeline.requests) == 2


@BOTH
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/inference/v1/generate"])
async def test_kv_transfer_parameters_in_a_body(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    response = await http.post(path, json=body(path, stream, kv_transfer_params={"do_remote_prefill": True}))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "transfer_params_refused"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_kv_transfer_parameters_by_the_back_door(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json=body(path, vllm_xargs={"kv_transfer_params": "x"}))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "transfer_params_refused"


@BOTH
async def test_references_of_another_shape(http: httpx.AsyncClient, stream: bool) -> None:
    path = "/v1/chat/completions"
    response = await http.post(path, json=body(path, stream, ec_transfer_params={"abc": {"peer_host": "10.0.0.1"}}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "ec_transfer_params.abc"


@EACH
async def test_a_body_that_does_not_validate_names_its_field(http: httpx.AsyncClient, path: str) -> None:
    broken = {"/v1/responses": "temperature", "/v1/messages": "max_tokens"}.get(path, "priority")
    response = await http.post(path, json=body(path, **{broken: "much"}))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request"
    assert response.json()["error"]["param"] == broken
    assert response.json()["error"]["retryable"] is False


@BOTH
@EACH
async def test_errors_that_vllm_finds_have_the_same_keys(http: httpx.AsyncClient, path: str, stream: bool) -> None:
    sampling = {"sampling_params": {"temperature": -3}} if "generate" in path else {"temperature": -3}
    response = await http.post(path, json=body(path, stream, **sampling))
    assert response.status_code == 400
    assert set(response.json()["error"]) >= {"message", "type", "param", "code", "hashes", "retryable"}


@EACH
async def test_an_unknown_model_is_named(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json={**body(path), "model": "nobody"})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


async def test_pages_that_generate_nothing(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).status_code == 200
    models = (await http.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [MODEL]
    tokens = (await http.post("/tokenize", json={"model": MODEL, "prompt": "hello"})).json()
    assert tokens["count"] == len(tokens["tokens"])
    paths = (await http.get("/openapi.json")).json()["paths"]
    assert {"/generate", "/v1/chat/completions"} <= set(paths)
    assert (await http.get("/docs")).status_code == 200
    assert (await http.get("/metrics")).status_code == 200


@BOTH
@EACH
async def test_a_client_that_leaves_stops_the_pipeline(
    front: Front, pipeline: FakePipeline, path: str, stream: bool
) -> None:
    """The server's task lives on, as uvicorn's does; only the `http.disconnect` tells of the client."""
    pipeline.pause = asyncio.Event()
    left = asyncio.Event()
    sent = json.dumps(body(path, stream)).encode()
    messages = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("front", 80),
        "client": ("127.0.0.1", 1),
        "root_path": "",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "state": {},
    }
    task = asyncio.ensure_future(front.app(scope, receive, send))
    await asyncio.wait_for(pipeline.paused.wait(), 10)
    assert pipeline.running == 1
    left.set()
    await asyncio.wait_for(task, 10)
    for _ in range(100):
        if pipeline.running == 0:
            break
        await asyncio.sleep(0.01)
    assert pipeline.running == 0
