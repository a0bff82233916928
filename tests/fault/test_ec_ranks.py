"""An engine of two tensor-parallel workers: each rank reads its own copy, and an item counts once all have it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.engine.ec_engines import quiet, tokens
from tests.fault.ec_fleet import SETTINGS, Fleet, new_name
from tests.fault.ec_peer import Peer

pytestmark = [pytest.mark.fault, pytest.mark.ec, pytest.mark.engine, pytest.mark.filterwarnings("default")]

RANKS = 2
MODEL = "tiny-qwen2-vl"
"""Its three vision heads cannot be split over two ranks, but run on both; vLLM does not offer that for tiny-llava."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    with quiet():
        fleet = await Fleet.start(
            MODEL, tensor_parallel_size=RANKS, mm_encoder_tp_mode="data", distributed_executor_backend="mp"
        )
        yield fleet
        fleet.pair.close()


@pytest.fixture
def peer(fleet: Fleet) -> Iterator[Peer]:
    peer = Peer(SETTINGS, {}, fleet.compatibility)
    yield peer
    peer.close()


@pytest.mark.asyncio(loop_scope="module")
class TestRanks:
    async def test_every_rank_reads_and_the_lease_ends_with_the_last(self, fleet: Fleet, peer: Peer) -> None:
        before = [stats["reads"] for stats in await fleet.stats()]
        ref = peer.put_rows(new_name(), fleet.rows)
        assert tokens(await fleet.read(ref)) == fleet.expected
        assert [stats["reads"] for stats in await fleet.stats()] == [reads + 1 for reads in before]
        assert len(before) == RANKS
        assert peer.idle()
        assert peer.stats()["leases_expired"] == 0
        assert await fleet.is_calm()

    async def test_a_dead_encoder_fails_its_request_on_all_ranks(self, fleet: Fleet, peer: Peer) -> None:
        other = Peer(SETTINGS, {}, fleet.compatibility)
        ref = other.put_rows(new_name(), fleet.rows)
        other.signal(signal.SIGKILL)
        assert await fleet.fails(ref) == "lost"
        other.close()
        await fleet.works(peer)
