"""Every way in meets the same policy: stage handles, the application's handle, conversations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.serial_utils import tensor2base64

from serving.engine_input import encode_sampling
from serving.protocol import PrefillRequest, PrefillResult, decode, encode
from tests.pipeline.driver import Refused
from tests.pipeline.served import DATA, MISS, REF, SAMPLING, Served, named, picture, reduced, seeds

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.admission,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("one_of_each_kind"),
]


def test_prefills_own_door(served: Served) -> None:
    """Callers of the prefill deployment's handle meet the policy too, and prefill encodes what they send whole."""
    name = f"direct-{next(seeds)}"
    full = named(served.render("Describe it.", picture()), name)
    feature = served.feature(full, name)
    whole = PrefillRequest(name, tuple(full["token_ids"]), (feature,), {}, wire_sampling())
    bare = msgspec.structs.replace(whole, features=(msgspec.structs.replace(feature, payload=None),))
    prefill = f"{served.model}-prefill"
    with pytest.raises(Refused) as refused:
        served.handles.stage(prefill, "prefill", encode(bare))
    assert refused.value.type == (DATA if served.kind == "mrope" else MISS)
    assert refused.value.hashes == [feature.identifier]
    result = decode(PrefillResult, served.handles.stage(prefill, "prefill", encode(whole)))
    assert [item.provenance for item in result.items] == ["receiver_cache"]


def test_handle_callers_meet_the_same_gate(served: Served) -> None:
    full = named(served.render("Describe it.", picture()), f"handle-{next(seeds)}")
    with pytest.raises(Refused) as refused:
        served.handles.generate({**reduced(full, "nothing", {}), "sampling_params": SAMPLING})
    assert refused.value.type == (DATA if served.kind == "mrope" else MISS)
    assert refused.value.hashes == full["features"]["mm_hashes"]["image"]
    answer = served.handles.generate({**full, "sampling_params": SAMPLING})
    assert answer["token_ids"] == served.ask(full, stream=False)[1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_uuids_in_a_conversation(served: Served, stream: bool) -> None:
    """A picture by its uuid alone: refused while nobody has seen it, and then the picture that the tenant sent."""
    uuid = f"uuid-{next(seeds)}"
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}, "uuid": uuid}
    bare = {"type": "image_url", "image_url": None, "uuid": uuid}

    def ask(part: dict[str, Any], stream: bool, **more: Any) -> Any:
        body = {"model": served.model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 12, **more}
        return served.app.client.post("/v1/chat/completions", json={**body, "temperature": 0, "stream": stream})

    assert ask(bare, stream).status_code == 400
    seen = ask(image, False).json()["choices"][0]["message"]["content"]
    assert ask(bare, False).json()["choices"][0]["message"]["content"] == seen
    assert ask(bare, stream, cache_salt="another tenant").status_code == 400


def test_metadata_alone_in_a_conversation(served: Served) -> None:
    """`image_embeds` that bring metadata and no embeddings, as vLLM's own clients of an encoder cache send them."""
    if served.kind == "plain":
        pytest.skip("its images have no metadata")
    grid = tensor2base64(torch.tensor([1, 4, 4]))
    part = {"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}, "uuid": f"never-{next(seeds)}"}
    chat = {"model": served.model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
    for stream in (False, True):
        response = served.app.client.post("/v1/chat/completions", json={**chat, "stream": stream})
        assert (response.status_code, response.json()["error"]["type"]) == (400, REF)


def wire_sampling() -> bytes:
    return encode_sampling(SamplingParams(temperature=0, max_tokens=4))
