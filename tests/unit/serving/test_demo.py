"""The demo's three requests against a small HTTP server that answers as `/generate` is documented to."""

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from PIL import Image

from models.pictures import HELD_OUT, TEXT_ANSWERS, tiles
from serving.demo import Conversation, Progress, Unexpected, converse, main

PICTURE = tiles(HELD_OUT, layout=(2, 3))
Change = Callable[[int, dict[str, Any]], None]


class FakePipeline:
    """Knows the one right answer to each of the demo's requests. Runs no model, and keeps one kind of cache only.

    Args:
        change: Called with the number of the request and the answer, which it may spoil.
        status: HTTP status of every answer.
    """

    def __init__(self, change: Change = lambda number, answer: None, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = fake.answer(body)
                change(len(fake.bodies), answer)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        names = ("render", "encode", "ec_transfer", "prefill", "first_token", "decode", "total")
        stages = dict.fromkeys(names, 2.0) | ({} if body["images"] else {"encode": 0.0, "ec_transfer": 0.0})
        provenance = "encoded" if len(self.bodies) == 1 else "prefill_slab"
        items = [{"identifier": "a" * 64, "modality": "image", "provenance": provenance} for _ in body["images"]]
        text = PICTURE.answer if body["images"] else TEXT_ANSWERS[body["prompt"]]
        return {"id": "x", "model": "m", "text": text, "token_ids": [1], "finish_reason": "stop", "usage": {},
                "stages": stages, "items": items}  # fmt: skip

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def talk() -> Iterator[Callable[..., tuple[FakePipeline, list[str]]]]:
    opened: list[FakePipeline] = []

    def run(*, is_trained: bool = True, **options: Any) -> tuple[FakePipeline, list[str]]:
        fake = FakePipeline(**options)
        opened.append(fake)
        lines: list[str] = []
        with httpx.Client(base_url=fake.url) as client:
            converse(Conversation(client, "tiny"), lines.append, is_trained=is_trained)
        return fake, lines

    yield run
    for fake in opened:
        fake.close()


def spoil(request: int, **changes: Any) -> Change:
    def change(number: int, answer: dict[str, Any]) -> None:
        if number == request:
            answer.update(changes)

    return change


def item(provenance: str) -> list[dict[str, str]]:
    return [{"identifier": "a", "modality": "image", "provenance": provenance}]


def test_it_sends_a_picture_twice_and_then_text(talk: Any) -> None:
    fake, lines = talk()
    first, again, text = fake.bodies
    assert first == again
    assert first["model"] == "tiny"
    assert first["prompt"] == PICTURE.question
    assert Image.open(io.BytesIO(base64.b64decode(first["images"][0]))).size == PICTURE.image.size
    assert text["images"] == []
    assert all(body["sampling_params"]["temperature"] == 0 for body in fake.bodies)
    shown = "\n".join(lines)
    for expected in (PICTURE.answer, "encoding  encoded", "encoding  prefill_slab", "prefill 2.0", "total 2.0"):
        assert expected in shown


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (spoil(1, text="row 1 pink"), "expected the answer"),
        (spoil(1, text=" "), "empty"),
        (spoil(1, items=item("prefill_slab")), "got"),
        (spoil(1, items=[]), "expected one picture"),
        (spoil(1, items=item("nowhere")), "answered something else"),
        (spoil(1, stages={}), "answered something else"),
        (spoil(2, text="something else"), "expected the answer"),
        (spoil(2, items=item("encoded")), "expected one picture"),
        (spoil(2, items=item("receiver_cache")), "expected one picture"),
        (spoil(3, text="who knows"), "expected the answer"),
        (spoil(3, items=item("encoded")), "reached the encoder"),
    ],
)
def test_what_is_not_as_shown_ends_it(talk: Any, change: Change, expected: str) -> None:
    with pytest.raises(Unexpected, match=expected):
        talk(change=change)


def test_a_model_of_ones_own_is_not_asked_for_trained_answers(talk: Any) -> None:
    def other_words(number: int, answer: dict[str, Any]) -> None:
        answer["text"] = "six coloured squares"

    talk(change=other_words, is_trained=False)


def test_a_refusal_is_shown_with_its_status(talk: Any) -> None:
    with pytest.raises(Unexpected, match="answered 503"):
        talk(status=503)


def test_a_server_that_is_gone_is_named() -> None:
    fake = FakePipeline()
    fake.close()
    with httpx.Client(base_url=fake.url) as client, pytest.raises(Unexpected, match="did not answer"):
        Conversation(client, "tiny").ask("hello")


def test_progress_speaks_on_every_change_and_never_stays_silent_for_long() -> None:
    lines: list[str] = []
    progress = Progress(lines.append)
    for elapsed_s, state in [(0.5, "STARTING"), (1.0, "STARTING"), (11.0, "STARTING"), (11.5, "RUNNING")]:
        progress(elapsed_s, {"prefill": state})
    assert [line.split() for line in lines] == [
        ["0", "s", "prefill", "starting"],
        ["11", "s", "prefill", "starting"],
        ["12", "s", "prefill", "running"],
    ]


def test_a_file_that_cannot_be_served_ends_it_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "no/such/file.yaml"]) == 1
    assert "cannot read no/such/file.yaml" in capsys.readouterr().err
