import json
from collections.abc import Callable
from typing import Any

import pytest

from serving.dispatch import Check, Dispatcher, ServedModel
from serving.errors import StageUnavailable
from serving.gate import ASGIApp, Message, Receive, Scope, Send
from tests.unit.serving.front_fakes import healthy


def app_named(name: str) -> ASGIApp:
    """Answers with its name and what it received."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/v1/models":
            content = json.dumps({"object": "list", "data": [{"id": name}]})
        else:
            body = (await receive()).get("body", b"") if scope["method"] == "POST" else b""
            content = json.dumps({"app": name, "body": body.decode()})
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": content.encode(), "more_body": False})

    return app


def served(name: str, check: Check = healthy, prepare: Callable[[bytes], bytes] = bytes) -> ServedModel:
    return ServedModel(app_named(name), check, prepare)


async def ask(app: ASGIApp, method: str, path: str, *chunks: bytes) -> tuple[int, Any]:
    parts = list(chunks) or [b""]
    messages: list[Message] = [
        {"type": "http.request", "body": part, "more_body": index < len(parts) - 1} for index, part in enumerate(parts)
    ]
    got: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": []}, receive, send)
    body = b"".join(message.get("body", b"") for message in got)
    return (got[0]["status"] if got else 0), json.loads(body) if body else None


@pytest.fixture
def two() -> Dispatcher:
    return Dispatcher({name: served(name) for name in ("a", "b")})


@pytest.fixture
def one() -> Dispatcher:
    return Dispatcher({"a": served("a")})


async def test_the_body_chooses(two: Dispatcher) -> None:
    for name in ("a", "b"):
        sent = json.dumps({"messages": ["x" * 100], "model": name}).encode()
        status, answer = await ask(two, "POST", "/v1/chat/completions", sent[:7], sent[7:])
        assert (status, answer["app"], answer["body"]) == (200, name, sent.decode())


@pytest.mark.parametrize("sent", [b"{}", b'{"model": null}'])
async def test_a_body_without_a_model(one: Dispatcher, two: Dispatcher, sent: bytes) -> None:
    assert (await ask(one, "POST", "/tokenize", sent))[1]["app"] == "a"
    status, answer = await ask(two, "POST", "/tokenize", sent)
    assert (status, answer["error"]["param"]) == (400, "model")


@pytest.mark.parametrize(("sent", "status"), [(b'{"model": "c"}', 404), (b'{"model": 7}', 400)])
async def test_a_model_that_is_not_served(one: Dispatcher, two: Dispatcher, sent: bytes, status: int) -> None:
    for dispatcher in (one, two):
        got, answer = await ask(dispatcher, "POST", "/v1/completions", sent)
        assert (got, answer["error"]["param"]) == (status, "model")


@pytest.mark.parametrize("sent", [b"", b"not json", b"[1]", b"\xff"])
async def test_what_is_no_json_object_is_an_applications_to_refuse(two: Dispatcher, sent: bytes) -> None:
    if sent == b"\xff":
        sent = "é".encode()
    assert (await ask(two, "POST", "/v1/completions", sent))[1]["app"] == "a"


async def test_a_client_that_leaves_while_sending_reaches_no_application(two: Dispatcher) -> None:
    got: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        got.append(message)

    await two({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
    assert got == []


async def test_models_are_listed_together(two: Dispatcher) -> None:
    status, answer = await ask(two, "GET", "/v1/models")
    assert (status, answer) == (200, {"object": "list", "data": [{"id": "a"}, {"id": "b"}]})


async def test_health_is_the_conjunction(two: Dispatcher) -> None:
    assert await ask(two, "GET", "/health") == (200, None)

    async def away() -> None:
        raise StageUnavailable("no replica of decode")

    sick = Dispatcher({"a": served("a"), "b": served("b", away)})
    status, answer = await ask(sick, "GET", "/health")
    assert (status, answer["error"]["message"]) == (503, "no replica of decode")


async def test_pages_come_from_the_first(two: Dispatcher) -> None:
    assert (await ask(two, "GET", "/docs"))[1]["app"] == "a"


def test_there_must_be_a_model() -> None:
    with pytest.raises(ValueError, match="no models"):
        Dispatcher({})


async def test_bodies_are_prepared_on_their_way() -> None:
    app = Dispatcher({"a": served("a", prepare=lambda body: body.replace(b"theirs", b"ours"))})
    status, answer = await ask(app, "POST", "/v1/completions", b'{"name": "theirs"}')
    assert (status, answer["body"]) == (200, '{"name": "ours"}')
