"""The feature contract on the running pipeline, cell by cell.

The receiver cache is off, so that what prefill keeps of earlier requests cannot stand in for what a request leaves out:
each cell shows what the caches of *encodings* and *tokens* are worth by themselves. Batches are small, so that a late
item lies beyond the first prefill chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from models import pictures
from tests.pipeline.cases import encoded
from tests.serving_process import Application, application, small_model, small_stage

pytestmark = [pytest.mark.pipeline, pytest.mark.admission, pytest.mark.timeout(900)]

MODELS = {"tiny-qwen2-vl": "mrope", "tiny-qwen3-vl": "mrope", "tiny-llava": "plain"}
STATES = ("cold", "later_chunk", "slab_hit", "prefix_hit")
PAYLOADS = ("tensors", "metadata_and_ref", "metadata", "ref", "nothing")

OK = "200"
DATA, REF, MISS = "feature_data_required", "ec_reference_required", "multimodal_cache_miss"

# Nobody can hold a reference to an item that was never encoded: on cold caches the one that is sent is forged, and a
# forged reference is none.
EXPECTED = {
    "mrope": {
        "cold": {"tensors": OK, "metadata_and_ref": REF, "metadata": REF, "ref": DATA, "nothing": DATA},
        "later_chunk": {"tensors": OK, "metadata_and_ref": REF, "metadata": REF, "ref": DATA, "nothing": DATA},
        "slab_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": REF, "ref": DATA, "nothing": DATA},
        "prefix_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": REF, "ref": DATA, "nothing": DATA},
    },
    "plain": {
        "cold": {"tensors": OK, "metadata_and_ref": MISS, "metadata": MISS, "ref": MISS, "nothing": MISS},
        "later_chunk": {"tensors": OK, "metadata_and_ref": MISS, "metadata": MISS, "ref": MISS, "nothing": MISS},
        "slab_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": OK, "ref": OK, "nothing": OK},
        "prefix_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": OK, "ref": OK, "nothing": OK},
    },
}

_SAMPLING = {"temperature": 0, "max_tokens": 12}
_FILLER = "the quick brown fox jumps over the lazy dog and "
_seeds = count(pictures.HELD_OUT + 50_000)


@dataclass
class Served:
    app: Application
    model: str

    @property
    def kind(self) -> str:
        return MODELS[self.model]

    def render(self, text: str, *images: str) -> dict[str, Any]:
        """Token ids and full features of a chat prompt."""
        content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}} for image in images]
        messages = [{"role": "user", "content": [{"type": "text", "text": text}, *content]}]
        response = self.app.client.post("/v1/chat/completions/render", json={"model": self.model, "messages": messages})
        assert response.status_code == 200, response.text
        return {key: response.json()[key] for key in ("token_ids", "features")}

    def ask(self, body: dict[str, Any], *, stream: bool) -> tuple[str, list[int]]:
        """`200` and the tokens, or the error's type; an error must be a 400 with one body shape, stream or not."""
        body = {**body, "sampling_params": _SAMPLING, "stream": stream}
        response = self.app.client.post("/generate", json=body)
        if response.status_code != 200:
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code", "hashes", "retryable"}
            assert error["param"] == "features.image[0]" or error["type"] == MISS
            return error["type"], []
        if not stream:
            return OK, response.json()["token_ids"]
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return OK, [token for line in lines for token in json.loads(line)["token_ids"]]


@pytest.fixture(scope="module", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if request.param == "tiny-qwen2-vl" and not request.config.getoption("whole_matrix"):
        pytest.skip("tiny-qwen3-vl stands for models with M-RoPE; --whole-matrix runs both")
    sizes = {"max_num_batched_tokens": 256}
    stages = {
        "encoder": small_stage(**sizes),
        "prefill": small_stage(receiver_cache_bytes=0, **sizes),
        "decode": small_stage(**sizes),
    }
    with application(tmp_path_factory.mktemp("admission"), small_model(request.param, **stages)) as app:
        yield Served(app, request.param)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("state", STATES)
def test_cell(served: Served, state: str, payload: str, stream: bool) -> None:
    text = _FILLER * 40 if state == "later_chunk" else "Describe the image."
    rendered = served.render(text, _picture())
    name = f"client-{next(_seeds)}"
    full = _named(rendered, name)
    refs: dict[str, Any] = {}
    tokens: list[int] = []
    if state in {"slab_hit", "prefix_hit"}:
        answer = served.app.generate(**full, sampling_params=_SAMPLING, return_references=True)
        refs, tokens = answer["ec_transfer_params"], answer["token_ids"]
        assert len(refs) == 1
    if state == "slab_hit":
        full = _moved(served, full)
        tokens = []
    outcome, got = served.ask(_reduced(full, payload, refs), stream=stream)
    assert outcome == EXPECTED[served.kind][state][payload]
    if outcome == OK:
        again, whole = served.ask(full, stream=False)
        assert (again, whole) == (OK, got)
        assert tokens in ([], got)


def test_one_bad_item_refuses_the_whole_request(served: Served) -> None:
    rendered = served.render("Describe each picture.", _picture(), _picture())
    features = rendered["features"]
    features["mm_hashes"]["image"] = ["good", "bad"]
    features["kwargs_data"]["image"][1] = None
    features["mm_metadata"] = None
    response = served.app.client.post("/generate", json={**rendered, "sampling_params": _SAMPLING})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["hashes"] == ["bad"]
    assert error["type"] == (DATA if served.kind == "mrope" else MISS)


def test_a_layout_only_render_is_refused_and_the_whole_one_served(served: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_picture()}"}}
    chat = {"model": served.model, "messages": [{"role": "user", "content": [image]}]}
    bare = served.app.client.post("/v1/chat/completions/render", json={**chat, "mm_payload": "none"}).json()
    assert bare["features"]["kwargs_data"] is None
    request = {"token_ids": bare["token_ids"], "features": bare["features"]}
    assert served.ask(request, stream=False)[0] == (DATA if served.kind == "mrope" else MISS)
    whole = served.app.client.post("/v1/chat/completions/render", json={**chat, "mm_payload": "tensors"}).json()
    assert served.ask({"token_ids": whole["token_ids"], "features": whole["features"]}, stream=True)[0] == OK


def test_metrics_count_outcomes(served: Served) -> None:
    text = served.app.client.get("/metrics").text
    assert f'triptych_admission_total{{model="{served.model}",outcome="admitted"}}' in text


def _picture() -> str:
    return encoded(pictures.tiles(next(_seeds), layout=(2, 2)).image)


def _named(rendered: dict[str, Any], name: str) -> dict[str, Any]:
    features = {**rendered["features"], "mm_hashes": {"image": [name]}}
    return {"token_ids": rendered["token_ids"], "features": features}


def _moved(served: Served, full: dict[str, Any]) -> dict[str, Any]:
    """The same item behind other text, so that no prefix hit covers it."""
    other = served.render(_FILLER * 6, _picture())
    features = {**full["features"], "mm_placeholders": other["features"]["mm_placeholders"]}
    return {"token_ids": other["token_ids"], "features": features}


def _reduced(full: dict[str, Any], payload: str, refs: dict[str, Any]) -> dict[str, Any]:
    """The request with what `payload` says of its item. With a reference the item goes by the servers' own name."""
    features = dict(full["features"])
    if payload != "tensors":
        features["kwargs_data"] = None
    if payload not in {"tensors", "metadata_and_ref", "metadata"}:
        features["mm_metadata"] = None
    body = {"token_ids": full["token_ids"], "features": features}
    if payload in {"metadata_and_ref", "ref"}:
        refs = refs or _forged(features["mm_hashes"]["image"][0], features["mm_placeholders"]["image"][0]["length"])
        features["mm_hashes"] = {"image": list(refs)}
        body["ec_transfer_params"] = refs
    return body


def _forged(name: str, rows: int) -> dict[str, Any]:
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
