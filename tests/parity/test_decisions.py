"""Routes of vLLM's own that read probabilities instead of text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import image_url

CHOICE = {
    "type": "choice",
    "instructions": "Which colour is it?",
    "criteria": {"red": "like fire", "blue": "like the sky"},
}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "scores": (
        "/generative_scoring",
        {"query": "Count to", "items": [" five", " three"], "label_token_ids": [300, 301]},
    ),
    "true_probabilities": (
        "/generative_scoring",
        {"query": "Count to", "items": [" five"], "label_token_ids": [300, 301], "apply_softmax": False},
    ),
    "decision": ("/v1/systemone", {"state": "a red circle", "questions": {"colour": CHOICE}}),
    "decision_image": (
        "/v1/systemone",
        {"state": "a picture", "questions": {"colour": CHOICE, "again": CHOICE}, "images": [image_url(95)]},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_same(both: Both, name: str) -> None:
    def ask(server: Contender) -> Any:
        path, body = BODIES[name]
        response = server.http.post(path, json={"model": MODEL, **body})
        return response.status_code, response.json() if response.status_code == 200 else None

    both.same(ask)
