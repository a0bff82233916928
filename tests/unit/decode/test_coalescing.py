"""What a stream of chunks becomes on its way out of decode: fewer of them, the same answer, nothing late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from decode.coalescing import coalesced, joined
from serving.errors import EncodingUnavailable
from serving.protocol import DecodeChunk, TokenLogprob

LONG_S = 30.0
"""Never over in a test that passes."""


class Source:
    """Yields a chunk a token when told to, and knows whether it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[DecodeChunk | Exception] = asyncio.Queue()
        self.closed = False

    def say(self, words: str, *, finished: bool = False) -> None:
        for number, letter in enumerate(words):
            self.queue.put_nowait(chunk(letter, finished=finished and number == len(words) - 1))

    async def chunks(self) -> AsyncGenerator[DecodeChunk, None]:
        try:
            while True:
                item = await self.queue.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self.closed = True


def chunk(letter: str, *, finished: bool = False, logprob: float | None = None) -> DecodeChunk:
    logprobs = None if logprob is None else ((TokenLogprob(ord(letter), logprob, 1, letter),),)
    reason = "length" if finished else None
    return DecodeChunk(letter, (ord(letter),), finished, logprobs=logprobs, finish_reason=reason)


def texts(chunks: Sequence[DecodeChunk]) -> list[str]:
    return [each.text for each in chunks]


async def within(seconds: float, stream: AsyncGenerator[DecodeChunk, None]) -> DecodeChunk:
    return await asyncio.wait_for(anext(stream), seconds)


class TestCoalesced:
    async def test_the_first_chunk_waits_for_nothing_and_what_follows_is_joined_with_the_end(self) -> None:
        source = Source()
        async with aclosing(coalesced(source.chunks(), LONG_S)) as stream:
            source.say("a")
            assert (await within(5.0, stream)).text == "a"
            source.say("bcd")
            source.say("e", finished=True)
            last = await within(5.0, stream)
            assert (last.text, last.token_ids, last.finish_reason) == ("bcde", tuple(map(ord, "bcde")), "length")
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    async def test_a_slow_stream_is_not_held_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source, loop = Source(), asyncio.get_running_loop()
        read_clock, passed_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: read_clock() + passed_s)
        async with aclosing(coalesced(source.chunks(), LONG_S)) as stream:
            for letter in "abc":
                source.say(letter)
                assert (await within(5.0, stream)).text == letter
                passed_s += 2 * LONG_S

    async def test_what_is_held_comes_when_its_time_is_over(self) -> None:
        source = Source()
        async with aclosing(coalesced(source.chunks(), 0.1)) as stream:
            source.say("a")
            await anext(stream)
            began = time.monotonic()
            source.say("bc")
            assert (await within(5.0, stream)).text == "bc"
            assert time.monotonic() - began >= 0.09

    async def test_a_reader_that_lags_finds_everything_in_one_chunk(self) -> None:
        source = Source()
        async with aclosing(coalesced(source.chunks(), 0.0)) as stream:
            source.say("a")
            await anext(stream)
            source.say("bcd", finished=True)
            await asyncio.sleep(0.02)
            assert texts([each async for each in stream]) == ["bcd"]

    async def test_an_error_comes_after_what_was_held(self) -> None:
        source = Source()
        async with aclosing(coalesced(source.chunks(), LONG_S)) as stream:
            source.say("a")
            await anext(stream)
            source.say("bc")
            source.queue.put_nowait(EncodingUnavailable("lost"))
            assert (await within(5.0, stream)).text == "bc"
            with pytest.raises(EncodingUnavailable):
                await within(5.0, stream)
        assert source.closed

    async def test_closing_closes_the_source(self) -> None:
        source = Source()
        stream = coalesced(source.chunks(), LONG_S)
        source.say("ab")
        await anext(stream)
        await stream.aclose()
        assert source.closed

    async def test_a_reader_that_is_cancelled_while_it_waits_closes_the_source(self) -> None:
        source = Source()

        async def read() -> None:
            async with aclosing(coalesced(source.chunks(), LONG_S)) as stream:
                async for _ in stream:
                    pass

        reader = asyncio.ensure_future(read())
        source.say("ab")
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert source.closed


class TestJoined:
    def test_logprobs_of_all_tokens_are_kept_in_order(self) -> None:
        both = joined(chunk("a", logprob=-1.0), chunk("b", finished=True, logprob=-2.0))
        assert both.logprobs is not None
        assert [position[0].logprob for position in both.logprobs if position] == [-1.0, -2.0]
        assert both.finished

    def test_a_last_chunk_without_tokens_loses_no_logprobs(self) -> None:
        end = DecodeChunk("", (), finished=True, finish_reason="stop", cumulative_logprob=-1.0)
        both = joined(chunk("a", logprob=-1.0), end)
        assert both.logprobs is not None
        assert len(both.logprobs) == len(both.token_ids) == 1
