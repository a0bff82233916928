"""`/v1/responses`, through OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.parity.chat_cases import SCHEMA, TOOL
from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import QUESTION, image_url

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 24}


def _message(*numbers: int, words: str = QUESTION) -> list[dict[str, Any]]:
    pictures = [{"type": "input_image", "detail": "auto", "image_url": image_url(number)} for number in numbers]
    return [{"role": "user", "content": [*pictures, {"type": "input_text", "text": words}]}]


FUNCTION = {"type": "function", **TOOL["function"], "strict": True}

CASES: dict[str, dict[str, Any]] = {
    "text": {"input": "Count to five.", **GREEDY},
    "instructions": {"input": "Count to five.", "instructions": "Answer in few words.", **GREEDY},
    "image": {"input": _message(50), **GREEDY},
    "two_images": {"input": _message(51, 52, words="Describe each picture."), **GREEDY},
    "turns": {
        "input": [
            {"role": "user", "content": "Count to five."},
            {"role": "assistant", "content": "one two three four five"},
            {"role": "user", "content": "Count down from three."},
        ],
        **GREEDY,
    },
    "cut_off": {"input": "Count to five.", "temperature": 0, "max_output_tokens": 3},
    "default_limit": {"input": "Name the colours.", "temperature": 0},
    "logprobs": {
        "input": "Count to five.",
        **GREEDY,
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
    },
    "schema": {
        "input": _message(53),
        "temperature": 0,
        "max_output_tokens": 60,
        "text": {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}},
    },
    "tool_required": {
        "input": "Count to five.",
        "temperature": 0,
        "max_output_tokens": 80,
        "tools": [FUNCTION],
        "tool_choice": "required",
    },
    "sampled": {"input": "Who are you?", "temperature": 1.0, "max_output_tokens": 12, "extra_body": {"seed": 3}},
}


@pytest.mark.parametrize("name", CASES)
def test_whole(both: Both, name: str) -> None:
    both.same(lambda server: server.openai.responses.create(model=MODEL, **CASES[name]).to_dict(warnings=False))


@pytest.mark.parametrize("name", [name for name in CASES if name != "logprobs"])
def test_stream(both: Both, name: str) -> None:
    """The same events in the same order, but for how many deltas a text comes in."""

    def stream(server: Contender) -> Any:
        events: list[dict[str, Any]] = []
        for event in server.openai.responses.create(model=MODEL, stream=True, **CASES[name]):
            told = event.to_dict(warnings=False)
            told.pop("sequence_number")
            if events and "delta" in told and events[-1]["type"] == told["type"]:
                events[-1]["delta"] += told["delta"]
            else:
                events.append(told)
        return events

    both.same(stream)


def test_nothing_is_stored(both: Both) -> None:
    """vLLM keeps responses in one process, and only when told to: what would need them is refused."""

    def statuses(server: Contender) -> list[int]:
        found = []
        calls = (
            lambda: server.openai.responses.create(model=MODEL, input="hi", previous_response_id="resp_1"),
            lambda: server.openai.responses.create(model=MODEL, input="hi", background=True),
            lambda: server.openai.responses.retrieve("resp_1"),
            lambda: server.openai.responses.cancel("resp_1"),
        )
        for call in calls:
            with pytest.raises(openai.APIStatusError) as caught:
                call()
            found.append(caught.value.status_code)
        return found

    assert both.same(statuses) == [404, 400, 404, 404]
