"""Stand-ins for the three stages. Handed over through constructors, never patched in.

What they do not do: no engine, no tensors, no transfer, no Ray. References are unsigned and never expire; KV
hand-offs are numbers; time is the test's own. They count calls and keep what they were sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from serving.errors import TriptychError
from serving.protocol import (
    DecodeChunk,
    DecodeRequest,
    EncodeRequest,
    EncodeResult,
    EncodingRef,
    ItemProvenance,
    ItemReport,
    KVHandoff,
    PrefillRequest,
    PrefillResult,
    ResolvedItem,
    ResolveRequest,
    ResolveResult,
    Tensors,
    metadata_of,
)


def ref_for(identifier: str, rows: int = 4) -> EncodingRef:
    return EncodingRef(
        identifier=identifier,
        peer="tcp://127.0.0.1:1",
        epoch="epoch",
        offset=0,
        generation=1,
        shape=(rows, 8),
        dtype="bfloat16",
        size_bytes=rows * 16,
        digest=1,
    )


class FakeEncoder:
    """Holds every item it was sent tensors for, until `forget`."""

    def __init__(self) -> None:
        self.requests: list[EncodeRequest] = []
        self.held: dict[str, dict[str, object]] = {}
        self.released: list[str] = []
        self.failures: list[TriptychError] = []

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        self.requests.append(request)
        if self.failures:
            raise self.failures.pop(0)
        name = request.feature.identifier
        if name in self.held:
            return EncodeResult(ref_for(name), ItemProvenance.ENCODER_SLAB, self.held[name], 0.0)
        if not isinstance(request.feature.payload, Tensors):
            return EncodeResult(None, ItemProvenance.ENCODED, {}, 0.0)
        self.held[name] = metadata_of(request.feature) or {}
        return EncodeResult(ref_for(name), ItemProvenance.ENCODED, self.held[name], 0.01)

    async def release(self, refs: Sequence[EncodingRef]) -> None:
        self.released += [ref.identifier for ref in refs]


class FakePrefiller:
    """Answers every prompt; remembers items as a real replica's slab would."""

    def __init__(self, *, lease_s: float = 30.0, on_prefill: Callable[[], None] = lambda: None) -> None:
        self.requests: list[PrefillRequest] = []
        self.resolves: list[ResolveRequest] = []
        self.slab: dict[str, dict[str, object]] = {}
        self.released: list[str] = []
        self.failures: list[TriptychError] = []
        self._lease_s = lease_s
        self._on_prefill = on_prefill

    async def resolve(self, request: ResolveRequest) -> ResolveResult:
        self.resolves.append(request)
        return ResolveResult(
            tuple(
                ResolvedItem(name, self.slab.get(name), False, ref_for(name) if name in self.slab else None)
                for name in request.identifiers
            )
        )

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        self.requests.append(request)
        if self.failures:
            raise self.failures.pop(0)
        self._on_prefill()
        items = []
        before = set(self.slab)
        for feature in request.features:
            held = feature.identifier in before
            items.append(ItemReport(feature.identifier, ItemProvenance.PREFILL_SLAB if held else None, 0.001))
            self.slab[feature.identifier] = metadata_of(feature) or {}
        return PrefillResult(
            handoff=KVHandoff({"number": len(self.requests)}, self._lease_s),
            token_ids=(5,),
            items=tuple(items),
            refs={feature.identifier: ref_for(feature.identifier) for feature in request.features},
            num_cached_tokens=0,
            prefill_s=0.02,
        )

    async def release(self, refs: Sequence[EncodingRef], affinity: str) -> None:
        self.released += [ref.identifier for ref in refs]


class FakeDecoder:
    """Streams the given chunks, after the given failures."""

    def __init__(self, chunks: int = 2) -> None:
        self.requests: list[DecodeRequest] = []
        self.rejected: list[KVHandoff] = []
        self.open_streams = 0
        self.failures: list[TriptychError] = []
        self._chunks = chunks

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        self.requests.append(request)
        self.open_streams += 1
        try:
            if self.failures:
                raise self.failures.pop(0)
            for index in range(self._chunks):
                last = index == self._chunks - 1
                yield DecodeChunk(f"w{index}", (index,), last, finish_reason="length" if last else None)
        finally:
            self.open_streams -= 1

    async def reject(self, request_id: str, handoff: KVHandoff) -> None:
        self.rejected.append(handoff)
