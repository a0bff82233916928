"""Which answers may be resumed, and what a process still knows of their pixels."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from serving.answering import RenderedItems, one_for_each_answer
from serving.engine_input import features_of
from serving.render import ModelFront
from serving.stages import PipelineRequest
from tests.unit.serving.test_engine_input import render


def made(params: SamplingParams) -> list[PipelineRequest]:
    return one_for_each_answer(PipelineRequest("r", (1, 2), (), b""), params)


@pytest.mark.parametrize(
    ("change", "resumes"),
    [
        ({}, True),
        ({"temperature": 0.7, "seed": 1}, True),
        ({"stop": ["x"], "min_tokens": 3}, True),
        ({"logit_bias": {5: 1.0}}, True),
        ({"n": 2}, False),
        ({"logprobs": 1}, False),
        ({"prompt_logprobs": 1}, False),
        ({"frequency_penalty": 0.5}, False),
        ({"bad_words": ["x"]}, False),
        ({"structured_outputs": StructuredOutputsParams(json="{}")}, False),
    ],
)
def test_what_depends_on_more_than_the_tokens_before_cannot_resume(change: dict[str, Any], resumes: bool) -> None:
    assert {request.can_resume for request in made(SamplingParams(**change))} == {resumes}


@pytest.mark.parametrize("model", ["tiny-qwen2-vl", "tiny-llava"])
def test_pixels_are_found_as_long_as_the_renderer_remembers_them(
    model_front: Callable[[str], ModelFront], model: str
) -> None:
    front = model_front(model)
    prompt = render(front, [201, 202])
    features = features_of(prompt, front.metadata_fields)
    recall = RenderedItems(prompt, front.metadata_fields)
    del prompt
    gc.collect()
    for feature in features:
        assert recall(feature) == feature.payload
        assert recall(msgspec.structs.replace(feature, identifier="another")) is None
    front.renderer.mm_processor_cache.clear_cache()
    gc.collect()
    assert [recall(feature) for feature in features] == [None, None]
