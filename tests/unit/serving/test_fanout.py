import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from serving.fanout import fan_out


class Source:
    """Streams `per_stream` numbers each; counts what is open."""

    def __init__(self, per_stream: int = 2, fail: int | None = None) -> None:
        self.per_stream = per_stream
        self.fail = fail
        self.open: set[int] = set()
        self.started: list[int] = []

    async def stream(self, index: int) -> AsyncGenerator[int, None]:
        self.open.add(index)
        self.started.append(index)
        try:
            for number in range(self.per_stream):
                await asyncio.sleep(0)
                if self.fail == index and number:
                    raise ValueError("a stream broke")
                yield number
        finally:
            self.open.discard(index)


async def test_every_item_comes_with_its_streams_index() -> None:
    source = Source()
    got = [pair async for pair in fan_out(source.stream, 3, asyncio.Event())]
    assert sorted(got) == [(index, number) for index in range(3) for number in range(2)]
    assert not source.open


async def test_siblings_start_when_the_first_has_yielded() -> None:
    source = Source()
    async with aclosing(fan_out(source.stream, 3, asyncio.Event())) as items:
        assert await anext(items) == (0, 0)
        await anext(items)
        assert source.started == [0, 1, 2]
    source = Source(per_stream=0)
    assert [pair async for pair in fan_out(source.stream, 3, asyncio.Event())] == []
    assert source.started == [0]


async def test_the_first_error_ends_all() -> None:
    source = Source(per_stream=50, fail=1)
    with pytest.raises(ValueError, match="a stream broke"):
        async for _ in fan_out(source.stream, 3, asyncio.Event()):
            pass
    assert not source.open


async def test_closing_closes_every_stream() -> None:
    source = Source(per_stream=50)
    async with aclosing(fan_out(source.stream, 3, asyncio.Event())) as items:
        for _ in range(6):
            await anext(items)
        assert source.open == {0, 1, 2}
    assert not source.open


async def test_stop_ends_a_stream_that_waits_for_ever() -> None:
    stop = asyncio.Event()

    async def waits(index: int) -> AsyncGenerator[int, None]:
        yield 1
        await asyncio.Event().wait()

    got = []
    async for pair in fan_out(waits, 1, stop):
        got.append(pair)
        stop.set()
    assert got == [(0, 1)]
