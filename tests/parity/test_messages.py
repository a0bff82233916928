"""`/v1/messages`, through Anthropic's client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.parity.chat_cases import COLOUR
from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import QUESTION, image_url

GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}, "max_tokens": 24}


def _source(number: int) -> dict[str, Any]:
    data = image_url(number).partition(",")[2]
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def _says(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


TOOL = {
    "name": "paint",
    "description": "Paint the wall.",
    "strict": True,
    "input_schema": {
        "type": "object",
        "properties": {"colour": COLOUR},
        "required": ["colour"],
        "additionalProperties": False,
    },
}

CASES: dict[str, dict[str, Any]] = {
    "text": {"messages": _says("Count to five."), **GREEDY},
    "system": {"messages": _says("Count to five."), "system": "Answer in few words.", **GREEDY},
    "image": {"messages": _says(_source(60), QUESTION), **GREEDY},
    "two_images": {"messages": _says(_source(61), _source(62), "Describe each picture."), **GREEDY},
    "turns": {
        "messages": [
            *_says("Count to five."),
            {"role": "assistant", "content": "one two three four five"},
            *_says(_source(63), QUESTION),
        ],
        **GREEDY,
    },
    "stop": {"messages": _says("Count to five."), "stop_sequences": ["three"], **GREEDY},
    "cut_off": {"messages": _says("Count to five."), **GREEDY, "max_tokens": 3},
    "tool_any": {
        "messages": _says("Count to five."),
        **GREEDY,
        "max_tokens": 80,
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    },
    "tool_named": {
        "messages": _says(_source(64), QUESTION),
        **GREEDY,
        "max_tokens": 80,
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "paint"},
    },
    "tool_result": {
        "messages": [
            *_says("Count to five."),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "paint", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "done"}]},
        ],
        **GREEDY,
        "tools": [TOOL],
    },
}


@pytest.mark.parametrize("name", CASES)
def test_whole(both: Both, name: str) -> None:
    both.same(lambda server: server.anthropic.messages.create(model=MODEL, **CASES[name]).to_dict(warnings=False))


@pytest.mark.parametrize("name", CASES)
def test_stream(both: Both, name: str) -> None:
    """The message that the client puts together, and the order of its events."""

    def stream(server: Contender) -> Any:
        with server.anthropic.messages.stream(model=MODEL, **CASES[name]) as events:
            kinds = [event.type for event in events]
            message = events.get_final_message().to_dict(warnings=False)
        order = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
        return {"message": message, "first": order[0], "last": order[-1], "kinds": sorted(set(order))}

    both.same(stream)


@pytest.mark.parametrize("name", ["text", "image", "tool_any"])
def test_count_tokens(both: Both, name: str) -> None:
    case = {key: value for key, value in CASES[name].items() if key not in {"max_tokens", "extra_body"}}
    both.same(lambda server: server.anthropic.messages.count_tokens(model=MODEL, **case).to_dict())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_unknown_model(both: Both, stream: bool) -> None:
    def ask(server: Contender) -> int:
        with pytest.raises(anthropic.APIStatusError) as caught:
            server.anthropic.messages.create(model="nobody", messages=_says("hi"), max_tokens=4, stream=stream)
        return caught.value.status_code

    assert both.same(ask) == 404
