"""What a server tells of itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import user

OWN_ROUTES = {"/generate"}


def test_models(both: Both) -> None:
    def models(server: Contender) -> Any:
        found = [model.to_dict() for model in server.openai.models.list().data]
        for model in found:
            for permission in model["permission"]:
                permission.pop("id")
        return found

    found = both.ours.openai.models.list().data
    assert [model.id for model in found] == [MODEL]
    both.same(models)


@pytest.mark.parametrize("path", ["/health", "/version", "/ping", "/docs", "/metrics", "/nothing", "/tokenizer_info"])
def test_pages(both: Both, path: str) -> None:
    both.same(lambda server: server.http.get(path).status_code)


def test_load(both: Both) -> None:
    both.same(lambda server: (server.http.get("/load").status_code, server.http.get("/load").json()))


def test_routes(both: Both) -> None:
    """Every route of vLLM's server is there, and one of our own."""
    routes = {server.name: set(server.http.get("/openapi.json").json()["paths"]) for server in (both.ours, both.theirs)}
    assert routes["vLLM"] - routes["pipeline"] == set()
    assert routes["pipeline"] - routes["vLLM"] == OWN_ROUTES


def test_methods(both: Both) -> None:
    def statuses(server: Contender) -> list[int]:
        return [
            server.http.get("/v1/chat/completions").status_code,
            server.http.put("/v1/chat/completions", json={}).status_code,
            server.http.post("/health").status_code,
            server.http.post("/v1/models", json={}).status_code,
        ]

    both.same(statuses)


def test_sagemaker_routes(both: Both) -> None:
    def invoke(server: Contender) -> Any:
        body = {"model": MODEL, "messages": user("Count to five."), "temperature": 0, "max_tokens": 8}
        return server.http.post("/invocations", json=body).json()

    both.same(invoke)


def test_batch(both: Both) -> None:
    def batch(server: Contender) -> Any:
        chats = [user("Count to five."), user("Say hello.")]
        body = {"model": MODEL, "messages": chats, "temperature": 0, "max_tokens": 8}
        response = server.http.post("/v1/chat/completions/batch", json=body)
        return response.status_code, response.json()

    both.same(batch)


def test_request_ids_come_back(both: Both) -> None:
    def told(server: Contender) -> Any:
        body = {"model": MODEL, "messages": user("Say hello."), "max_tokens": 4}
        response = server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc"})
        return response.json()["id"]

    assert both.same(told).endswith("abc")
