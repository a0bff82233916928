"""Bounds on what one ingress process has in flight, enforced before a response is opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from serving.errors import Overloaded

_RETRY_AFTER_S = 1.0


class Limits:
    """Slots for running requests, with a bounded queue in front of each kind.

    Text-only requests have slots of their own, so that they do not queue behind media.

    Args:
        max_running: Requests of each kind that may run at once.
        max_waiting: Requests of each kind that may wait for a slot; one more is refused.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._slots = {kind: asyncio.Semaphore(max_running) for kind in (True, False)}
        self._waiting = {True: 0, False: 0}
        self._running = {True: 0, False: 0}

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    @asynccontextmanager
    async def slot(self, *, has_media: bool) -> AsyncIterator[None]:
        """Hold a slot; it is freed when the stream ends, however it ends.

        Raises:
            Overloaded: As many requests wait as may. Retryable.
        """
        slots = self._slots[has_media]
        if slots.locked() and self._waiting[has_media] >= self._max_waiting:
            raise Overloaded("the application's queue is full", retry_after_s=_RETRY_AFTER_S)
        self._waiting[has_media] += 1
        try:
            await slots.acquire()
        finally:
            self._waiting[has_media] -= 1
        self._running[has_media] += 1
        try:
            yield
        finally:
            self._running[has_media] -= 1
            slots.release()
