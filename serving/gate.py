"""Holds an HTTP response back until its generation has been admitted and has produced something.

vLLM's application alone cannot refuse a stream: Starlette sends 200 before it iterates the body, and
`/v1/responses` emits events before it touches the engine. The gate buffers what the application sends. The
engine client finds the exchange through a context variable and opens the gate, or fails it with an error
that becomes the response's status, whatever the application makes of the exception.

Pure ASGI: neither vllm nor ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import quote

from serving.errors import TriptychError, error_body

__all__ = ["DisconnectGuard", "Exchange", "Gate", "Generation", "Note", "current_exchange"]

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

ITEMS_HEADER = b"x-triptych-items"
_RETRYABLE = (429, 503)
_HEADER_SAFE = "-._~:/+=@"
_exchange: ContextVar[Exchange | None] = ContextVar("triptych_exchange", default=None)


def current_exchange() -> Exchange | None:
    """The HTTP exchange that the calling task works for; None outside HTTP (deployment handles)."""
    return _exchange.get()


class Note:
    """What one generation wants said in the response's headers.

    Args:
        stages_ms: Milliseconds by stage, in the order of the stages.
        items: (identifier, modality, provenance) of each multimodal item, in prompt order.
    """

    def __init__(self, stages_ms: Iterable[tuple[str, float]] = (), items: Iterable[tuple[str, str, str]] = ()) -> None:
        self.stages_ms = tuple(stages_ms)
        self.items = tuple(items)


class Generation:
    """One prompt's share in an exchange."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_open = False

    @property
    def received_at(self) -> float:
        """When the request arrived, on the exchange's clock."""
        return self._exchange.received_at

    def opened(self, note: Note) -> None:
        """The first output is there."""
        if not self._is_open:
            self._is_open = True
            self._exchange._opened(note)

    def failed(self, error: TriptychError) -> None:
        """The prompt was refused or lost. The first failure decides the response of the whole exchange."""
        self._exchange._failed(error)


class Exchange:
    """One HTTP request and its response.

    Args:
        path: The request's path; decides how errors are written into a stream.
        send: Where the response goes.
        clock: Monotonic seconds.
    """

    def __init__(self, path: str, send: Send, clock: Callable[[], float] = time.monotonic) -> None:
        self.received_at = clock()
        self.path = path
        self._send = send
        self._pending = 0
        self._notes: list[Note] = []
        self._failure: TriptychError | None = None
        self._held: list[Message] = []
        self._started = False
        self._ended = False
        self._is_stream = False

    @property
    def failure(self) -> TriptychError | None:
        return self._failure

    def begin(self) -> Generation:
        """Announce a generation. All prompts of a request begin before the first of them is run."""
        self._pending += 1
        return Generation(self)

    def _opened(self, note: Note) -> None:
        self._pending -= 1
        self._notes.append(note)

    def _failed(self, error: TriptychError) -> None:
        if self._failure is None:
            self._failure = error

    async def send(self, message: Message) -> None:
        """Take a message of the application: forward, hold or drop it."""
        if self._failure is not None:
            await self.finish()
            return
        if self._started:
            self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await self._send(message)
            return
        self._held.append(message)
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last or (self._notes and not self._pending and message["type"] == "http.response.body"):
            await self._release(is_last)

    async def finish(self) -> None:
        """Answer a failed exchange in the application's place, once. Does nothing to one that did not fail."""
        if self._failure is None or self._ended:
            return
        self._ended = True
        if self._started:
            event = stream_error(self.path, self._failure) if self._is_stream else b""
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
            return
        self._started = True
        status, headers, body = error_response(self.path, self._failure)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _release(self, is_last: bool) -> None:
        held, self._held = self._held, []
        self._started, self._ended = True, is_last
        for message in completed_error(held) if is_last else held:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                self._is_stream = any(name == b"content-type" and b"event-stream" in value for name, value in headers)
                message = {**message, "headers": headers + note_headers(self._notes)}
            await self._send(message)


class Gate:
    """ASGI middleware that gives every POST an `Exchange`. Other methods never generate and pass untouched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["path"], send)
        token = _exchange.set(exchange)
        try:
            await self._app(scope, receive, exchange.send)
        except Exception:
            # What the application raises over a failure that it has been told about says nothing new to the client.
            if exchange.failure is None:
                raise
            logger.debug("raised over a failed request at %s", scope["path"], exc_info=True)
        finally:
            _exchange.reset(token)
        await exchange.finish()


class DisconnectGuard:
    """ASGI middleware that turns a cancellation from outside into the `http.disconnect` that handlers wait for.

    Ray Serve cancels the application's task when the client of a non-streaming request leaves. vLLM's handlers
    run in tasks of their own that such a cancellation does not reach; they listen for the message instead.

    Args:
        app: The application.
        grace_s: Longest wait for the application to wind up after the message; then its task is cancelled.
    """

    def __init__(self, app: ASGIApp, grace_s: float = 5.0) -> None:
        self._app = app
        self._grace_s = grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = asyncio.Event()
        task = asyncio.ensure_future(self._app(scope, _until(gone, receive), send))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            gone.set()
            await asyncio.wait({task}, timeout=self._grace_s)
            task.cancel()
            # Retrieves the outcome: nobody is left to tell an error to.
            await asyncio.gather(task, return_exceptions=True)
            raise


def _until(gone: asyncio.Event, receive: Receive) -> Receive:
    """`receive`, answering `http.disconnect` as soon as `gone` is set."""

    async def watched() -> Message:
        message, left = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
        try:
            await asyncio.wait({message, left}, return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() and not gone.is_set() else {"type": "http.disconnect"}
        finally:
            left.cancel()
            message.cancel()

    return watched


def error_response(path: str, error: TriptychError) -> tuple[int, Headers, bytes]:
    """Status, headers and body that tell `error` to a client of `path`."""
    body = json.dumps(_body(path, error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after_s is not None or error.http_status in _RETRYABLE:
        headers.append((b"retry-after", str(max(1, round(error.retry_after_s or 0.0))).encode()))
    return error.http_status, headers, body


def completed_error(messages: list[Message]) -> list[Message]:
    """An error that the application found by itself, with the keys that all errors have; anything else as it is."""
    start = messages[0]
    if start["type"] != "http.response.start" or start["status"] < 400:
        return messages
    try:
        body = json.loads(b"".join(message.get("body", b"") for message in messages[1:]))
    except ValueError:
        return messages
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict) or "message" not in detail:
        return messages
    status = start["status"]
    body["error"] = {"param": None, "code": status, "hashes": [], "retryable": status in _RETRYABLE, **detail}
    content = json.dumps(body).encode()
    headers = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
    headers.append((b"content-length", str(len(content)).encode()))
    return [{**start, "headers": headers}, {"type": "http.response.body", "body": content, "more_body": False}]


def stream_error(path: str, error: TriptychError) -> bytes:
    """The event that ends a stream of `path` with `error`, as that API's clients expect it."""
    body = _body(path, error)
    if path.endswith("/v1/messages"):
        return b"event: error\ndata: " + json.dumps(body).encode() + b"\n\n"
    if path.endswith("/v1/responses"):
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param, **body}
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
    return b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"


def note_headers(notes: Iterable[Note]) -> Headers:
    """`Server-Timing` (of several prompts the slowest counts) and the items' provenance, as structured fields."""
    slowest: dict[str, float] = {}
    items: list[str] = []
    for note in notes:
        for stage, ms in note.stages_ms:
            slowest[stage] = max(ms, slowest.get(stage, 0.0))
        # A client may have chosen the identifier: nothing in it may end the header.
        items += [
            f'"{quote(name, safe=_HEADER_SAFE)}";modality={quote(modality, safe="")};provenance={provenance}'
            for name, modality, provenance in note.items
        ]
    headers: Headers = []
    if slowest:
        timing = ", ".join(f"{stage};dur={ms:.1f}" for stage, ms in slowest.items())
        headers.append((b"server-timing", timing.encode("ascii")))
    if items:
        headers.append((ITEMS_HEADER, ", ".join(items).encode("ascii")))
    return headers


def _body(path: str, error: TriptychError) -> dict[str, Any]:
    body = error_body(error)
    return {"type": "error", **body} if path.endswith("/v1/messages") else body
