"""What the pipeline is given and gives, and the stages as it sees them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from serving.protocol import (
    DecodeChunk,
    DecodeRequest,
    EncodeRequest,
    EncodeResult,
    EncodingRef,
    Feature,
    ItemProvenance,
    KVHandoff,
    Logprobs,
    PrefillRequest,
    PrefillResult,
    ResolvedItem,
    ResolveRequest,
    ResolveResult,
    Tensors,
)

Recall = Callable[[Feature], Tensors | None]
"""The tensors of a feature whose payload was let go, or None when they are gone."""


class PipelineRequest(msgspec.Struct, frozen=True):
    """A rendered request. `refs` are those a client sent; admission decides what they are worth.

    `rendered` says that our own renderer made the features, so that their rows and masks are vLLM's own. `timeout_s` of
    None means that the request has no deadline of its own. `can_resume` says that an engine which is given the prompt
    and the answer's beginning continues it as the one that wrote the beginning would have. `recall` finds an item's
    tensors again, if the process still has them, once the pipeline has let go of `features`' own.
    """

    request_id: str
    token_ids: tuple[int, ...]
    features: tuple[Feature, ...]
    sampling: bytes
    refs: Mapping[str, EncodingRef | None] = {}
    cache_salt: str | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None
    rendered: bool = False
    trace_headers: Mapping[str, str] | None = None
    can_resume: bool = False
    recall: Recall | None = None


class ReportedItem(msgspec.Struct, frozen=True):
    identifier: str
    modality: str
    provenance: ItemProvenance


class Report(msgspec.Struct, frozen=True):
    """What happened before the first token. Yielded once, ahead of the chunks.

    `refs` name prefill's own copies of the items' encodings, for a client that asks to be told.
    `num_created_cache_tokens` counts the prompt's tokens that prefill's prefix cache took up.
    """

    items: tuple[ReportedItem, ...]
    encode_s: float
    ec_transfer_s: float
    prefill_s: float
    num_cached_tokens: int
    prompt_logprobs: Logprobs | None
    refs: Mapping[str, EncodingRef] = {}
    num_created_cache_tokens: int = 0


class Continuation(Protocol):
    """An answer that goes on elsewhere."""

    def add(self, chunk: DecodeChunk) -> DecodeChunk:
        """What comes next: the chunk, which has tokens only, with its text. Finished where a stop string ends it."""


Continue = Callable[[PipelineRequest, Sequence[int], str], Continuation]
"""Makes a `Continuation` from a request and the tokens and text with which its answer began."""


class Encoder(Protocol):
    async def encode(self, request: EncodeRequest) -> EncodeResult: ...

    async def release(self, refs: Sequence[EncodingRef]) -> None:
        """Drop the pins of announcements that nobody will read. Unknown ones are ignored."""


class Prefiller(Protocol):
    async def resolve(self, request: ResolveRequest) -> ResolveResult: ...

    async def prefill(self, request: PrefillRequest) -> PrefillResult: ...

    async def release(self, refs: Sequence[EncodingRef], affinity: str) -> None:
        """Drop the pins of announcements that nobody will read. Unknown ones are ignored."""


class Decoder(Protocol):
    @property
    def is_pressed(self) -> bool:
        """Whether a call might be refused because too many wait already."""

    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]: ...

    async def reject(self, request_id: str, handoff: KVHandoff) -> None: ...


class Admission(Protocol):
    """An admitted request; `prefill.admission.Admission` is one."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """The items in the request's order, with the payloads that may be used."""

    @property
    def refs(self) -> dict[str, EncodingRef]:
        """References worth following."""

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Items whose fate depends on what prefill holds."""


class Check(Protocol):
    """The admission policy.

    Called with `held` of None before prefill was asked. Raises the `TriptychError` that the first bad item deserves.
    """

    def __call__(self, request: PipelineRequest, held: Mapping[str, ResolvedItem] | None) -> Admission: ...
