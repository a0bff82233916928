"""`make demo`: start the pipeline, ask it about a picture that is drawn here, show what each stage did, stop it.

Three requests: a new picture, the same picture again (its encoding must not be computed twice), text alone. Ends
with a status other than 0 when an answer is wrong, a stage did not do what it should, or a process is left.
"""

from __future__ import annotations

import argparse
import base64
import io
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import msgspec

from configs.schema import ConfigError, load
from models.pictures import HELD_OUT, TEXT_ANSWERS, Picture, tiles
from models.registry import PREFIX
from serving.local import LocalPipeline, PipelineFailed, State
from serving.protocol import ItemProvenance

__all__ = ["Answer", "Conversation", "Unexpected", "converse", "main"]

_REQUEST_TIMEOUT_S = 120.0
_REPORT_EVERY_S = 10.0
_SEED = HELD_OUT  # a picture that the built-in models never saw in training


class Unexpected(Exception):
    """An answer or a stage is not what the demo shows it to be."""


class Item(msgspec.Struct, frozen=True):
    identifier: str
    modality: str
    provenance: ItemProvenance


class Stages(msgspec.Struct, frozen=True):
    """Milliseconds."""

    render: float
    encode: float
    ec_transfer: float
    prefill: float
    first_token: float
    decode: float
    total: float


class Answer(msgspec.Struct, frozen=True):
    """What `POST /generate` answers, as far as it is shown here."""

    text: str
    finish_reason: str
    stages: Stages
    items: tuple[Item, ...]


class Conversation:
    """Asks one model over HTTP.

    Args:
        client: Its base URL is the pipeline's.
        model: The served name.
    """

    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model

    def ask(self, prompt: str, pictures: Sequence[Picture] = ()) -> Answer:
        """The model's greedy answer.

        Raises:
            Unexpected: The request was refused, or the answer does not have the documented shape.
        """
        body = {
            "model": self._model,
            "prompt": prompt,
            "images": [_base64_png(picture) for picture in pictures],
            "sampling_params": {"temperature": 0, "max_tokens": 64},
        }
        try:
            response = self._client.post("/generate", json=body)
        except httpx.TransportError as error:
            raise Unexpected(f"POST /generate did not answer: {error!r}") from error
        if response.status_code != httpx.codes.OK:
            raise Unexpected(f"POST /generate answered {response.status_code}: {response.text[:500]}")
        try:
            return msgspec.json.decode(response.content, type=Answer)
        except msgspec.DecodeError as error:
            raise Unexpected(f"POST /generate answered something else: {error}") from error


def converse(conversation: Conversation, say: Callable[[str], None], *, is_trained: bool) -> None:
    """The three requests, shown and judged.

    Args:
        conversation: Whom to ask.
        say: Takes one line for the reader.
        is_trained: Whether the model must give the answers that the built-in ones were trained to give.

    Raises:
        Unexpected: Naming what is wrong.
    """
    picture = tiles(_SEED, layout=(2, 3))
    say(f"1. a new picture: 2 rows of 3 tiles, {picture.image.width} x {picture.image.height} pixels")
    first = conversation.ask(picture.question, [picture])
    _show(first, picture.question, say)
    _demand_answer(first, picture.answer if is_trained else None)
    _demand_provenance(first, {ItemProvenance.ENCODED})

    say("2. the same picture again")
    again = conversation.ask(picture.question, [picture])
    _show(again, picture.question, say)
    _demand_answer(again, first.text)
    _demand_provenance(again, set(ItemProvenance) - {ItemProvenance.ENCODED, ItemProvenance.RECEIVER_CACHE})
    say("   no vision tower ran")

    question, expected = next(iter(TEXT_ANSWERS.items()))
    say("3. text alone")
    text = conversation.ask(question)
    _show(text, question, say)
    _demand_answer(text, expected if is_trained else None)
    if text.items or text.stages.encode > 0:
        raise Unexpected("a prompt without a picture reached the encoder")


def _show(answer: Answer, question: str, say: Callable[[str], None]) -> None:
    say(f"   asked     {question}")
    say(f"   answered  {answer.text}")
    for item in answer.items:
        say(f"   encoding  {item.provenance} ({item.modality} {item.identifier[:12]})")
    say("   ms        " + "  ".join(f"{stage} {ms:.1f}" for stage, ms in msgspec.structs.asdict(answer.stages).items()))


def _demand_answer(answer: Answer, expected: str | None) -> None:
    if not answer.text.strip():
        raise Unexpected("the answer is empty")
    if expected is not None and answer.text.strip() != expected.strip():
        raise Unexpected(f"expected the answer {expected!r}")


def _demand_provenance(answer: Answer, allowed: set[ItemProvenance]) -> None:
    found = [item.provenance for item in answer.items]
    if len(found) != 1 or found[0] not in allowed:
        raise Unexpected(f"expected one picture whose encoding is one of {sorted(allowed)}, got {found}")


def _base64_png(picture: Picture) -> str:
    buffer = io.BytesIO()
    picture.image.save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


class Progress:
    """Tells how the start goes: on every change, and every ten seconds, so that a wait is never silent."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._last: State = {}
        self._last_s = 0.0

    def __call__(self, elapsed_s: float, state: State) -> None:
        if state == self._last and elapsed_s - self._last_s < _REPORT_EVERY_S:
            return
        self._last, self._last_s = state, elapsed_s
        self._say(f"   {elapsed_s:4.0f} s  " + "  ".join(f"{name} {word.lower()}" for name, word in state.items()))


def _say(line: str) -> None:
    print(line, flush=True)


def run(config: Path, say: Callable[[str], None]) -> None:
    """The whole demo.

    Raises:
        ConfigError: The file cannot be served.
        PipelineFailed: It did not come up.
        Unexpected: An answer or a stage is wrong, or a process is left.
    """
    model = load(config).models[0]
    say(f"starting {model.served_name}: Ray and three engines on the {model.device}, a minute or two on two cores")
    pipeline = LocalPipeline(config, on_progress=Progress(say))
    with pipeline:
        say(f"ready at {pipeline.url}")
        with httpx.Client(base_url=pipeline.url, timeout=_REQUEST_TIMEOUT_S) as client:
            converse(Conversation(client, model.served_name), say, is_trained=model.model.startswith(PREFIX))
        say("stopping")
    if left := pipeline.survivors():
        raise Unexpected(f"processes are left: {left}")
    say("stopped, nothing is left")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m serving.demo", description="Show the pipeline at work.")
    parser.add_argument("--config", type=Path, default=Path("configs/pipeline.yaml"))
    config: Path = parser.parse_args(arguments).config
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # asked to end, it cleans up as after Ctrl-C
    try:
        run(config, _say)
    except (ConfigError, PipelineFailed, Unexpected) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the pipeline is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
