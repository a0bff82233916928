"""Which requests may begin with prefill's token."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from prefill.first_token import first_chunk, prefill_token_counts


@pytest.mark.parametrize(("length", "counts"), [(30, True), (31, False), (32, False), (33, True), (64, False)])
def test_not_at_the_end_of_a_block(length: int, counts: bool) -> None:
    assert prefill_token_counts(SamplingParams(temperature=0), length, 32) is counts
    assert not prefill_token_counts(SamplingParams(temperature=0), length, None)


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"stop": ["x"]},
        {"min_tokens": 2},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"logprob_token_ids": [1]},
        {"bad_words": ["x"]},
        {"structured_outputs": StructuredOutputsParams(json="{}")},
        {"thinking_token_budget": 5},
        {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    ],
)
def test_only_where_the_step_is_like_any_other(change: dict[str, Any]) -> None:
    assert not prefill_token_counts(SamplingParams(**({"temperature": 0} | change)), 40, 32)


@pytest.mark.parametrize(
    "change",
    [{"logit_bias": {5: 1.0}}, {"allowed_token_ids": [5]}, {"stop_token_ids": [5]}, {"ignore_eos": True}, {"seed": 1}],
)
def test_what_applies_to_every_step_alike_may_stay(change: dict[str, Any]) -> None:
    assert prefill_token_counts(SamplingParams(temperature=0, **change), 40, 32)


def _output(text: str, reason: str = "length") -> RequestOutput:
    completion = CompletionOutput(0, text, [7], None, None, finish_reason=reason)
    return RequestOutput("r", None, [1], None, [completion], True, num_cached_tokens=3)


def test_a_token_that_ends_the_answer_is_the_answer() -> None:
    stopped = first_chunk(_output("", "stop"), SamplingParams(max_tokens=9))
    assert stopped is not None
    assert (stopped.finished, stopped.finish_reason, stopped.token_ids) == (True, "stop", (7,))
    spent = first_chunk(_output("a"), SamplingParams(max_tokens=1))
    assert spent is not None
    assert (spent.finished, spent.finish_reason) == (True, "length")


def test_a_token_without_text_is_left_to_decode() -> None:
    """It may be half a character."""
    assert first_chunk(_output(""), SamplingParams(max_tokens=9)) is None
    silent = first_chunk(_output(""), SamplingParams(max_tokens=9, detokenize=False))
    assert silent is not None
    assert (silent.finished, silent.finish_reason) == (False, None)
