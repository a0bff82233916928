"""The answers that docs/feature_contract.md prints are the ones the policy gives."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.errors import TriptychError, error_body
from serving.protocol import Metadata
from tests.unit.prefill.builders import GRID, MROPE, Request, image, reference

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "feature_contract.md"
MODEL = replace(MROPE, model="qwen2-vl")
REQUESTS = {
    "metadata_mismatch": Request(
        [image("cat", payload=Metadata({"image_grid_thw": [1, 8, 6]}))], MODEL, {"cat": reference("cat")}
    ),
    "ec_reference_required": Request([image("cat", payload=Metadata(GRID))], MODEL, {"cat": None}),
    "feature_data_required": Request([image("cat")], MODEL, {"cat": reference("cat")}),
}


def printed_bodies() -> dict[str, Any]:
    blocks = re.findall(r"```json\n(\{\"error\".*?)```", DOCUMENT.read_text(), re.DOTALL)
    bodies = [json.loads(block) for block in blocks]
    return {body["error"]["type"]: body for body in bodies if body["error"]["message"] != "..."}


def test_every_printed_body_has_its_request_here() -> None:
    assert printed_bodies().keys() == REQUESTS.keys()


@pytest.mark.parametrize("kind", REQUESTS)
def test_printed_body_is_the_answer(kind: str) -> None:
    with pytest.raises(TriptychError) as caught:
        REQUESTS[kind].check()
    assert error_body(caught.value) == printed_bodies()[kind]
