"""Chunks of one answer, gathered so that a hop carries a few a moment and not one a token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from serving.protocol import DecodeChunk, Logprobs

__all__ = ["coalesced", "joined"]


async def coalesced(chunks: AsyncGenerator[DecodeChunk, None], within_s: float) -> AsyncGenerator[DecodeChunk, None]:
    """The same answer in fewer chunks: what comes within `within_s` of the last one that was passed on is joined.

    The first and the last chunk are passed on at once, and so is any that comes after a longer pause: only a stream
    faster than the interval is held up, never by more than `within_s`. Closing the generator closes `chunks`.

    vLLM merges outputs too while nobody asks for them; but whoever does not ask also gets the last one late.

    Args:
        within_s: Seconds; 0 passes on whatever has come.

    Raises:
        BaseException: What `chunks` raises, after what had come before it.
    """
    held = _Held(within_s)
    pump = asyncio.ensure_future(held.fill(chunks))
    try:
        while (chunk := await held.take()) is not None:
            yield chunk
        await pump  # raises what ended the chunks
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)
        await chunks.aclose()


class _Held:
    """What has come and was not taken yet, and when it is due."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._loop = asyncio.get_running_loop()
        self._chunk: DecodeChunk | None = None
        self._has_ended = False
        self._due = asyncio.Event()
        self._due_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def fill(self, chunks: AsyncGenerator[DecodeChunk, None]) -> None:
        """Take all chunks."""
        try:
            async for chunk in chunks:
                self._chunk = chunk if self._chunk is None else joined(self._chunk, chunk)
                if chunk.finished or self._loop.time() >= self._due_at:
                    self._due.set()
                elif self._timer is None:
                    self._timer = self._loop.call_at(self._due_at, self._due.set)
        finally:
            self._has_ended = True
            self._due.set()  # the end, or what ended them, waits for nothing

    async def take(self) -> DecodeChunk | None:
        """The next chunk when it is due; None after the last one."""
        await self._due.wait()
        chunk, self._chunk = self._chunk, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._has_ended:
            self._due.clear()
            self._due_at = self._loop.time() + self._within_s
        return chunk


def joined(first: DecodeChunk, second: DecodeChunk) -> DecodeChunk:
    """Two chunks that follow each other as one."""
    return DecodeChunk(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        finished=second.finished,
        cumulative_logprob=second.cumulative_logprob,
        logprobs=_both(first.logprobs, second.logprobs),
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        num_cached_tokens=second.num_cached_tokens,
        weight_version=second.weight_version,
    )


def _both(first: Logprobs | None, second: Logprobs | None) -> Logprobs | None:
    """A chunk without tokens has none of its own, though the answer has."""
    return None if first is None and second is None else (first or ()) + (second or ())
