"""What a hostile client starts from: valid requests to the running pipeline, their answers, genuine references."""

from __future__ import annotations

import base64
import copy
import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import httpx

from models.pictures import HELD_OUT, tiles

Body = dict[str, Any]
Must = Literal["be refused", "be refused or served", "give the known tokens"]
"""`give the known tokens` allows a refusal too: what is served must be right."""

SAMPLING = {"temperature": 0, "max_tokens": 8}
_EXCERPT = 400


@dataclass(frozen=True)
class Attempt:
    """One request, sent `copies` times at once."""

    name: str
    path: str
    body: bytes
    must: Must
    copies: int = 1

    def excerpt(self) -> str:
        """The body as far as a log can bear."""
        text = self.body.decode(errors="replace")
        return text if len(text) <= _EXCERPT else f"{text[: _EXCERPT // 2]} ... {text[-_EXCERPT // 2 :]}"


@dataclass(frozen=True)
class Target:
    """What a client holds that knows the pipeline well: valid requests, their answer, genuine references."""

    client: httpx.Client
    model: str
    base: Body
    tokens: list[int]
    references: Body
    others: Body
    """References to another picture's encoding."""
    foreign: Body
    """A request by name alone, of an item that another tenant has sent under that name."""

    @classmethod
    def prepare(cls, client: httpx.Client) -> Self:
        """Render and serve what the mutations start from."""
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        base, other = (_rendered(client, model, seed) for seed in (0, 1))
        answer = _served(client, base)
        others = _served(client, other)["ec_transfer_params"]
        tenant = {**base, "cache_salt": "tenant", "features": {**base["features"], "mm_hashes": {"image": ["secret"]}}}
        _served(client, tenant)
        foreign = {**tenant, "cache_salt": "intruder"}
        foreign["features"] = {**tenant["features"], "kwargs_data": None, "mm_metadata": None}
        return cls(client, model, base, answer["token_ids"], answer["ec_transfer_params"], others, foreign)

    def good(self, cache_salt: str | None = None) -> Body:
        """A fresh copy of the valid token-in request."""
        body = copy.deepcopy(self.base)
        return body if cache_salt is None else {**body, "cache_salt": cache_salt}


Mutation = Callable[[str, random.Random, Target], Attempt]


def _rendered(client: httpx.Client, model: str, seed: int) -> Body:
    chat = {"model": model, "messages": [{"role": "user", "content": [image(png(seed)), text("Describe.")]}]}
    rendered = client.post("/v1/chat/completions/render", json=chat).raise_for_status().json()
    return {
        "model": model,
        "token_ids": rendered["token_ids"],
        "features": rendered["features"],
        "sampling_params": SAMPLING,
    }


def _served(client: httpx.Client, body: Body) -> Body:
    answer: Body = client.post("/generate", json={**body, "return_references": True}).raise_for_status().json()
    return answer


def png(seed: int) -> str:
    buffer = io.BytesIO()
    tiles(HELD_OUT + 9_000 + seed, layout=(2, 2)).image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def image(data: str) -> Body:
    url = data if ":" in data[:30] or not data else f"data:image/png;base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def text(text: str) -> Body:
    return {"type": "text", "text": text}
