"""A model's running pipeline under the admission tests, and the requests that they send it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item

from models import pictures
from serving.engine_input import encode_item
from serving.identity import internal_id, payload_digest
from serving.messages import encode_request
from serving.protocol import EncodeResult, Feature, Placeholder, decode, encode
from serving.stages import PipelineRequest
from tests.pipeline.cases import encoded
from tests.pipeline.driver import Driver
from tests.serving_process import Application

MODELS = {"tiny-qwen2-vl": "mrope", "tiny-qwen3-vl": "mrope", "tiny-llava": "plain"}
OK = "200"
DATA, REF, MISS = "feature_data_required", "ec_reference_required", "multimodal_cache_miss"

SAMPLING = {"temperature": 0, "max_tokens": 12}
FILLER = "the quick brown fox jumps over the lazy dog and "
seeds = count(pictures.HELD_OUT + 50_000)


@dataclass
class Served:
    app: Application
    handles: Driver
    model: str

    @property
    def kind(self) -> str:
        return MODELS[self.model]

    def render(self, text: str, *images: str) -> dict[str, Any]:
        """Token ids and full features of a chat prompt.

        Behind the images comes text that fills a KV block: only what full blocks cover is a prefix hit.
        """
        content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
        said, more = ({"type": "text", "text": words} for words in (text, FILLER * 4))
        messages = [{"role": "user", "content": [said, *content, more]}]
        response = self.app.client.post("/v1/chat/completions/render", json={"model": self.model, "messages": messages})
        assert response.status_code == 200, response.text
        return {key: response.json()[key] for key in ("token_ids", "features")}

    def ask(self, body: dict[str, Any], *, stream: bool) -> tuple[str, list[int], str]:
        """`200`, the tokens and the item's provenance; or the error's type.

        An error must be a 400 with one body shape, stream or not.
        """
        body = {**body, "sampling_params": SAMPLING, "stream": stream}
        response = self.app.client.post("/generate", json=body)
        if response.status_code != 200:
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code", "hashes", "retryable"}
            assert error["param"] == "features.image[0]" or error["type"] == MISS
            return error["type"], [], ""
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(line) for line in lines] if stream else [response.json()]
        tokens = [token for event in events for token in event["token_ids"]]
        return OK, tokens, events[-1]["items"][0]["provenance"]

    def forget(self) -> None:
        """Push everything that was there out of prefill's receiver cache."""
        rendered = self.render("Name them.", *(picture() for _ in range(4)))
        self.app.generate(**rendered, sampling_params={"temperature": 0, "max_tokens": 1})

    def feature(self, full: dict[str, Any], name: str) -> Feature:
        """The request's item as the stages know it."""
        (data,) = full["features"]["kwargs_data"]["image"]
        (place,) = full["features"]["mm_placeholders"]["image"]
        tensors = encode_item(decode_mm_kwargs_item(data))
        identifier = internal_id(None, name, payload_digest(tensors), model=self.model)
        return Feature("image", identifier, Placeholder(place["offset"], place["length"]), tensors)

    def encode(self, full: dict[str, Any], name: str) -> dict[str, Any]:
        """Have the encode stage alone encode the request's item. The reference as a client would send it."""
        feature = self.feature(full, name)
        request = PipelineRequest(f"direct-{name}", tuple(full["token_ids"]), (feature,), sampling=b"")
        message = encode(encode_request(request, feature, timeout_s=None))
        result = decode(EncodeResult, self.handles.stage(f"{self.model}-encode", "encode", message))
        return {feature.identifier: {"ref": msgspec.to_builtins(result.ref)}}


def picture() -> str:
    return encoded(pictures.tiles(next(seeds), layout=(2, 2)).image)


def named(rendered: dict[str, Any], name: str) -> dict[str, Any]:
    features = {**rendered["features"], "mm_hashes": {"image": [name]}}
    return {"token_ids": rendered["token_ids"], "features": features}


def moved(served: Served, full: dict[str, Any]) -> dict[str, Any]:
    """The same item behind other text, so that no prefix hit covers it."""
    other = served.render(FILLER * 6, picture())
    features = {**full["features"], "mm_placeholders": other["features"]["mm_placeholders"]}
    return {"token_ids": other["token_ids"], "features": features}


def reduced(full: dict[str, Any], payload: str, refs: dict[str, Any]) -> dict[str, Any]:
    """The request with what `payload` says of its item. With a reference the item goes by the servers' own name."""
    features = dict(full["features"])
    if payload != "tensors":
        features["kwargs_data"] = None
    if payload not in {"tensors", "metadata_and_ref", "metadata"}:
        features["mm_metadata"] = None
    body = {"token_ids": full["token_ids"], "features": features}
    if payload in {"metadata_and_ref", "ref"}:
        refs = refs or forged(features["mm_hashes"]["image"][0], features["mm_placeholders"]["image"][0]["length"])
        features["mm_hashes"] = {"image": list(refs)}
        body["ec_transfer_params"] = refs
    return body


def forged(name: str, rows: int) -> dict[str, Any]:
    ref = {
        "identifier": name,
        "peer": "tcp://127.0.0.1:9",
        "epoch": "e",
        "offset": 0,
        "generation": 1,
        "shape": [rows, 128],
        "dtype": "bfloat16",
        "size_bytes": rows * 256,
        "digest": 1,
        "expires_at": 4e9,
        "mac": "00" * 32,
    }
    return {name: {"ref": ref}}
