"""Routes that work on tokens: tokenize, render, derender, and token-in generation. They have no client package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import QUESTION, image, user, video
from tests.parity.test_messages import _says, _source
from tests.parity.test_responses import _message

SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
CHATS = {
    "text": user("Count to five."),
    "image": user(image(70), QUESTION),
    "two_images": user(image(71), "and", image(72), "Describe each picture."),
    "video": user(video(4), QUESTION),
}


def post(server: Contender, path: str, **body: Any) -> Any:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, (server.name, response.text[:2000])
    return response.json()


TOKENIZE: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "Count to five."},
    "strings": {"prompt": "Count to five.", "return_token_strs": True},
    "plain": {"prompt": "Count to five.", "add_special_tokens": False},
    **{f"chat_{name}": {"messages": messages} for name, messages in CHATS.items()},
}


@pytest.mark.parametrize("name", TOKENIZE)
def test_tokenize(both: Both, name: str) -> None:
    both.same(lambda server: post(server, "/tokenize", model=MODEL, **TOKENIZE[name]))


def test_detokenize(both: Both) -> None:
    answer = both.same(lambda server: post(server, "/detokenize", model=MODEL, tokens=[300, 301, 302]))
    assert answer["prompt"]


RENDER: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"chat_{name}": ("/v1/chat/completions/render", {"messages": messages}) for name, messages in CHATS.items()},
    "chat_layout": ("/v1/chat/completions/render", {"messages": CHATS["image"], "mm_payload": "none"}),
    "completions": ("/v1/completions/render", {"prompt": ["Count to five.", "Say hello."], "max_tokens": 7}),
    "messages": ("/v1/messages/render", {"messages": _says(_source(73), QUESTION), "max_tokens": 7}),
    "responses": ("/v1/responses/render", {"input": _message(74), "max_output_tokens": 7}),
}


@pytest.mark.parametrize("name", RENDER)
def test_render(both: Both, name: str) -> None:
    """Tensors are compared by what they generate (below): their encoding orders fields as it likes."""

    def render(server: Contender) -> Any:
        path, body = RENDER[name]
        rendered = post(server, path, model=MODEL, **body)
        for one in rendered if isinstance(rendered, list) else [rendered]:
            for kind in ("kwargs_data", "mm_metadata"):
                if one["features"] and one["features"][kind]:
                    one["features"][kind] = {
                        modality: [None if item is None else len(item) for item in items]
                        for modality, items in one["features"][kind].items()
                    }
        return rendered

    both.same(render)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": SAMPLING,
    "logprobs": {**SAMPLING, "logprobs": 2},
    "sampled": {"temperature": 1.0, "seed": 5, "max_tokens": 8, "n": 2},
    "default_limit": {"temperature": 0},
    "stop": {**SAMPLING, "stop": [" three", " of"]},
}


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("chat", CHATS)
def test_token_in(both: Both, chat: str, sampling: str, mode: str) -> None:
    """Each server answers what it rendered itself."""
    if chat != "image" and sampling not in {"greedy", "default_limit"}:
        pytest.skip("one prompt is enough for how tokens are chosen")

    def generate(server: Contender) -> Any:
        rendered = post(server, "/v1/chat/completions/render", model=MODEL, messages=CHATS[chat])
        body = {key: rendered[key] for key in ("token_ids", "features")}
        params = SAMPLINGS[sampling]
        return post(server, "/inference/v1/generate", model=MODEL, output_mode=mode, sampling_params=params, **body)

    both.same(generate)


@pytest.mark.parametrize("chat", ["text", "image"])
def test_token_in_stream(both: Both, chat: str) -> None:
    def generate(server: Contender) -> Any:
        rendered = post(server, "/v1/chat/completions/render", model=MODEL, messages=CHATS[chat])
        body = {key: rendered[key] for key in ("token_ids", "features")} | {"sampling_params": SAMPLING}
        options = {"include_usage": True}
        response = server.http.post("/inference/v1/generate", json={**body, "stream": True, "stream_options": options})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        return {
            "tokens": [token for choice in choices for token in choice["token_ids"] or ()],
            "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
            "usage": chunks[-1]["usage"],
        }

    both.same(generate)


@pytest.mark.parametrize("chat", ["image", "video"])
def test_rendered_elsewhere(both: Both, chat: str) -> None:
    """What one server rendered the other generates from: vLLM's own render nodes can stand before the pipeline.

    What the pipeline cached of items that it rendered itself it does not take for those that clients bring.
    """
    rendered = {
        server.name: post(server, "/v1/chat/completions/render", model=MODEL, messages=CHATS[chat])
        for server in (both.ours, both.theirs)
    }

    def generate(server: Contender) -> Any:
        other = both.theirs if server is both.ours else both.ours
        body = {key: rendered[other.name][key] for key in ("token_ids", "features")}
        return post(server, "/inference/v1/generate", model=MODEL, sampling_params=SAMPLING, **body)

    both.same(generate, ignored={"cached_tokens"})


def test_derender(both: Both) -> None:
    chat_request = {"model": MODEL, "messages": CHATS["image"]}

    def derender(server: Contender) -> Any:
        rendered = post(server, "/v1/chat/completions/render", model=MODEL, messages=CHATS["image"])
        body = {key: rendered[key] for key in ("token_ids", "features")}
        generated = post(server, "/inference/v1/generate", model=MODEL, sampling_params=SAMPLING, **body)
        count = len(rendered["token_ids"])
        return [
            post(
                server,
                "/v1/chat/completions/derender",
                model=MODEL,
                generate_response=generated,
                chat_request=chat_request,
                prompt_tokens=count,
                prompt_token_ids=rendered["token_ids"],
            ),
            post(
                server,
                "/v1/completions/derender",
                model=MODEL,
                generate_responses=[generated],
                prompt_tokens=[count],
                prompt_token_ids=[rendered["token_ids"]],
            ),
        ]

    chat, completion = both.same(derender)
    said = completion["choices"][0]["text"]
    assert said
    assert chat["choices"][0]["message"]["content"].startswith(said)


def test_derender_stream(both: Both) -> None:
    chat_request = {"model": MODEL, "messages": CHATS["text"]}

    def derender(server: Contender) -> Any:
        rendered = post(server, "/v1/chat/completions/render", **chat_request)
        body = {"token_ids": rendered["token_ids"], "sampling_params": SAMPLING, "stream": True}
        response = server.http.post("/inference/v1/generate", json=body)
        assert response.status_code == 200, response.text
        state, said, ends = None, "", []
        for line in response.text.splitlines():
            if not line.startswith("data: {"):
                continue
            answer = post(
                server,
                "/v1/chat/completions/derender",
                model=MODEL,
                stream=True,
                generate_chunk=json.loads(line.removeprefix("data: ")),
                stream_state=state,
                chat_request=chat_request,
                prompt_token_ids=rendered["token_ids"],
            )
            state = answer["stream_state"]
            for choice in answer["chunk"]["choices"]:
                said += choice["delta"].get("content") or ""
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
        return said, ends

    said, _ = both.same(derender)
    assert said
