"""What both servers refuse, and what the pipeline refuses by itself: with the same status on streams."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.parity.chat_cases import TOOL
from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import QUESTION, image, text, user, video

CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
HELLO = user("Say hello.")


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 4, **fields}


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": "Say hello.", "max_tokens": 4, **fields}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat_unknown_model": _chat(model="nobody"),
    "completion_unknown_model": _completion(model="nobody"),
    "responses_unknown_model": (RESPONSES, {"model": "nobody", "input": "hi"}),
    "messages_unknown_model": (MESSAGES, {"model": "nobody", "messages": HELLO, "max_tokens": 4}),
    "tokenize_unknown_model": ("/tokenize", {"model": "nobody", "prompt": "hi"}),
    "generate_unknown_model": (GENERATE, {"model": "nobody", "token_ids": [1], "sampling_params": {}}),
    "no_messages": (CHAT, {"model": MODEL}),
    "empty_messages": _chat(messages=[]),
    "odd_content": _chat(messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    "no_prompt": (COMPLETIONS, {"model": MODEL}),
    "messages_without_limit": (MESSAGES, {"model": MODEL, "messages": HELLO}),
    "temperature": _chat(temperature=-1),
    "temperature_type": _chat(temperature="hot"),
    "top_p": _chat(top_p=2),
    "top_k": _chat(top_k=-5),
    "min_p": _chat(min_p=3),
    "no_answers": _chat(n=0),
    "greedy_answers": _chat(n=2, temperature=0),
    "negative_limit": _chat(max_tokens=-1),
    "no_tokens": _chat(max_tokens=0),
    "limit_over_context": _chat(max_tokens=5000),
    "prompt_over_context": _chat(messages=user("one two three " * 2000)),
    "completion_over_context": _completion(prompt="one two three " * 2000),
    "min_tokens_over_limit": _chat(min_tokens=10),
    "top_logprobs_without_logprobs": _chat(top_logprobs=2),
    "top_logprobs_over_limit": _chat(logprobs=True, top_logprobs=1000),
    "prompt_logprobs_on_stream": _chat(prompt_logprobs=1, stream=True),
    "token_outside_vocabulary": _completion(prompt=[100000]),
    "empty_tokens": _completion(prompt=[]),
    "logit_bias_outside_vocabulary": _chat(logit_bias={"999999": 1}),
    "allowed_outside_vocabulary": _chat(allowed_token_ids=[999999]),
    "stop_without_text": _chat(stop=[""]),
    "odd_regex": _chat(structured_outputs={"regex": "("}),
    "odd_grammar": _chat(structured_outputs={"grammar": "nonsense ::"}),
    "odd_schema": _chat(structured_outputs={"json": {"type": "nonsense"}}),
    "two_structures": _chat(structured_outputs={"regex": "a", "choice": ["a"]}),
    "no_choice": _chat(structured_outputs={"choice": []}),
    "schema_missing": _chat(response_format={"type": "json_schema"}),
    "odd_format": _chat(response_format={"type": "poem"}),
    "tool_required_without_tools": _chat(tool_choice="required"),
    "tool_named_unknown": _chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "nobody"}}),
    "stream_options_without_stream": _chat(stream_options={"include_usage": True}),
    "too_many_images": _chat(messages=user(*map(image, range(80, 85)))),
    "too_many_videos": _chat(messages=user(video(5), video(6))),
    "audio": _chat(messages=user({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})),
    "odd_image": _chat(messages=user({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})),
    "odd_url": _chat(messages=user({"type": "image_url", "image_url": {"url": "gopher://x"}})),
    "odd_template": _chat(chat_template="{{ nonsense("),
    "odd_processor_kwargs": _chat(messages=user(image(86), QUESTION), mm_processor_kwargs={"size": "big"}),
    "suffix": _completion(suffix="x"),
    "prompt_embeds": _completion(prompt=None, prompt_embeds="AAAA"),
    "odd_priority": _chat(priority="high"),
    "empty_salt": _chat(cache_salt=""),
    "generate_without_tokens": (GENERATE, {"model": MODEL, "token_ids": [], "sampling_params": {}}),
    "generate_outside_vocabulary": (GENERATE, {"model": MODEL, "token_ids": [100000], "sampling_params": {}}),
    "tokens_outside_range": ("/detokenize", {"model": MODEL, "tokens": [-1]}),
    "responses_odd_input": (RESPONSES, {"model": MODEL, "input": [{"role": "user", "content": [{"type": "smell"}]}]}),
    "embeddings": ("/v1/embeddings", {"model": MODEL, "input": "hi"}),
    "lora": ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
}
STREAMED = frozenset({CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE})


def _status(server: Contender, path: str, body: dict[str, Any]) -> int:
    response = server.http.post(path, json=body)
    if server.name == "pipeline" and response.status_code not in {404, 405}:
        error = response.json()["error"]
        assert error["message"]
        assert error["code"] == response.status_code
    return response.status_code


@pytest.mark.parametrize("name", REFUSED)
def test_same_status(both: Both, name: str) -> None:
    path, body = REFUSED[name]
    assert 400 <= both.same(lambda server: _status(server, path, body)) < 500


@pytest.mark.parametrize("name", [name for name, (path, _) in REFUSED.items() if path in STREAMED])
def test_same_status_on_a_stream(both: Both, name: str) -> None:
    """What vLLM tells within a stream that it has opened with 200 the pipeline tells by a status."""
    path, body = REFUSED[name]
    if name == "stream_options_without_stream":
        pytest.skip("no error on a stream")
    plain = _status(both.ours, path, body)
    assert _status(both.ours, path, {**body, "stream": True}) == plain


OURS: dict[str, tuple[str, dict[str, Any], int]] = {
    "kv_addresses": (*_chat(kv_transfer_params={"remote_host": "127.0.0.1"}), 400),
    "kv_addresses_in_xargs": (*_chat(vllm_xargs={"kv_transfer_params": "x"}), 400),
    "unused_reference": (*_chat(ec_transfer_params={"x": {"ref": {}}}), 400),
    "private_address": (
        *_chat(messages=user({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}})),
        400,
    ),
    "local_file": (*_chat(messages=user({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}})), 400),
    "item_by_name_alone": (
        *_chat(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": None, "uuid": "unknown"}, text("what?")],
                }
            ]
        ),
        400,
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", OURS)
def test_refused_by_the_pipeline(both: Both, name: str, stream: bool) -> None:
    """What cannot work, or must not, is refused with a reason."""
    path, body, status = OURS[name]
    assert _status(both.ours, path, {**body, "stream": stream}) == status


def test_a_chosen_replica_is_refused(both: Both) -> None:
    response = both.ours.http.post(CHAT, json=_chat()[1], headers={"X-data-parallel-rank": "3"})
    assert response.status_code == 400
    assert "replica" in response.json()["error"]["message"]


def test_bodies_that_are_no_json(both: Both) -> None:
    def statuses(server: Contender) -> list[int]:
        json_type = {"content-type": "application/json"}
        return [
            server.http.post(CHAT, content=content, headers=headers).status_code
            for content, headers in (
                (b"{", json_type),
                (b"[]", json_type),
                (b"", json_type),
                (b"{}", {"content-type": "text/plain"}),
            )
        ]

    assert all(400 <= status < 500 for status in both.same(statuses))


def test_clients_see_their_own_errors(both: Both) -> None:
    def kinds(server: Contender) -> list[str]:
        found = []
        for model, fields in (("nobody", {}), (MODEL, {"temperature": -1}), (MODEL, {"n": 2, "temperature": 0})):
            for stream in (False, True):
                with pytest.raises(openai.APIStatusError) as caught:
                    server.openai.chat.completions.create(model=model, messages=HELLO, stream=stream, **fields)
                found.append(type(caught.value).__name__)
        return found

    assert both.same(kinds) == ["NotFoundError"] * 2 + ["BadRequestError"] * 4
