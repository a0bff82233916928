"""The feature contract on the running pipeline, cell by cell.

Where a cell is about the caches of *encodings* or *tokens*, what prefill's receiver cache keeps of earlier requests
must not stand in for what the request leaves out: it is made to forget.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.served import DATA, FILLER, MISS, OK, REF, SAMPLING, Served, moved, named, picture, reduced, seeds

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.admission,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("one_of_each_kind"),
]

STATES = ("cold", "later_chunk", "encoder_hit", "slab_hit", "prefix_hit", "receiver_hit")
PAYLOADS = ("tensors", "metadata_and_ref", "metadata", "ref", "nothing")

PROVENANCE = {
    "cold": "encoded",
    "later_chunk": "encoded",
    "encoder_hit": "encoder_slab",
    "slab_hit": "prefill_slab",
    "prefix_hit": "prefix_cache",
    "receiver_hit": "prefill_slab",
}
"""Where the item of an admitted cell comes from."""

# Nobody can hold a reference to an item that was never encoded: on cold caches the one that is sent is forged, and a
# forged reference is none.
EXPECTED = {
    "mrope": {
        "cold": {"tensors": OK, "metadata_and_ref": REF, "metadata": REF, "ref": DATA, "nothing": DATA},
        "later_chunk": {"tensors": OK, "metadata_and_ref": REF, "metadata": REF, "ref": DATA, "nothing": DATA},
        "encoder_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": REF, "ref": DATA, "nothing": DATA},
        "slab_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": REF, "ref": DATA, "nothing": DATA},
        "prefix_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": REF, "ref": DATA, "nothing": DATA},
        "receiver_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": OK, "ref": OK, "nothing": OK},
    },
    "plain": {
        "cold": {"tensors": OK, "metadata_and_ref": MISS, "metadata": MISS, "ref": MISS, "nothing": MISS},
        "later_chunk": {"tensors": OK, "metadata_and_ref": MISS, "metadata": MISS, "ref": MISS, "nothing": MISS},
        "encoder_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": MISS, "ref": OK, "nothing": MISS},
        "slab_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": OK, "ref": OK, "nothing": OK},
        "prefix_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": OK, "ref": OK, "nothing": OK},
        "receiver_hit": {"tensors": OK, "metadata_and_ref": OK, "metadata": OK, "ref": OK, "nothing": OK},
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("state", STATES)
def test_cell(served: Served, state: str, payload: str, stream: bool, request: pytest.FixtureRequest) -> None:
    if stream != ((STATES.index(state) + PAYLOADS.index(payload)) % 2 == 1):
        _only_in_the_whole_matrix(request)
    text = FILLER * 70 if state == "later_chunk" else "Describe the image."
    rendered = served.render(text, picture())
    name = f"client-{next(seeds)}"
    full = named(rendered, name)
    refs: dict[str, Any] = {}
    tokens: list[int] = []
    if state in {"slab_hit", "prefix_hit", "receiver_hit"}:
        answer = served.app.generate(**full, sampling_params=SAMPLING, return_references=True)
        refs, tokens = answer["ec_transfer_params"], answer["token_ids"]
        assert len(refs) == 1
    if state in {"slab_hit", "prefix_hit"}:
        served.forget()
    if state == "encoder_hit":
        refs = served.encode(full, name)
    if state in {"slab_hit", "receiver_hit"}:
        full = moved(served, full)
        tokens = []
    outcome, got, provenance = served.ask(reduced(full, payload, refs), stream=stream)
    assert outcome == EXPECTED[served.kind][state][payload]
    if outcome == OK:
        assert provenance == PROVENANCE[state]
        again, whole, _ = served.ask(full, stream=False)
        assert (again, whole) == (OK, got)
        assert tokens in ([], got)


def _only_in_the_whole_matrix(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("whole_matrix"):
        pytest.skip("the cell's other half stands for both; --whole-matrix runs both")


def test_one_bad_item_refuses_the_whole_request(served: Served) -> None:
    rendered = served.render("Describe each picture.", picture(), picture())
    features = rendered["features"]
    features["mm_hashes"]["image"] = ["good", "bad"]
    features["kwargs_data"]["image"][1] = None
    features["mm_metadata"] = None
    response = served.app.client.post("/generate", json={**rendered, "sampling_params": SAMPLING})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["hashes"] == ["bad"]
    assert error["type"] == (DATA if served.kind == "mrope" else MISS)


def test_a_layout_only_render_is_refused_and_the_whole_one_served(served: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture()}"}}
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
