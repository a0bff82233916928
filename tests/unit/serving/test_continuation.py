"""The text of a continued answer is the text that one detokenizer writes, wherever the answer was cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from serving.continuation import TextContinuation
from serving.engine_input import encode_sampling
from serving.protocol import DecodeChunk
from serving.render import ModelFront
from serving.stages import PipelineRequest

SAID = "Größe 世界 🙂 and then some more"


@pytest.fixture(params=["tiny-qwen2-vl", "tiny-llava"])
def tokenizer(request: pytest.FixtureRequest, model_front: Callable[[str], ModelFront]) -> Any:
    return model_front(request.param).renderer.tokenizer


def written(tokenizer: Any, params: SamplingParams, chunks: Sequence[DecodeChunk], *begun: Any) -> list[DecodeChunk]:
    prompt = tuple(tokenizer.encode("Say it.", add_special_tokens=False))
    request = PipelineRequest("r", prompt, (), encode_sampling(params))
    continuation = TextContinuation(tokenizer, request, *(begun or ((), "")))
    out: list[DecodeChunk] = []
    for chunk in chunks:
        out.append(continuation.add(chunk))
        if out[-1].finished:
            break
    return out


def one_by_one(tokens: Sequence[int], *, reason: str = "length") -> list[DecodeChunk]:
    last = len(tokens) - 1
    return [DecodeChunk("", (t,), i == last, finish_reason=reason if i == last else None) for i, t in enumerate(tokens)]


def text_of(chunks: Sequence[DecodeChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("stop", [[], ["then so"], ["never said, but long"]])
def test_cut_anywhere_the_text_is_the_same(tokenizer: Any, stop: list[str]) -> None:
    tokens = tokenizer.encode(SAID, add_special_tokens=False)
    params = SamplingParams(stop=stop, max_tokens=500)
    whole = written(tokenizer, params, one_by_one(tokens))
    assert text_of(whole) == (SAID if stop != ["then so"] else SAID[: SAID.index("then so")])
    for cut in range(1, len(whole)):
        before = text_of(whole[:cut])
        after = written(tokenizer, params, one_by_one(tokens[cut:]), tuple(tokens[:cut]), before)
        assert before + text_of(after) == text_of(whole)
        assert [t for c in after for t in c.token_ids] == [t for c in whole[cut:] for t in c.token_ids]
        assert (after[-1].finish_reason, after[-1].stop_reason) == (whole[-1].finish_reason, whole[-1].stop_reason)


def test_a_chunk_of_several_tokens_ends_at_the_stop_string(tokenizer: Any) -> None:
    tokens = tuple(tokenizer.encode(SAID, add_special_tokens=False))
    params = SamplingParams(stop=["and"], max_tokens=500)
    chunk = DecodeChunk("", tokens, True, finish_reason="length")
    (got,) = written(tokenizer, params, [chunk])
    assert (got.finish_reason, got.stop_reason) == ("stop", "and")
    assert got.text == SAID[: SAID.index("and")]
    assert len(got.token_ids) < len(tokens)


def test_a_stop_token_is_not_written(tokenizer: Any) -> None:
    tokens = tokenizer.encode("one two", add_special_tokens=False)
    got = written(tokenizer, SamplingParams(max_tokens=500), one_by_one(tokens, reason="stop"))
    assert text_of(got) == tokenizer.decode(tokens[:-1])


def test_without_text_there_is_none(tokenizer: Any) -> None:
    got = written(tokenizer, SamplingParams(detokenize=False), one_by_one([50, 51]))
    assert [(chunk.text, chunk.token_ids) for chunk in got] == [("", (50,)), ("", (51,))]
