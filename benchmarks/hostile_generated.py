"""Requests that schemathesis generates from the pipeline's own OpenAPI description."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import Case, GenerationMode, openapi
from schemathesis.schemas import BaseSchema

from benchmarks.hostile_target import Attempt

_ROUTES = ("/generate", "/inference/v1/generate", "/v1/chat/completions")
_MAX_TOKENS = 4


def generated(client: httpx.Client, model: str, number: int, *, seed: int) -> Iterator[Attempt]:
    """`number` requests to the generating routes, half of them against the description, half in its terms.

    One that happens to be valid may be served: nobody knows its tokens. It is kept short.
    """
    description = client.get("/openapi.json").raise_for_status().json()
    schema = openapi.from_dict(description)
    rng = random.Random(seed)
    share = number // (len(_ROUTES) * 2) + 1
    attempts = [
        Attempt(f"generated {mode.value}", path, _body(value, model, rng), "be refused or served")
        for path in _ROUTES
        for mode in GenerationMode
        for value in _examples(schema, path, mode, share, seed)
    ]
    rng.shuffle(attempts)
    yield from attempts[:number]


def _examples(schema: BaseSchema, path: str, mode: GenerationMode, number: int, seeded: int) -> list[Any]:
    found: list[Any] = []

    @seed(seeded)
    @settings(max_examples=number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schema[path]["POST"].as_strategy(generation_mode=mode))
    def collect(case: Case[Any]) -> None:
        found.append(case.body)

    collect()
    return found


def _body(value: Any, model: str, rng: random.Random) -> bytes:
    """The request's bytes. Most name the served model: else nothing beyond the dispatcher would see them."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict):
        value = dict(value)
        if rng.random() < 0.9:
            value["model"] = model
        _shorten(value)
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return repr(value).encode()


def _shorten(body: dict[str, Any]) -> None:
    sampling = body.get("sampling_params", {})
    if isinstance(sampling, dict):
        body["sampling_params"] = {"max_tokens": _MAX_TOKENS, **sampling}
    if "messages" in body:
        body.pop("sampling_params", None)
        body["max_tokens"] = body["max_completion_tokens"] = _MAX_TOKENS
