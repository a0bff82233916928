"""`/v1/chat/completions`, through OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.chat_cases import CACHE_COUNTS, CASES, GREEDY, WHOLE_ONLY
from tests.parity.contenders import MODEL, Both, Contender
from tests.parity.media import QUESTION, image, user
from tests.parity.streams import merged_chat

USAGE = {
    "plain": {},
    "usage": {"include_usage": True},
    "every_chunk": {"include_usage": True, "continuous_usage_stats": True},
}


def ask(case: dict[str, Any]) -> Any:
    return lambda server: server.openai.chat.completions.create(model=MODEL, **case).to_dict(warnings=False)


@pytest.mark.parametrize("name", [*CASES, *WHOLE_ONLY])
def test_whole(both: Both, name: str) -> None:
    case = {**CASES, **WHOLE_ONLY}[name]
    both.same(ask(case), ignored=CACHE_COUNTS if "n" in case else ())


@pytest.mark.parametrize("name", [name for name in CASES if name != "beam_search"])
def test_stream(both: Both, name: str) -> None:
    def stream(server: Contender) -> Any:
        options = {"include_usage": True}
        chunks = server.openai.chat.completions.create(model=MODEL, stream=True, stream_options=options, **CASES[name])
        return merged_chat(chunk.to_dict(warnings=False) for chunk in chunks)

    both.same(stream, ignored=CACHE_COUNTS if "n" in CASES[name] else ())


@pytest.mark.parametrize("name", USAGE)
def test_usage_in_streams(both: Both, name: str) -> None:
    def usages(server: Contender) -> Any:
        options = USAGE[name]
        more = {"stream_options": options} if options else {}
        chunks = server.openai.chat.completions.create(
            model=MODEL, stream=True, messages=user(image(40), QUESTION), **GREEDY, **more
        )
        found = [usage.to_dict() for chunk in chunks if (usage := chunk.usage) is not None]
        # Chunks hold as many tokens as each server sent at once; that they count up is checked here, the end compared.
        counts = [usage["completion_tokens"] for usage in found]
        assert counts == sorted(counts)
        assert len(found) == (0 if not options else 1) or "continuous_usage_stats" in options
        return found[-1:]

    both.same(usages)


def test_cached_tokens_count_up(both: Both) -> None:
    """The second time all full blocks of the prompt are cached, image included."""

    def counts(server: Contender) -> list[int]:
        found = []
        for _ in range(2):
            answer = server.openai.chat.completions.create(
                model=MODEL, messages=user(image(41), QUESTION), temperature=0, max_tokens=4
            )
            assert answer.usage is not None
            details = answer.usage.prompt_tokens_details
            found.append(0 if details is None else details.cached_tokens or 0)
        return found

    first, second = both.same(counts)
    assert first == 0
    assert second >= 32
