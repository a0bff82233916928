"""Work that is not interrupted when its caller leaves, because it ends by taking hold of something."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from serving.errors import TriptychError

__all__ = ["Abandoned"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Abandoned:
    """Sees work to its end for callers that have left, and undoes it. For short work: what is abandoned still runs."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, work: Coroutine[Any, Any, Result], undo: Callable[[Result], Awaitable[None]]) -> Result:
        """The result of `work`. If the caller is cancelled meanwhile, `undo` gets it instead."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.later(self._undone(task, undo))
            raise

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` without anybody who waits for it."""
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _undone(self, task: asyncio.Future[Result], undo: Callable[[Result], Awaitable[None]]) -> None:
        await undo(await task)


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except TriptychError as error:
        logger.info("what nobody waits for failed: %s", error)
