"""Media and rendered items at vLLM's own routes: what passes, and what does not decode."""

import base64
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.hostile_chats import blank_png
from serving.protocol import Metadata, Tensors
from tests.unit.serving.front_fakes import BOTH, MODEL, PICTURE, FakePipeline, body

BOMB = base64.b64encode(blank_png(20_000, 20_000)).decode()
ON_CPU = {"keep_on_cpu": True}


async def rendered(http: httpx.AsyncClient) -> dict[str, Any]:
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "what?"}]}]
    response = await http.post("/v1/chat/completions/render", json=body("/v1/chat/completions", messages=messages))
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/generate"])
async def test_tokens_in_with_tensors_metadata_and_names(
    http: httpx.AsyncClient, pipeline: FakePipeline, path: str
) -> None:
    prompt = await rendered(http)
    common = {"model": MODEL, "token_ids": prompt["token_ids"], "sampling_params": {"max_tokens": 4}}
    full = prompt["features"]
    assert (await http.post(path, json={**common, "features": full})).status_code == 200
    assert isinstance(pipeline.requests[-1].features[0].payload, Tensors)
    bare = {**full, "kwargs_data": None, "mm_metadata": None}
    assert (await http.post(path, json={**common, "features": bare})).status_code == 200
    assert pipeline.requests[-1].features[0].payload is None
    named = {**full, "kwargs_data": None}
    response = await http.post(path, json={**common, "features": named, "ec_transfer_params": {"x": {}}})
    assert response.status_code == 200
    assert isinstance(pipeline.requests[-1].features[0].payload, Metadata)


def packed(value: Any) -> str:
    return base64.b64encode(msgspec.msgpack.encode(value)).decode()


@BOTH
@pytest.mark.parametrize("path", ["/inference/v1/generate", "/generate"])
@pytest.mark.parametrize(
    "data",
    [
        "!",
        "AAAA",
        packed([1]),
        packed({"x": 1}),
        packed({"x": {"data": ["float32", [4], 7], "field": ["batched", {}]}}),
        packed({"x": {"data": ["float32", [1], msgspec.msgpack.Ext(3, b"1234")], "field": ["no_such", {}]}}),
        packed({"x": {"data": ["complex64", [1], msgspec.msgpack.Ext(3, bytes(8))], "field": ["batched", ON_CPU]}}),
    ],
)
async def test_tensors_that_do_not_decode_are_the_clients_error(
    http: httpx.AsyncClient, pipeline: FakePipeline, path: str, data: str, stream: bool
) -> None:
    features = {
        "mm_hashes": {"image": ["a"]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
        "kwargs_data": {"image": [data]},
    }
    sent = {"model": MODEL, "token_ids": [40, 41], "sampling_params": {}, "features": features, "stream": stream}
    response = await http.post(path, json=sent)
    assert response.status_code == 400
    assert set(response.json()["error"]) >= {"hashes", "retryable"}
    assert not pipeline.requests


@BOTH
async def test_metadata_without_a_reference_is_our_error(http: httpx.AsyncClient, stream: bool) -> None:
    prompt = await rendered(http)
    features = {**prompt["features"], "kwargs_data": None}
    sent = {
        "model": MODEL,
        "token_ids": prompt["token_ids"],
        "sampling_params": {},
        "features": features,
        "stream": stream,
    }
    response = await http.post("/inference/v1/generate", json=sent)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "ec_reference_required"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BOMB}"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
        {"type": "image_embeds", "image_embeds": {"image_grid_thw": "AAAA"}},
    ],
)
async def test_media_that_does_not_decode_is_the_clients_error(http: httpx.AsyncClient, part: dict[str, Any]) -> None:
    said = [{"role": "user", "content": [part]}]
    for stream in (False, True):
        response = await http.post("/v1/chat/completions", json=body("/v1/chat/completions", stream, messages=said))
        assert response.status_code == 400, response.text
