"""Several models' applications behind one address: chosen by the body's `model`, merged where no model is named.

Pure ASGI: neither vllm nor ray.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from serving.errors import InvalidRequest, ModelNotFound, TriptychError
from serving.gate import ASGIApp, Message, Receive, Scope, Send, error_response

Check = Callable[[], Awaitable[None]]


class ServedModel(msgspec.Struct, frozen=True):
    """One model's application.

    `check_health` raises a `TriptychError` when the model cannot be served now. `prepare` is given every body on its
    way to the application.
    """

    app: ASGIApp
    check_health: Check
    prepare: Callable[[bytes], bytes]


class _NamesModel(msgspec.Struct, frozen=True):
    """All that is read of a body here: unknown fields are skipped without being built."""

    model: str | None = None


class Dispatcher:
    """ASGI application over those of all models.

    A body that names a model goes to that model's application. One that names none goes to the only model, or is
    refused where there are several. What has no body goes to the first: pages and descriptions are the same for all.

    Args:
        models: Applications by served name. The first also serves `/docs`, `/openapi.json` and `/metrics`.
    """

    def __init__(self, models: Mapping[str, ServedModel]) -> None:
        if not models:
            raise ValueError("no models to serve")
        self._models = dict(models)
        self._default = next(iter(self._models.values()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._default.app(scope, receive, send)
            return
        match scope["method"], scope["path"].rstrip("/"):
            case "GET", "/health":
                await self._health(scope, send)
            case "GET", "/v1/models":
                await self._list_models(scope, send)
            case "POST", _:
                await self._post(scope, receive, send)
            case _:
                await self._default.app(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read(receive)
        if body is None:
            return  # the client left before its request was complete
        try:
            model = self._choose(body)
        except TriptychError as error:
            await _respond(send, *error_response(scope["path"], error))
            return
        await model.app(scope, _replay(model.prepare(body), receive), send)

    def _choose(self, body: bytes) -> ServedModel:
        """The model for `body`. What is no JSON object at all is left for an application to refuse."""
        try:
            name = msgspec.json.decode(body, type=_NamesModel).model
        except msgspec.ValidationError as error:
            if body.lstrip()[:1] != b"{":
                return self._default
            raise InvalidRequest(f"model: {error}", param="model") from error
        except msgspec.DecodeError:
            return self._default
        if name in self._models:
            return self._models[name]
        known = ", ".join(self._models)
        if name is not None:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist; served: {known}", param="model")
        if len(self._models) > 1:
            raise InvalidRequest(f"several models are served, name one of them: {known}", param="model")
        return self._default

    async def _health(self, scope: Scope, send: Send) -> None:
        """200 when every model can be served, else the first one's error under its own status."""
        try:
            for model in self._models.values():
                await model.check_health()
        except TriptychError as error:
            await _respond(send, *error_response(scope["path"], error))
            return
        await _respond(send, 200, [(b"content-length", b"0")], b"")

    async def _list_models(self, scope: Scope, send: Send) -> None:
        answers = await asyncio.gather(*(_call(model.app, scope) for model in self._models.values()))
        for status, headers, body in answers:
            if status != 200:
                await _respond(send, status, headers, body)
                return
        merged: dict[str, Any] = {"object": "list", "data": []}
        for _, _, body in answers:
            merged["data"] += json.loads(body)["data"]
        content = json.dumps(merged).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await _respond(send, 200, headers, content)


async def _read(receive: Receive) -> bytes | None:
    """The whole body, or None when the client left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once more, then what comes after it."""
    pending = True

    async def replayed() -> Message:
        nonlocal pending
        if pending:
            pending = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


async def _call(app: ASGIApp, scope: Scope) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Ask an application for a page, in this process. Headers go along, so that it can authenticate the client."""
    status, headers, body = 500, [], bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], list(message.get("headers", ()))
        else:
            body.extend(message.get("body", b""))

    await app(dict(scope), receive, send)
    return status, headers, bytes(body)


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
