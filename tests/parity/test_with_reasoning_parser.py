"""Reasoning apart from the answer. The name of this file puts it last: its servers are started anew."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import QUESTION, image, user
from tests.parity.streams import merged_chat
from tests.parity.test_messages import _says, _source

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
REGEX = {"extra_body": {"structured_outputs": {"regex": "(ab){2}c"}}}
THOUGHT = "I have thought </think> about it. Describe the image."
"""Ends the reasoning within the prompt: the answer is bound by its grammar from the first token on."""

CHATS: dict[str, dict[str, Any]] = {
    "text": {"messages": user("Count to five."), **GREEDY},
    "image": {"messages": user(image(90), QUESTION), **GREEDY, "logprobs": True},
    "unbound_while_it_thinks": {"messages": user(image(91), QUESTION), **GREEDY, **REGEX},
    "bound_after_its_thoughts": {"messages": user(image(92), THOUGHT), **GREEDY, **REGEX},
    "without_reasoning": {"messages": user("Count to five."), **GREEDY, "extra_body": {"include_reasoning": False}},
}

pytestmark = pytest.mark.parametrize("both", ["olmo3"], indirect=True)


@pytest.mark.parametrize("name", CHATS)
def test_chat(both: Both, name: str) -> None:
    both.same(lambda server: server.openai.chat.completions.create(model=MODEL, **CHATS[name]).to_dict(warnings=False))


def test_a_grammar_waits_for_the_end_of_reasoning(both: Both) -> None:
    """What the comparison above would not show if both were wrong alike."""

    def said(name: str) -> Any:
        return both.ours.openai.chat.completions.create(model=MODEL, **CHATS[name]).choices[0].message.to_dict()

    assert said("text")["reasoning"] == "one two three four five"
    bound = said("bound_after_its_thoughts")
    assert "ababc" in (bound.get("content") or "") + (bound.get("reasoning") or "")


@pytest.mark.parametrize("name", CHATS)
def test_chat_stream(both: Both, name: str) -> None:
    def stream(server: Contender) -> Any:
        chunks = server.openai.chat.completions.create(model=MODEL, stream=True, **CHATS[name])
        return merged_chat(chunk.to_dict(warnings=False) for chunk in chunks)

    both.same(stream)


def test_responses(both: Both) -> None:
    both.same(
        lambda server: server.openai.responses.create(
            model=MODEL, input="Count to five.", temperature=0, max_output_tokens=24
        ).to_dict(warnings=False)
    )


def test_messages(both: Both) -> None:
    both.same(
        lambda server: server.anthropic.messages.create(
            model=MODEL, messages=_says(_source(93), QUESTION), max_tokens=24, extra_body={"temperature": 0}
        ).to_dict(warnings=False)
    )


def test_token_in(both: Both) -> None:
    """What render says of the reasoning's end holds in the generation that follows."""

    def generate(server: Contender) -> Any:
        chat = {"model": MODEL, "messages": user(image(94), THOUGHT)}
        rendered = server.http.post("/v1/chat/completions/render", json=chat).json()
        passed = ("token_ids", "features", "reasoning_ended", "reasoning_parser_kwargs")
        body = {key: rendered[key] for key in passed if key in rendered}
        sampling = {"temperature": 0, "max_tokens": 16, "structured_outputs": {"regex": "(ab){2}c"}}
        response = server.http.post("/inference/v1/generate", json={**body, "sampling_params": sampling})
        assert response.status_code == 200, response.text
        return response.json()

    both.same(generate)
