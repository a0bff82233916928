import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from serving.errors import FeatureDataRequired, Overloaded
from serving.gate import ASGIApp, DisconnectGuard, Gate, Message, Note, Receive, Scope, Send, current_exchange

JSON = [(b"content-type", b"application/json")]
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]
REFUSAL = FeatureDataRequired("the item needs data", param="features.image[0]", hashes=["abc"])


class Client:
    """Sends one request to an ASGI application and keeps what came back, message by message."""

    def __init__(self, method: str = "POST", path: str = "/v1/chat/completions") -> None:
        self.scope: Scope = {"type": "http", "method": method, "path": path, "headers": []}
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        self.messages.append(message)

    async def receive(self) -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def call(self, app: ASGIApp) -> None:
        await app(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        starts = [message for message in self.messages if message["type"] == "http.response.start"]
        assert len(starts) == 1
        return int(starts[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def is_complete(self) -> bool:
        return not self.messages[-1].get("more_body", False)


def start(headers: list[tuple[bytes, bytes]] = JSON, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(content: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


def app_that(act: Callable[[Send], Awaitable[None]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await act(send)

    return Gate(app)


async def test_a_route_that_generates_nothing_passes_through() -> None:
    async def act(send: Send) -> None:
        await send(start(status=418))
        await send(body(b"tea"))

    client = Client(path="/tokenize")
    await client.call(app_that(act))
    assert client.messages == [start(status=418), body(b"tea")]


async def test_methods_other_than_post_get_no_exchange() -> None:
    seen = []

    async def act(send: Send) -> None:
        seen.append(current_exchange())
        await send(start())
        await send(body(b"", more=True))
        assert len(client.messages) == 2  # nothing is held
        await send(body(b"ok"))

    client = Client(method="GET")
    await client.call(app_that(act))
    assert seen == [None]


async def test_a_stream_is_held_until_the_first_output() -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        await send(start(SSE))
        await send(body(b"event: response.created\n\n", more=True))
        generation = exchange.begin()
        await send(body(b"event: response.in_progress\n\n", more=True))
        assert client.messages == []
        generation.opened(Note([("render", 1.25), ("prefill", 3.0)], [("abc", "image", "encoded")]))
        await send(body(b"event: delta\n\n", more=True))
        assert len(client.messages) == 4
        await send(body(b""))

    client = Client(path="/v1/responses")
    await client.call(app_that(act))
    assert client.status == 200
    assert client.body == b"event: response.created\n\nevent: response.in_progress\n\nevent: delta\n\n"
    assert client.headers[b"server-timing"] == b"render;dur=1.2, prefill;dur=3.0"
    assert client.headers[b"x-triptych-items"] == b'"abc";modality=image;provenance=encoded'


@pytest.mark.parametrize("headers", [SSE, JSON])
async def test_a_refusal_becomes_the_status_whatever_the_application_sends(headers: list[tuple[bytes, bytes]]) -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        generation = exchange.begin()
        await send(start(headers))
        generation.failed(REFUSAL)
        await send(body(b"data: something of the application's own", more=True))
        await send(body(b"data: [DONE]\n\n"))

    client = Client()
    await client.call(app_that(act))
    assert client.status == 400
    assert client.is_complete
    assert json.loads(client.body)["error"] == {
        "message": "the item needs data",
        "type": "feature_data_required",
        "param": "features.image[0]",
        "code": 400,
        "hashes": ["abc"],
        "retryable": False,
    }


async def test_an_application_that_raises_after_a_refusal_says_nothing_new() -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        await send(start(SSE))
        exchange.begin().failed(REFUSAL)
        raise RuntimeError("the application's own trouble with it")

    client = Client()
    await client.call(app_that(act))
    assert client.status == 400


async def test_an_application_that_raises_by_itself_is_not_silenced() -> None:
    async def act(send: Send) -> None:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        await Client().call(app_that(act))


@pytest.mark.parametrize(("retry_after_s", "header"), [(1.6, b"2"), (None, b"1")])
async def test_retry_after_is_sent_where_a_retry_is_sensible(retry_after_s: float | None, header: bytes) -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        exchange.begin().failed(Overloaded("full", retry_after_s=retry_after_s))

    client = Client()
    await client.call(app_that(act))
    assert client.status == 503
    assert client.headers[b"retry-after"] == header


async def test_one_refused_prompt_of_several_refuses_all() -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        first, second = exchange.begin(), exchange.begin()
        await send(start(SSE))
        first.opened(Note())
        await send(body(b"data: first prompt's output\n\n", more=True))
        assert client.messages == []
        second.failed(REFUSAL)
        await send(body(b"", more=False))

    client = Client()
    await client.call(app_that(act))
    assert client.status == 400
    assert b"first prompt" not in client.body


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/chat/completions", b'data: {"error": {"message": "the item needs data"'),
        ("/v1/messages", b'event: error\ndata: {"type": "error", "error": {"message": "the item needs data"'),
        ("/v1/responses", b'event: error\ndata: {"type": "error", "code": "feature_data_required"'),
    ],
)
async def test_after_the_first_byte_an_error_is_the_streams_last_event(path: str, expected: bytes) -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        generation = exchange.begin()
        await send(start(SSE))
        generation.opened(Note())
        await send(body(b"data: 1\n\n", more=True))
        generation.failed(REFUSAL)
        await send(body(b"data: {}\n\n", more=True))
        await send(body(b"data: [DONE]\n\n"))

    client = Client(path=path)
    await client.call(app_that(act))
    assert client.status == 200
    assert client.is_complete
    assert client.body.startswith(b"data: 1\n\n" + expected)
    assert b"data: {}" not in client.body
    assert client.body.endswith(b"\n\n")


async def test_an_answer_that_was_complete_is_not_followed_by_an_error() -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        generation = exchange.begin()
        generation.opened(Note())
        await send(start())
        await send(body(b"all of it"))
        generation.failed(REFUSAL)

    client = Client()
    await client.call(app_that(act))
    assert client.body == b"all of it"
    assert len(client.messages) == 2


async def test_a_clients_name_for_an_item_cannot_end_the_header() -> None:
    async def act(send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        exchange.begin().opened(Note(items=[('evil"\r\nset-cookie: x', "im age", "encoded")]))
        await send(start())
        await send(body(b""))

    client = Client()
    await client.call(app_that(act))
    assert client.headers[b"x-triptych-items"] == (
        b'"evil%22%0D%0Aset-cookie:%20x";modality=im%20age;provenance=encoded'
    )


async def test_exchanges_of_concurrent_requests_are_told_apart() -> None:
    both_inside = asyncio.Barrier(2)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = current_exchange()
        assert exchange is not None
        generation = exchange.begin()
        await both_inside.wait()
        if scope["path"] == "/bad":
            generation.failed(REFUSAL)
        await send(start())
        await send(body(b"fine"))

    good, bad = Client(path="/good"), Client(path="/bad")
    gate = Gate(app)
    await asyncio.gather(good.call(gate), bad.call(gate))
    assert (good.status, bad.status) == (200, 400)


async def test_a_cancellation_from_outside_reaches_the_application_as_a_disconnect() -> None:
    heard = asyncio.Event()
    entered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        entered.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        heard.set()

    messages = asyncio.Queue[Message]()
    messages.put_nowait({"type": "http.request", "body": b"", "more_body": False})
    client = Client()
    task = asyncio.ensure_future(DisconnectGuard(app)(client.scope, messages.get, client.send))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard.is_set()


async def test_an_application_deaf_to_the_disconnect_is_cancelled_after_the_grace() -> None:
    entered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await asyncio.Event().wait()

    client = Client()
    task = asyncio.ensure_future(DisconnectGuard(app, grace_s=0.01)(client.scope, client.receive, client.send))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(other is asyncio.current_task() for other in asyncio.all_tasks())


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (
            b'{"error": {"message": "no", "type": "BadRequestError", "param": "x", "code": 400}}',
            {"message": "no", "type": "BadRequestError", "param": "x", "code": 400, "hashes": [], "retryable": False},
        ),
        (b'{"detail": "no"}', None),
        (b"no", None),
        (b"[]", None),
    ],
)
async def test_an_error_of_the_applications_own_has_the_keys_of_all_errors(
    sent: bytes, expected: dict[str, object] | None
) -> None:
    async def act(send: Send) -> None:
        await send(start([(b"content-length", str(len(sent)).encode())], status=400))
        await send(body(sent))

    client = Client()
    await client.call(app_that(act))
    assert client.status == 400
    assert client.headers[b"content-length"] == str(len(client.body)).encode()
    assert client.body == sent if expected is None else json.loads(client.body) == {"error": expected}
