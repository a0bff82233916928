"""A real engine that reads encodings while its encoders die, stall and come back.

The engine encodes the picture once itself. Its encoders are agents in processes of their own that hold the same bytes,
so that each test can kill its own; the last test kills a whole encoder engine. Every test asserts what the engine's
request is told, that pins, extents and KV blocks are back, and that the next request has the tokens of the first.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import psutil
import pytest
import pytest_asyncio

from serving.protocol import EncodingRef
from tests.engine.ec_engines import engine, quiet, tokens
from tests.fault.ec_fleet import COLOUR, COMPATIBILITY, MODEL, SEATS, SETTINGS, Fleet, fields, new_name
from tests.fault.ec_peer import Peer

pytestmark = [pytest.mark.fault, pytest.mark.ec, pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    with quiet():
        fleet = await Fleet.start()
        yield fleet
        fleet.pair.close()


Start = Callable[[], tuple[Peer, EncodingRef]]


@pytest.fixture
def start(fleet: Fleet) -> Iterator[Start]:
    """Starts agents that hold the picture under a name of its own each, and gives their announcements."""
    peers: list[Peer] = []

    def _start() -> tuple[Peer, EncodingRef]:
        peers.append(Peer(SETTINGS, {}, COMPATIBILITY))
        return peers[-1], peers[-1].put_rows(new_name(), fleet.rows)

    yield _start
    for peer in peers:
        peer.close()


@pytest.mark.asyncio(loop_scope="module")
class TestEncoderLoss:
    async def test_killed_before_the_read(self, fleet: Fleet, start: Start) -> None:
        peer, ref = start()
        peer.signal(signal.SIGKILL)
        assert await fleet.fails(ref) == "lost"
        await fleet.works(start()[0])

    async def test_killed_between_two_reads(self, fleet: Fleet, start: Start) -> None:
        peer, ref = start()
        assert tokens(await fleet.read(ref)) == fleet.expected
        again = peer.put_rows(new_name(), fleet.rows)
        peer.signal(signal.SIGKILL)
        assert await fleet.fails(again) == "lost"
        await fleet.works(start()[0])

    async def test_a_dead_encoder_does_not_block_text(self, fleet: Fleet, start: Start) -> None:
        """More requests wait for a stalled encoder than the engine has seats, and text goes past them."""
        peer, ref = start()
        refs = [ref, *(peer.put_rows(new_name(), fleet.rows) for _ in range(2 * SEATS - 1))]
        peer.signal(signal.SIGSTOP)
        waiting = [asyncio.create_task(fleet.read(ref)) for ref in refs]
        await fleet.text()  # so that all of them have been rendered and sent
        took = [await fleet.text() for _ in range(3)]
        assert not any(task.done() for task in waiting), f"text took {took} s, as long as the encoder's deadline"
        outputs = await asyncio.gather(*waiting)
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        [failures] = await fleet.pair.consumer.collective_rpc("ec_failures", args=(None,))
        assert [failure["reason"] for failure in failures.values()] == ["timeout"] * len(refs)
        peer.signal(signal.SIGCONT)
        await fleet.works(start()[0])

    async def test_another_digest_is_a_mismatch(self, fleet: Fleet, start: Start) -> None:
        _, ref = start()
        assert await fleet.fails(msgspec.structs.replace(ref, digest=1)) == "mismatch"
        await fleet.works(start()[0])


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_encoder_engine(fleet: Fleet, start: Start) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with quiet():
        encoder = engine(MODEL, "ec_producer")
    pids = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]
    name = new_name()
    output = await fleet.pair.run(encoder, await fleet.pair.render(COLOUR, names=[name]), max_tokens=1)
    ref = msgspec.convert(fields(output.ec_transfer_params[name]["ref"]), EncodingRef)
    for pid in pids:
        psutil.Process(pid).kill()
    assert await fleet.fails(ref) == "lost"
    await fleet.text()
    await fleet.works(start()[0])
    encoder.shutdown()
