"""A real engine that reads encodings while its encoders die, stall and come back.

The engine encodes the picture once itself. Its encoders are agents in processes of their own that hold the same bytes,
so that each test can kill its own; the last test kills a whole encoder engine. Every test asserts what the engine's
request is told, that pins, extents and KV blocks are back, and that the next request has the tokens of the first.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio
import torch

from ec_connector.protocol import Pinned, compatibility_hash
from models.registry import resolve
from serving.protocol import EncodingRef
from tests.engine.ec_engines import Pair, engine, quiet, tokens, without_tensors
from tests.fault.ec_peer import Consumer, Peer

pytestmark = [pytest.mark.fault, pytest.mark.ec, pytest.mark.engine, pytest.mark.filterwarnings("default")]

MODEL = "tiny-llava"
COLOUR = "rgb(10,200,30)"
DEADLINE_S = 3.0
SEATS = 4
TEXT = {"type": "token", "prompt_token_ids": [1, 2, 3]}
_SETTINGS = {"control_host": "127.0.0.1", "secret_hex": "5e" * 32, "slab_bytes": 16 << 20}
_COMPATIBILITY = compatibility_hash(model=resolve(f"builtin:{MODEL}"), revision=None, dtype="bfloat16")
_names = count()
_used = [0.0]
"""Share of KV blocks in use, as the consumer's scheduler last said."""


def _recorder(config: Any, index: int = 0) -> Any:
    """A stat logger of vLLM's that keeps the use of KV blocks."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Recorder(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                _used[0] = scheduler_stats.kv_cache_usage

        def log_engine_initialized(self) -> None: ...

    return Recorder(config, index)


class Fleet:
    """The engines, the true encoding of one picture and the tokens that it must lead to."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.rows = torch.empty(0)
        self.expected: tuple[int, ...] = ()

    async def prepare(self) -> None:
        output = await self.pair.run(self.pair.consumer, await self.pair.render(COLOUR))
        self.expected = tokens(output)
        announced = output.ec_transfer_params[COLOUR]
        assert announced["source"] == "encoded"
        reader = Consumer(_SETTINGS, _COMPATIBILITY)
        answer = await asyncio.to_thread(reader.fetch, msgspec.convert(_fields(announced["ref"]), EncodingRef))
        assert isinstance(answer, Pinned), answer
        self.rows = reader.bytes_of(COLOUR).clone()
        reader.close()

    async def read(self, ref: EncodingRef) -> Any:
        """One request at the consumer for the picture under the name in `ref`."""
        prompt = without_tensors(await self.pair.render(COLOUR, names=[ref.identifier]))
        return await self.pair.run(self.pair.consumer, prompt, {ref.identifier: msgspec.to_builtins(ref)})

    async def fails(self, ref: EncodingRef) -> str:
        """The reason with which a request for `ref` fails."""
        output = await self.read(ref)
        assert output.outputs[0].finish_reason == "error"
        return str((await self.pair.failure())["reason"])

    async def text(self) -> float:
        """Seconds for a request without pictures."""
        started = time.monotonic()
        assert len(tokens(await self.pair.run(self.pair.consumer, TEXT))) == 8
        return time.monotonic() - started

    async def is_calm(self) -> bool:
        """Whether nothing is held any more: pins, extents being filled, quarantine, KV blocks."""
        await self.pair.consumer.reset_encoder_cache()
        await self.pair.consumer.collective_rpc("ec_drop_views")
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            await self.text()  # a step, so that the scheduler reports
            stats = await self.pair.stats(self.pair.consumer)
            if not (stats["filling"] or stats["quarantined"] or stats["open_pins"] or _used[0]):
                return True
        return False


def _new_name() -> str:
    return f"picture-{next(_names)}"


def _fields(ref: dict[str, Any]) -> dict[str, Any]:
    return {key: ref[key] for key in EncodingRef.__struct_fields__ if key in ref}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    with quiet():
        reader = engine(
            MODEL,
            "ec_both",
            {"read_deadline_s": DEADLINE_S, "busy_wait_s": 60.0},
            stat_loggers=[_recorder],
            max_num_seqs=SEATS,
            max_num_batched_tokens=64,
        )
        fleet = Fleet(Pair(MODEL, (56, 56), reader, reader, reader))
        await fleet.prepare()
        yield fleet
        fleet.pair.close()


Start = Callable[[], tuple[Peer, EncodingRef]]


@pytest.fixture
def start(fleet: Fleet) -> Iterator[Start]:
    """Starts agents that hold the picture under a name of its own each, and gives their announcements."""
    peers: list[Peer] = []

    def _start() -> tuple[Peer, EncodingRef]:
        peers.append(Peer(_SETTINGS, {}, _COMPATIBILITY))
        return peers[-1], peers[-1].put_rows(_new_name(), fleet.rows)

    yield _start
    for peer in peers:
        peer.close()


async def _works(fleet: Fleet, start: Start) -> None:
    _, ref = start()
    assert tokens(await fleet.read(ref)) == fleet.expected
    assert await fleet.is_calm()


@pytest.mark.asyncio(loop_scope="module")
class TestEncoderLoss:
    async def test_killed_before_the_read(self, fleet: Fleet, start: Start) -> None:
        peer, ref = start()
        peer.signal(signal.SIGKILL)
        assert await fleet.fails(ref) == "lost"
        await _works(fleet, start)

    async def test_killed_between_two_reads(self, fleet: Fleet, start: Start) -> None:
        peer, ref = start()
        assert tokens(await fleet.read(ref)) == fleet.expected
        again = peer.put_rows(_new_name(), fleet.rows)
        peer.signal(signal.SIGKILL)
        assert await fleet.fails(again) == "lost"
        await _works(fleet, start)

    async def test_a_dead_encoder_does_not_block_text(self, fleet: Fleet, start: Start) -> None:
        """More requests wait for a stalled encoder than the engine has seats, and text goes past them."""
        peer, ref = start()
        refs = [ref, *(peer.put_rows(_new_name(), fleet.rows) for _ in range(2 * SEATS - 1))]
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
        await _works(fleet, start)

    async def test_another_digest_is_a_mismatch(self, fleet: Fleet, start: Start) -> None:
        _, ref = start()
        assert await fleet.fails(msgspec.structs.replace(ref, digest=1)) == "mismatch"
        await _works(fleet, start)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_encoder_engine(fleet: Fleet, start: Start) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with quiet():
        encoder = engine(MODEL, "ec_producer")
    pids = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]
    name = _new_name()
    output = await fleet.pair.run(encoder, await fleet.pair.render(COLOUR, names=[name]), max_tokens=1)
    ref = msgspec.convert(_fields(output.ec_transfer_params[name]["ref"]), EncodingRef)
    for pid in pids:
        psutil.Process(pid).kill()
    assert await fleet.fails(ref) == "lost"
    await fleet.text()
    await _works(fleet, start)
    encoder.shutdown()
