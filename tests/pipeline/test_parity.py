"""The pipeline answers token for token as one engine does, with prefix caching on, and no stage does another's work."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.aggregated import MAX_TOKENS, answers
from tests.pipeline.cases import CASES, Prompt
from tests.pipeline.served import Served
from tests.serving_process import Application

pytestmark = [pytest.mark.pipeline, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, list[dict[str, Any]]]:
    """What one engine answers."""
    cases = {case: [prompt.for_engine() for prompt in prompts] for case, prompts in CASES.items()}
    return answers(f"builtin:{served.model}", cases)


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_provenance(served: Served, expected: dict[str, list[dict[str, Any]]], case: str) -> None:
    prompts = CASES[case]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: _ask(served.app, prompt), prompts))
    for prompt, answer, single in zip(prompts, got, expected[case], strict=True):
        assert answer["token_ids"] == single["token_ids"], (answer["text"], single["text"])
        assert answer["usage"]["prompt_tokens"] == len(single["prompt_token_ids"])
        assert tuple(item["provenance"] for item in answer["items"]) == prompt.provenance


def _ask(app: Application, prompt: Prompt) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS}
    if not prompt.cut:
        return app.generate(messages=prompt.messages, sampling_params=sampling)
    model = app.client.get("/v1/models").json()["data"][0]["id"]
    response = app.client.post("/v1/chat/completions/render", json={"model": model, "messages": prompt.messages})
    assert response.status_code == 200, response.text
    rendered = response.json()
    last = rendered["features"]["mm_placeholders"]["image"][-1]
    token_ids = rendered["token_ids"][: last["offset"] + last["length"]]
    return app.generate(token_ids=token_ids, features=rendered["features"], sampling_params=sampling)
