"""`/v1/completions`, through OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.streams import merged_completion

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 12}
PROMPT = "<|im_start|>user\nCount to five.<|im_end|>\n<|im_start|>assistant\n"
TOKENS = [300, 301, 302, 303, 304]

CASES: dict[str, dict[str, Any]] = {
    "text": {"prompt": PROMPT, **GREEDY},
    "default_limit": {"prompt": PROMPT, "temperature": 0},
    "prompts": {"prompt": [PROMPT, "Say hello."], **GREEDY},
    "tokens": {"prompt": TOKENS, **GREEDY},
    "prompts_of_tokens": {"prompt": [TOKENS, TOKENS[:2]], **GREEDY},
    "echo": {"prompt": PROMPT, **GREEDY, "echo": True},
    "logprobs": {"prompt": PROMPT, **GREEDY, "logprobs": 3},
    "several": {"prompt": PROMPT, **SAMPLED, "n": 3},
    "several_of_each_prompt": {"prompt": [PROMPT, "Say hello."], **SAMPLED, "n": 2, "logprobs": 1},
    "stop": {"prompt": PROMPT, **GREEDY, "stop": [" four"]},
    "stop_token": {"prompt": PROMPT, **GREEDY, "extra_body": {"stop_token_ids": [2, 300]}},
    "regex": {"prompt": PROMPT, **GREEDY, "extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}}},
    "token_ids": {"prompt": PROMPT, **GREEDY, "extra_body": {"return_token_ids": True}},
    "without_special_tokens": {"prompt": "Say hello.", **GREEDY, "extra_body": {"add_special_tokens": False}},
    "truncated": {"prompt": "one two three " * 200, **GREEDY, "extra_body": {"truncate_prompt_tokens": 40}},
}

WHOLE_ONLY: dict[str, dict[str, Any]] = {
    "echo_logprobs": {"prompt": PROMPT, **GREEDY, "echo": True, "logprobs": 2},
    "echo_only": {"prompt": PROMPT, "temperature": 0, "max_tokens": 0, "echo": True},
    "prompt_logprobs": {"prompt": PROMPT, **GREEDY, "extra_body": {"prompt_logprobs": 2}},
    "beam_search": {"prompt": PROMPT, "max_tokens": 5, "n": 2, "extra_body": {"use_beam_search": True}},
}


@pytest.mark.parametrize("name", [*CASES, *WHOLE_ONLY])
def test_whole(both: Both, name: str) -> None:
    case = {**CASES, **WHOLE_ONLY}[name]
    both.same(lambda server: server.openai.completions.create(model=MODEL, **case).to_dict(warnings=False))


@pytest.mark.parametrize("name", CASES)
def test_stream(both: Both, name: str) -> None:
    def stream(server: Contender) -> Any:
        options = {"include_usage": True}
        chunks = server.openai.completions.create(model=MODEL, stream=True, stream_options=options, **CASES[name])
        return merged_completion(chunk.to_dict(warnings=False) for chunk in chunks)

    both.same(stream)
