"""The encode stage: one vision tower, its slab, and an index of what it has published."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from serving.abandoned import Abandoned
from serving.engine import Engine, EngineSettings, to_ref
from serving.engine_input import to_engine_input
from serving.errors import EngineFault
from serving.protocol import (
    EncodeRequest,
    EncodeResult,
    EncodingRef,
    ItemProvenance,
    Tensors,
    decode,
    encode,
    metadata_of,
)
from serving.references import ReferenceSigner

CheckItem = Callable[[EncodeRequest], None]
"""The admission policy for one item's own prompt; raises what the item deserves."""

_INDEX_ENTRIES = 65_536


class EncoderServer:
    """Encodes one item per call and answers with a signed reference to its slab copy.

    The index only says which items are worth asking the slab for: whether one is still there is the slab's answer.
    """

    def __init__(
        self,
        make_settings: Callable[[], EngineSettings],
        make_signer: Callable[[], ReferenceSigner],
        make_check: Callable[[Engine], CheckItem],
    ) -> None:
        self._engine = Engine(make_settings())
        self._signer = make_signer()
        self._check = make_check(self._engine)
        self._published: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._running: dict[str, asyncio.Lock] = {}
        self._abandoned = Abandoned()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def encode(self, data: bytes | EncodeRequest) -> bytes:
        """Encode one item, or find that it is still held.

        Args:
            data: An `EncodeRequest`, as a struct or as the bytes of one.

        Returns:
            The bytes of an `EncodeResult`. Its `ref` is None when the item is not held and came without tensors.

        Raises:
            TriptychError: The item is malformed, or the engine could not encode it.
        """
        request = decode(EncodeRequest, data)
        # Not interrupted: an encoding that is announced to nobody would stay pinned until its lease ends.
        result = await self._abandoned.run(self._encode(request), self._let_go)
        return encode(result)

    async def _encode(self, request: EncodeRequest) -> EncodeResult:
        name = request.feature.identifier
        lock = self._running.setdefault(name, asyncio.Lock())
        try:
            async with lock:  # a second request for the same item waits for the first and then finds it published
                return await self._held(request) or await self._run(request)
        finally:
            if not lock.locked():
                self._running.pop(name, None)

    async def _let_go(self, result: EncodeResult) -> None:
        if result.ref is not None:
            await self._engine.release([result.ref.lease])

    async def release(self, *leases: str) -> None:
        """Drop the pins of announcements that nobody will read; leases of other replicas are ignored."""
        await self._engine.release([lease for lease in leases if lease])

    async def stats(self) -> dict[str, float]:
        return await self._engine.stats()

    async def _held(self, request: EncodeRequest) -> EncodeResult | None:
        name = request.feature.identifier
        metadata = self._published.get(name)
        if metadata is None:
            return None
        started_at = time.monotonic()
        refs = await self._engine.announce([name])
        if name not in refs:
            self._published.pop(name, None)
            return None
        self._published.move_to_end(name)
        return self._result(request, refs[name], ItemProvenance.ENCODER_SLAB, metadata, started_at)

    async def _run(self, request: EncodeRequest) -> EncodeResult:
        feature = request.feature
        if not isinstance(feature.payload, Tensors):
            return EncodeResult(ref=None, provenance=ItemProvenance.ENCODED, metadata={}, encode_s=0.0)
        self._check(request)
        started_at = time.monotonic()
        prompt = to_engine_input(request.token_ids, (feature,), request.cache_salt)
        sampling = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        output = await self._engine.run_to_end(
            prompt, sampling, request.request_id, trace_headers=request.trace_headers
        )
        announced = (output.ec_transfer_params or {}).get(feature.identifier)
        if announced is None or announced["ref"] is None:
            raise EngineFault("the encoder finished without publishing the item", hashes=[feature.identifier])
        provenance = ItemProvenance.ENCODED if announced["source"] == "encoded" else ItemProvenance.ENCODER_SLAB
        metadata = metadata_of(feature) or {}
        self._remember(feature.identifier, metadata)
        return self._result(request, to_ref(announced["ref"]), provenance, metadata, started_at)

    def _remember(self, name: str, metadata: dict[str, Any]) -> None:
        self._published[name] = metadata
        self._published.move_to_end(name)
        if len(self._published) > _INDEX_ENTRIES:
            self._published.popitem(last=False)

    def _result(
        self,
        request: EncodeRequest,
        ref: EncodingRef,
        provenance: ItemProvenance,
        metadata: dict[str, Any],
        started_at: float,
    ) -> EncodeResult:
        signed = self._signer.sign(ref, metadata=metadata, cache_salt=request.cache_salt)
        return EncodeResult(
            ref=signed, provenance=provenance, metadata=metadata, encode_s=time.monotonic() - started_at
        )

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # the constructor may have failed
            self._engine.close()
