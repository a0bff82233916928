"""Work whose caller leaves is seen to its end and undone."""

from __future__ import annotations

import asyncio

import pytest

from serving.abandoned import Abandoned
from serving.errors import EngineFault


async def test_a_caller_that_stays_gets_the_result() -> None:
    undone: list[int] = []

    async def undo(result: int) -> None:
        undone.append(result)

    assert await Abandoned().run(asyncio.sleep(0, 7), undo) == 7
    assert undone == []


async def test_a_caller_that_leaves_has_the_result_undone() -> None:
    gate, undone = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        await gate.wait()
        return 7

    async def undo(result: int) -> None:
        assert result == 7
        undone.set()

    abandoned = Abandoned()
    caller = asyncio.ensure_future(abandoned.run(work(), undo))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not undone.is_set()
    gate.set()
    await undone.wait()


async def test_failures_are_the_callers_while_it_is_there_and_logged_when_not(caplog: pytest.LogCaptureFixture) -> None:
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()
        raise EngineFault("broken")

    async def undo(result: None) -> None:
        raise AssertionError("there is nothing to undo")

    abandoned = Abandoned()
    gone, waiting = (asyncio.ensure_future(abandoned.run(work(), undo)) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    gate.set()
    with pytest.raises(EngineFault):
        await waiting
    await asyncio.gather(gone, return_exceptions=True)
    await asyncio.sleep(0)
