"""A reading engine whose encoders are agents in processes of their own, and what must hold of it afterwards."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import Any

import msgspec
import torch

from ec_connector.protocol import Pinned, compatibility_hash
from models.registry import resolve
from serving.protocol import EncodingRef
from tests.engine.ec_engines import Pair, engine, tokens, without_tensors
from tests.fault.ec_peer import Consumer, Peer

MODEL = "tiny-llava"
COLOUR = "rgb(10,200,30)"
DEADLINE_S = 3.0
SEATS = 4
TEXT = {"type": "token", "prompt_token_ids": [1, 2, 3]}
SETTINGS = {"control_host": "127.0.0.1", "secret_hex": "5e" * 32, "slab_bytes": 16 << 20}
_names = count()
_used = [0.0]
"""Share of KV blocks in use, as the consumer's scheduler last said."""


def compatibility(model: str) -> str:
    """What an encoder's announcement says of the built-in model that made it."""
    return compatibility_hash(model=resolve(f"builtin:{model}"), revision=None, dtype="bfloat16")


COMPATIBILITY = compatibility(MODEL)


def recorder(config: Any, index: int = 0) -> Any:
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

    def __init__(self, pair: Pair, compatibility: str) -> None:
        self.pair = pair
        self.compatibility = compatibility
        self.rows = torch.empty(0)
        self.expected: tuple[int, ...] = ()

    @classmethod
    async def start(cls, model: str = MODEL, **overrides: Any) -> Fleet:
        """An engine that reads, and encodes where it is sent tensors."""
        reader = engine(
            model,
            "ec_both",
            {"read_deadline_s": DEADLINE_S, "busy_wait_s": 60.0},
            stat_loggers=[recorder],
            max_num_seqs=SEATS,
            max_num_batched_tokens=64,
            **overrides,
        )
        fleet = cls(Pair(model, (56, 56), reader, reader, reader), compatibility(model))
        await fleet._prepare()
        return fleet

    async def _prepare(self) -> None:
        output = await self.pair.run(self.pair.consumer, await self.pair.render(COLOUR))
        self.expected = tokens(output)
        announced = output.ec_transfer_params[COLOUR]
        assert announced["source"] == "encoded"
        reader = Consumer(SETTINGS, self.compatibility)
        answer = await asyncio.to_thread(reader.fetch, msgspec.convert(fields(announced["ref"]), EncodingRef))
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

    async def stats(self) -> list[dict[str, Any]]:
        """The connector's numbers, rank by rank."""
        return list(await self.pair.consumer.collective_rpc("ec_stats"))

    async def works(self, peer: Peer) -> None:
        """A picture that `peer` holds leads to the right tokens, and nothing stays held."""
        ref = peer.put_rows(new_name(), self.rows)
        assert tokens(await self.read(ref)) == self.expected
        assert await self.is_calm()

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
            held = [s[k] for s in await self.stats() for k in ("filling", "quarantined", "open_pins")]
            if not any(held) and not _used[0]:
                return True
        return False


def new_name() -> str:
    return f"picture-{next(_names)}"


def fields(ref: dict[str, Any]) -> dict[str, Any]:
    return {key: ref[key] for key in EncodingRef.__struct_fields__ if key in ref}
