from __future__ import annotations

import asyncio
from collections import deque
from types import SimpleNamespace

import pytest

from serving.routers import BoundedAffinityRouter, bound


@pytest.mark.parametrize(("total", "replicas", "most"), [(0, 1, 1.25), (7, 4, 2.5), (0, 0, 1.25)])
def test_bound_is_a_little_more_than_a_fair_share(total: int, replicas: int, most: float) -> None:
    assert bound(total, replicas) == most


async def test_calls_of_one_request_are_told_apart() -> None:
    """Two calls made on behalf of one HTTP request share Ray's internal request id, but not their metadata."""
    first, second = (
        SimpleNamespace(metadata=SimpleNamespace(internal_request_id="same"), future=asyncio.Future(), created_at=0.0)
        for _ in range(2)
    )
    router = BoundedAffinityRouter.__new__(BoundedAffinityRouter)  # Ray's constructor needs a running Serve
    router._pending_requests_to_fulfill = deque([first, second])
    router._pending_requests_by_id = {}
    router.queue_wait_time_ms_histogram = SimpleNamespace(observe=lambda value: None)
    router._fulfill_next_pending_request("replica 2", second.metadata)
    router._fulfill_next_pending_request("replica 1", first.metadata)
    assert (first.future.result(), second.future.result()) == ("replica 1", "replica 2")
