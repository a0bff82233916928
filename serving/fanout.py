"""Several streams as one, without threads of control that outlive the reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

Item = TypeVar("Item")


async def fan_out(
    start: Callable[[int], AsyncGenerator[Item, None]], count: int, stop: asyncio.Event
) -> AsyncGenerator[tuple[int, Item], None]:
    """Run `count` streams and yield (index, item) as items come.

    The first stream starts alone; its siblings start when it has yielded, so that they find what it left in
    caches. The first error ends all. Closing the generator, or setting `stop`, closes every stream before it
    returns; after `stop` it ends without an error.
    """
    streams = {0: start(0)}
    waiting: dict[asyncio.Task[Item], int] = {_next(streams[0]): 0}
    stopping = asyncio.ensure_future(stop.wait())
    try:
        while waiting:
            done, _ = await asyncio.wait({*waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                return
            for task in [task for task in waiting if task in done]:
                index = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                for sibling in range(len(streams), count):
                    streams[sibling] = start(sibling)
                    waiting[_next(streams[sibling])] = sibling
                waiting[_next(streams[index])] = index
                yield index, item
    finally:
        for task in (*waiting, stopping):
            task.cancel()
        await asyncio.gather(*waiting, stopping, return_exceptions=True)
        for stream in streams.values():
            await stream.aclose()


def _next(stream: AsyncGenerator[Item, None]) -> asyncio.Task[Item]:
    async def advance() -> Item:
        return await anext(stream)

    return asyncio.ensure_future(advance())
