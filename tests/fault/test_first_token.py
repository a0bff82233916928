"""Prefill's own first token: the answer is what one engine gives, at every distance from the end of a KV block."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from models import pictures
from tests.aggregated import MAX_TOKENS, answers
from tests.fault.conftest import MODEL
from tests.pipeline.cases import encoded
from tests.serving_process import Application

pytestmark = [pytest.mark.fault, pytest.mark.flow, pytest.mark.timeout(900)]

_BLOCK = 32
_LENGTHS = (30, 31, 32, 33, 47, 62, 63, 64, 65, 95, 96, 97)
_WORDS = tuple(range(0, 34, 4))
_MODES = ("whole", "stream")


def _tokens(length: int) -> list[int]:
    """A prompt of `length` ordinary tokens, another for each length."""
    return random.Random(length).choices(range(20, 760), k=length)


def _picture(words: int) -> str:
    return encoded(pictures.shape(pictures.HELD_OUT + 777_000 + words).image)


def _text(words: int) -> str:
    return "Describe the image." + " the" * words


@pytest.fixture(scope="module")
def expected() -> dict[str, list[dict[str, Any]]]:
    cases: dict[str, list[Mapping[str, Any]]] = {f"tokens{n}": [{"token_ids": _tokens(n)}] for n in _LENGTHS}
    cases |= {f"image{n}": [{"parts": [{"image": _picture(n)}, _text(n)], "cut": False}] for n in _WORDS}
    return answers(f"builtin:{MODEL}", cases)


@pytest.mark.parametrize("length", _LENGTHS)
def test_text_prompts(app: Application, expected: dict[str, list[dict[str, Any]]], length: int) -> None:
    _check(app, {"token_ids": _tokens(length)}, expected[f"tokens{length}"][0])


@pytest.mark.parametrize("words", _WORDS)
def test_prompts_with_an_image(app: Application, expected: dict[str, list[dict[str, Any]]], words: int) -> None:
    _check(app, {"prompt": _text(words), "images": [_picture(words)]}, expected[f"image{words}"][0])


@pytest.mark.parametrize("end", ["max_tokens", "stop_token_ids"])
def test_an_answer_of_one_token(app: Application, expected: dict[str, list[dict[str, Any]]], end: str) -> None:
    """Decode is not asked, and prefill gets its blocks back."""
    whole = expected["tokens47"][0]
    ends = {"max_tokens": 1} if end == "max_tokens" else {"stop_token_ids": [whole["token_ids"][0]]}
    before = {outcome: app.metric("triptych_handoffs_total", outcome=outcome) for outcome in ("read", "returned")}
    answer = app.generate(token_ids=_tokens(47), sampling_params={"temperature": 0, **ends})
    assert answer["token_ids"] == whole["token_ids"][:1]
    assert answer["finish_reason"] == ("length" if end == "max_tokens" else "stop")
    assert answer["stop_reason"] == (None if end == "max_tokens" else whole["token_ids"][0])
    assert (answer["text"] == "") == (end == "stop_token_ids")
    assert app.metric("triptych_handoffs_total", outcome="read") == before["read"]
    assert app.metric("triptych_handoffs_total", outcome="returned") == before["returned"] + 1


@pytest.mark.parametrize("option", [{"logprobs": 1}, {"stop": ["never said"]}, {"repetition_penalty": 1.0001}])
def test_what_is_not_proven_is_left_to_decode(
    app: Application, expected: dict[str, list[dict[str, Any]]], option: dict[str, Any]
) -> None:
    before = app.metric("triptych_first_tokens_total", stage="prefill")
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS, **option}
    answer = app.generate(token_ids=_tokens(47), sampling_params=sampling)
    assert answer["token_ids"] == expected["tokens47"][0]["token_ids"]
    assert app.metric("triptych_first_tokens_total", stage="prefill") == before


def _check(app: Application, prompt: dict[str, Any], expected: Mapping[str, Any]) -> None:
    """Ask until the prompt is in every decode replica's prefix cache; each time the answer must be the engine's."""
    count = len(expected["prompt_token_ids"])
    early = count % _BLOCK not in (0, _BLOCK - 1)
    before = app.metric("triptych_first_tokens_total", stage="prefill")
    sampling = {"temperature": 0, "max_tokens": MAX_TOKENS}
    for _ in range(2):
        for mode in _MODES:
            got = (app.generate if mode == "whole" else app.stream)(**prompt, sampling_params=sampling)
            assert got["token_ids"] == expected["token_ids"], mode
            assert got["text"] == expected["text"], mode
            assert got["finish_reason"] == expected["finish_reason"], mode
            assert got["usage"]["prompt_tokens"] == count
            assert got["usage"]["completion_tokens"] == len(expected["token_ids"])
    told = len(expected["token_ids"]) > 0
    assert app.metric("triptych_first_tokens_total", stage="prefill") - before == (4 if early and told else 0)
