"""Stand-ins for the three stages. Handed over through constructors, never patched in.

What they do not do: no engine, no tensors, no transfer, no Ray. References are unsigned and never expire; KV
hand-offs are numbers; time is the test's own. They count calls and keep what they were sent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

from serving.errors import StageUnavailable, TriptychError
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

    def __init__(self, on_encode: Callable[[], None] = lambda: None) -> None:
        self.requests: list[EncodeRequest] = []
        self.held: dict[str, dict[str, object]] = {}
        self.released: list[str] = []
        self.failures: list[TriptychError] = []
        self._on_encode = on_encode

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        self.requests.append(request)
        self._on_encode()
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
        self.first: DecodeChunk | None = None
        self.requests: list[PrefillRequest] = []
        self.resolves: list[ResolveRequest] = []
        self.slab: dict[str, dict[str, object] | None] = {}
        self.released: list[str] = []
        self.failures: list[TriptychError] = []
        self.resolve_failures: list[TriptychError] = []
        self._lease_s = lease_s
        self._on_prefill = on_prefill

    async def resolve(self, request: ResolveRequest) -> ResolveResult:
        self.resolves.append(request)
        if self.resolve_failures:
            raise self.resolve_failures.pop(0)
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
            first=self.first if request.wants_first else None,
        )

    async def release(self, refs: Sequence[EncodingRef], affinity: str) -> None:
        self.released += [ref.identifier for ref in refs]


class FakeDecoder:
    """Streams the tokens 0, 1, ... of an answer, each with its text; a begun answer from where it stands.

    Attributes:
        failures: Raised before the first chunk, one a call.
        losses: For each call the number of chunks after which it dies, until they are used up.
        on_loss: Called when it dies.
        is_pressed: What it says of its queue.
    """

    def __init__(self, chunks: int = 2) -> None:
        self.requests: list[DecodeRequest] = []
        self.rejected: list[KVHandoff] = []
        self.open_streams = 0
        self.failures: list[TriptychError] = []
        self.losses: list[int] = []
        self.on_loss: Callable[[], object] = lambda: None
        self.is_pressed = False
        self.chunks = chunks

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        self.requests.append(request)
        self.open_streams += 1
        try:
            if self.failures:
                raise self.failures.pop(0)
            left = self.losses.pop(0) if self.losses else self.chunks
            for index in range(request.num_answered, self.chunks):
                if not left:
                    self.on_loss()
                    raise StageUnavailable("died")
                left -= 1
                last = index == self.chunks - 1
                text = "" if request.tokens_only else f"w{index}"
                yield DecodeChunk(text, (index,), last, finish_reason="length" if last else None)
        finally:
            self.open_streams -= 1

    async def reject(self, request_id: str, handoff: KVHandoff) -> None:
        self.rejected.append(handoff)


class FakeContinuation:
    """Knows the text of `FakeDecoder`'s tokens. Knows no characters of several tokens and no stop strings but one.

    Args:
        stop: Token at which the answer ends, as at a stop string.
    """

    def __init__(self, stop: int | None = None) -> None:
        self._stop = stop

    def add(self, chunk: DecodeChunk) -> DecodeChunk:
        ends = self._stop in chunk.token_ids
        return DecodeChunk(
            "".join(f"w{token}" for token in chunk.token_ids),
            chunk.token_ids,
            finished=chunk.finished or ends,
            finish_reason="stop" if ends else chunk.finish_reason,
        )
