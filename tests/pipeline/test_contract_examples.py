"""The examples of docs/feature_contract.md, sent to a running pipeline: each is answered as the page says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.served import SAMPLING, Served, named, picture, seeds

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.admission,
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("one_of_each_kind"),
]

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "feature_contract.md"
ROWS = (
    "Tensors",
    "Metadata and a valid reference",
    "Metadata, no valid reference",
    "Nothing, valid reference",
    "Nothing, no reference",
)
SUBJECT = {"mrope": "M-RoPE model", "plain": "Other model"}
PRINTED_FOR = "tiny-qwen3-vl"


def section(row: str) -> str:
    """The page's example for one row of the table."""
    found = re.search(rf"^### {re.escape(row)}\n(.*?)(?=^##)", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, row
    return found[1]


def fragment(row: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(re.findall(r"```json\n(.*?)```", section(row), re.DOTALL)[0])
    return found


def printed(row: str, kind: str) -> dict[str, Any] | None:
    """The error that the page prints for a kind of model; None where it says 200."""
    told = section(row).split(f"{SUBJECT[kind]}", 1)[1]
    if told.startswith(": 200"):
        return None
    error: dict[str, Any] = json.loads(re.findall(r"```json\n(.*?)```", told, re.DOTALL)[0])["error"]
    return error


@pytest.mark.parametrize("row", ROWS)
def test_example_is_answered_as_printed(served: Served, row: str) -> None:
    name = f"cat-{next(seeds)}"
    full = named(served.render("Describe the image.", picture()), name)
    example = fragment(row)
    features = {key: full["features"][key] for key in ("mm_hashes", "mm_placeholders")}
    for key, source in (("kwargs_data", "kwargs_data"), ("mm_metadata", "mm_metadata")):
        if key in example:
            features[key] = full["features"][source]
    body: dict[str, Any] = {"model": served.model, "token_ids": full["token_ids"], "features": features}
    called = name
    if example.get("ec_transfer_params") == {"cat": {}}:
        body["ec_transfer_params"] = {name: {}}
    elif "ec_transfer_params" in example:
        body["ec_transfer_params"] = served.encode(full, name)
        (called,) = body["ec_transfer_params"]
        features["mm_hashes"] = {"image": [called]}
    response = served.app.client.post("/generate", json={**body, "sampling_params": SAMPLING})
    expected = printed(row, served.kind)
    if expected is None:
        assert response.status_code == 200, response.text
        assert response.json()["token_ids"] == served.ask(full, stream=False)[1]
        return
    expected["hashes"] = [called]
    expected["message"] = expected["message"].replace(PRINTED_FOR, served.model)
    assert (response.status_code, response.json()["error"]) == (400, expected)
