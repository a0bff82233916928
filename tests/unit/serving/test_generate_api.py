"""`POST /generate` and its twin without HTTP."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from aiohttp import web

from benchmarks.hostile_chats import blank_png
from serving.engine_input import decode_sampling
from serving.errors import FeatureDataRequired, InvalidRequest, ModelNotFound, StageUnavailable
from serving.generate_types import GenerateDelta, GenerateResponse
from serving.ingress import Ingress, MediaLimits, ServedPipeline
from serving.media import AllowedHosts, install_media_connector
from serving.protocol import DecodeChunk, TokenLogprob
from serving.render import ModelFront
from tests.unit.serving.front_fakes import FakePipeline, data_url, genuine, healthy, png

MODEL = "tiny-qwen2-vl"


async def generate(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/generate", json=fields)


async def refusal(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await generate(http, **fields)
    assert 400 <= response.status_code < 500
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "hashes", "retryable"}
    assert error["code"] == response.status_code
    return error


async def test_a_prompt(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    answer = (await generate(http, prompt="hello", model=MODEL)).json()
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("Hello", [72, 105], "stop")
    prompt_tokens = len(pipeline.requests[0].token_ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 2,
        "total_tokens": prompt_tokens + 2,
        "cached_tokens": 3,
    }
    assert answer["model"] == MODEL
    assert answer["items"] == []
    assert list(answer["stages"]) == ["render", "encode", "ec_transfer", "prefill", "first_token", "decode", "total"]
    assert answer["stages"]["prefill"] == 20.0
    assert answer["stages"]["total"] >= answer["stages"]["first_token"] >= answer["stages"]["render"] > 0


async def test_a_prompt_is_one_user_message_with_its_pictures_first(
    http: httpx.AsyncClient, pipeline: FakePipeline
) -> None:
    parts = [{"type": "image_url", "image_url": {"url": data_url(seed)}} for seed in (1, 2)]
    await generate(http, messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "compare"}]}])
    answer = (await generate(http, prompt="compare", images=[data_url(1), base64.b64encode(png(2)).decode()])).json()
    by_messages, by_prompt = pipeline.requests
    assert by_prompt.token_ids == by_messages.token_ids
    assert by_prompt.features == by_messages.features
    assert [item["identifier"] for item in answer["items"]] == [f.identifier for f in by_prompt.features]
    assert {(item["modality"], item["provenance"]) for item in answer["items"]} == {("image", "encoded")}


async def test_tokens_in(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    assert (await generate(http, token_ids=[40, 41], cache_salt="tenant", priority=2)).status_code == 200
    (request,) = pipeline.requests
    assert (request.token_ids, request.cache_salt, request.priority) == ((40, 41), "tenant", 2)


async def test_a_stream_ends_with_everything_known_and_done(http: httpx.AsyncClient) -> None:
    response = await generate(http, prompt="hello", images=[data_url(3)], stream=True, request_id="mine")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    first, last = json.loads(lines[0]), json.loads(lines[-2])
    assert first == {
        "id": "gen-mine",
        "model": MODEL,
        "text": "Hel",
        "token_ids": [72],
        "finish_reason": None,
        "logprobs": None,
    }
    assert (last["text"], last["finish_reason"], last["usage"]["completion_tokens"]) == ("lo", "stop", 2)
    assert last["items"][0]["provenance"] == "encoded"
    assert last["stages"]["total"] > 0


async def test_logprobs(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    position = (TokenLogprob(72, float("-inf"), 2, "Hel"), TokenLogprob(9, -0.25, 1, "x"))
    pipeline.chunks = (
        DecodeChunk("Hel", (72,), finished=False, logprobs=(position,)),
        DecodeChunk("lo", (105,), finished=True, finish_reason="length", logprobs=(position[1:],)),
    )
    pipeline.prompt_logprobs = (None, position[1:])
    answer = (await generate(http, prompt="hello", sampling_params={"logprobs": 1, "prompt_logprobs": 1})).json()
    assert [[entry["token_id"] for entry in place] for place in answer["logprobs"]] == [[72, 9], [9]]
    assert answer["logprobs"][0][0] == {"token_id": 72, "logprob": -9999.0, "rank": 2, "decoded": "Hel"}
    assert answer["prompt_logprobs"][0] is None


async def test_sampling_parameters_by_vllms_names(http: httpx.AsyncClient, pipeline: FakePipeline) -> None:
    await generate(http, token_ids=[40], sampling_params={"temperature": 0.0, "stop": ["x"], "min_tokens": 1})
    await generate(http, token_ids=[40], sampling_params={"max_tokens": 7})
    first, second = (decode_sampling(request.sampling) for request in pipeline.requests)
    assert (first.temperature, first.stop, first.min_tokens, first.max_tokens) == (0.0, ["x"], 1, 511)
    assert second.max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"messages": []}, "messages"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids.0"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"prompt": "a", "token_ids": [1]}, "token_ids"),
        ({"token_ids": [1], "images": ["x"]}, "images"),
        ({"prompt": "a", "ec_transfer_params": {}}, "ec_transfer_params"),
        ({"prompt": "a", "kv_transfer_params": {}}, "kv_transfer_params"),
        ({"prompt": "a", "no_such_field": 1}, "no_such_field"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "sampling_params": {"no_such_name": 1}}, "sampling_params.no_such_name"),
        ({"prompt": "a", "sampling_params": {"temperature": -3}}, "sampling_params.temperature"),
        ({"prompt": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"prompt": "a", "sampling_params": {"max_tokens": 100_000}}, "sampling_params.max_tokens"),
        ({"prompt": "a " * 2000}, "prompt"),
        ({"prompt": "a", "images": ["!!!"]}, "images[0]"),
        ({"prompt": "a", "images": ["data:image/png;base64,@@@"]}, "images[0]"),
        ({"prompt": "a", "images": ["data:image/png,plain"]}, "images[0]"),
        ({"prompt": "a", "images": [data_url(1), "AAAA"]}, "images[1]"),
        ({"prompt": "a", "images": [base64.b64encode(png(1)[:90]).decode()]}, "images[0]"),
        ({"prompt": "a", "images": [base64.b64encode(b"PK\x03\x04" + bytes(60)).decode()]}, "images[0]"),
        ({"prompt": "a", "images": [base64.b64encode(blank_png(20_000, 20_000)).decode()]}, "images[0]"),
        ({"prompt": "a", "images": ["file:///etc/passwd"]}, "images[0]"),
        ({"prompt": "a", "images": ["http://127.0.0.1:1/x.png"]}, "images[0]"),
        ({"prompt": "a", "images": ["https://example.com/x.png"]}, "images[0]"),
        ({"prompt": "a", "images": [data_url(1)] * 5}, "images"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "no_such_type"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}]}, "messages"),
        ({"messages": ["text"]}, "messages.0"),
        ({"messages": [{"content": "who says this?"}]}, "messages"),
        ({"prompt": "a", "model": "nobody"}, "model"),
        ({"prompt": "a", "model": 7}, "model"),
    ],
)
async def test_bad_input_names_its_field(
    http: httpx.AsyncClient, pipeline: FakePipeline, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        error = await refusal(http, **fields, stream=stream)
        assert error["param"] == param
        assert not error["retryable"]
    assert not pipeline.requests


async def test_token_ids_beyond_the_context(http: httpx.AsyncClient) -> None:
    assert (await refusal(http, token_ids=[40] * 600))["code"] == 400
    assert (await refusal(http, token_ids=[10_000_000]))["code"] == 400


@pytest.mark.parametrize(
    ("features", "param"),
    [
        (
            {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 1, "length": 9}]}},
            "features.image[0]",
        ),
        (
            {
                "mm_hashes": {"image": ["a"]},
                "mm_placeholders": {"image": [{"offset": 0, "length": 1}]},
                "kwargs_data": {"image": ["AAAA"]},
            },
            "features.kwargs_data",
        ),
        ({"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": []}}, "features"),
    ],
)
async def test_bad_features(http: httpx.AsyncClient, features: dict[str, Any], param: str) -> None:
    assert (await refusal(http, token_ids=[40, 41], features=features))["param"] == param


async def test_the_description_lists_the_route(http: httpx.AsyncClient) -> None:
    described = (await http.get("/openapi.json")).json()
    route = described["paths"]["/generate"]["post"]
    assert {"200", "400", "503"} <= set(route["responses"])
    assert "text/event-stream" in route["responses"]["200"]["content"]
    schema = described["components"]["schemas"]
    body = route["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert {"prompt", "images", "messages", "token_ids", "sampling_params"} <= set(schema[body]["properties"])


# What follows has a server of its own to fetch from.


@pytest.fixture
async def site() -> AsyncIterator[str]:
    async def picture(request: web.Request) -> web.Response:
        return web.Response(body=png(9), content_type="image/png")

    async def moved(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])

    app = web.Application()
    app.router.add_get("/picture.png", picture)
    app.router.add_get("/moved", moved)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def allowing_loopback() -> AsyncIterator[None]:
    connection = AllowedHosts(["127.0.0.1"], max_bytes=1 << 20)
    install_media_connector(connection)
    yield
    await connection.close()
    install_media_connector(AllowedHosts((), max_bytes=1 << 20))


@pytest.mark.usefixtures("allowing_loopback")
async def test_a_picture_from_an_allowed_host(http: httpx.AsyncClient, pipeline: FakePipeline, site: str) -> None:
    for url in (f"{site}/picture.png", f"{site}/moved?to=/picture.png"):
        assert (await generate(http, prompt="a", images=[url])).status_code == 200
    assert len({request.features[0].identifier for request in pipeline.requests}) == 1


@pytest.mark.usefixtures("allowing_loopback")
@pytest.mark.parametrize(
    "path",
    ["/missing.png", "/moved?to=http://localhost/picture.png", "/moved?to=file:///etc/passwd", "/moved?to=/moved"],
)
async def test_urls_that_lead_nowhere(http: httpx.AsyncClient, site: str, path: str) -> None:
    assert (await refusal(http, prompt="a", images=[site + path]))["param"] == "images[0]"
    part = {"type": "image_url", "image_url": {"url": site + path}}
    response = await http.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
    )
    assert response.status_code in (400, 422)


@pytest.fixture
async def ingress(model_front: Callable[[str], ModelFront], pipeline: FakePipeline) -> AsyncIterator[Ingress]:
    """Two models; the second's stages are away."""

    async def away() -> None:
        raise StageUnavailable("no replica of prefill")

    models = [model_front(name).model for name in (MODEL, "tiny-llava")]
    checks = {MODEL: healthy, "tiny-llava": away}
    ingress = Ingress(
        models, lambda front: ServedPipeline(pipeline, checks[front.model.name], genuine), MediaLimits(), 60.0
    )
    yield ingress
    await ingress.close()


async def test_handle_callers_get_the_same(ingress: Ingress, pipeline: FakePipeline) -> None:
    whole = await ingress.generate({"model": MODEL, "prompt": "hello", "images": [data_url(1)]})
    assert isinstance(whole, GenerateResponse)
    assert whole.text == "Hello"
    events = [event async for event in ingress.generate_stream({"model": "tiny-llava", "prompt": "hello"})]
    assert [type(event) for event in events] == [GenerateDelta, GenerateResponse]
    assert len(pipeline.requests) == 2


async def test_handle_callers_errors_are_exceptions(ingress: Ingress, pipeline: FakePipeline) -> None:
    with pytest.raises(ModelNotFound):
        await ingress.generate({"model": "nobody", "prompt": "hello"})
    with pytest.raises(InvalidRequest) as caught:
        await ingress.generate({"prompt": "hello"})
    assert caught.value.param == "model"
    with pytest.raises(InvalidRequest) as caught:
        await ingress.generate({"model": MODEL, "prompt": "hello", "sampling_params": {"temperature": "hot"}})
    assert caught.value.param == "sampling_params.temperature"
    pipeline.error = FeatureDataRequired
    with pytest.raises(FeatureDataRequired):
        async for _ in ingress.generate_stream({"model": MODEL, "prompt": "hello"}):
            pass


async def test_two_models_behind_one_address(ingress: Ingress, pipeline: FakePipeline) -> None:
    app = await ingress.__serve_build_asgi_app__()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front") as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == [MODEL, "tiny-llava"]
        health = await http.get("/health")
        assert (health.status_code, health.json()["error"]["type"]) == (503, "stage_unavailable")
        for name in (MODEL, "tiny-llava"):
            answer = await generate(http, model=name, prompt="hello", images=[data_url(2)])
            assert answer.json()["model"] == name
        qwen, llava = pipeline.requests
        assert qwen.token_ids != llava.token_ids
        error = (await generate(http, prompt="hello")).json()["error"]
        assert (error["code"], error["param"]) == (400, "model")
