"""What the stages say to each other: frozen structs, encoded as msgpack, unknown fields refused.

Nothing here imports vllm or ray. Values that only vLLM can read (one item's tensors, sampling parameters)
travel as frames of its own msgpack encoding; `serving/engine.py` writes and reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from serving.errors import InvalidRequest


class Placeholder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one item's tokens stand in the prompt.

    `is_embed` has `length` entries; False marks tokens inside the range that carry no embedding (separators,
    timestamps). None means that every token of the range carries one.
    """

    offset: int
    length: int
    is_embed: tuple[bool, ...] | None = None

    @property
    def num_embeds(self) -> int:
        """Rows of encoder output that the range needs."""
        return self.length if self.is_embed is None else sum(self.is_embed)

    @property
    def end(self) -> int:
        return self.offset + self.length


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape and dtype of one processed tensor, so that it can be judged without being decoded."""

    shape: tuple[int, ...]
    dtype: str


class Metadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="metadata"):
    """The small fields that position set-up reads, such as `image_grid_thw`: plain lists of numbers."""

    fields: dict[str, Any]


class Tensors(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensors"):
    """One item's processed tensors.

    `frames` is vLLM's encoding of a `MultiModalKwargsItem`: the message, then its out-of-band buffers.
    `metadata` and `info` describe it; whoever decodes frames from an untrusted caller derives both anew.
    """

    frames: tuple[bytes, ...]
    metadata: dict[str, Any]
    info: dict[str, TensorInfo]

    @property
    def size_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames)


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One multimodal item of a prompt. `identifier` keys its encoder output in every cache."""

    modality: str
    identifier: str
    placeholder: Placeholder
    payload: Tensors | Metadata | None = None


class EncodingRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one encoding lies, signed by the server that announced it.

    `shape` is (rows, width). `offset` is None when the producer had not finished copying at announcement; the
    consumer then asks it (GET). `digest` is xxh3_64 over the bytes. `expires_at` is Unix time in seconds.
    `mac` covers every other field; see `serving/references.py`.
    """

    identifier: str
    peer: str
    epoch: str
    offset: int | None
    generation: int
    shape: tuple[int, int]
    dtype: str
    size_bytes: int
    digest: int
    lease: str = ""
    metadata_digest: str = ""
    salt_digest: str = ""
    expires_at: float = 0.0
    mac: str = ""


class ItemProvenance(StrEnum):
    """Where the encoding that prefill used came from."""

    ENCODED = "encoded"
    """An encoder ran its vision tower for this request."""
    ENCODER_SLAB = "encoder_slab"
    """The encoder still held it from an earlier request."""
    PREFILL_SLAB = "prefill_slab"
    """Prefill's own slab held it; nothing was moved."""
    PREFIX_CACHE = "prefix_cache"
    """Prefill's prefix cache covered all of the item's tokens."""
    RECEIVER_CACHE = "receiver_cache"
    """Prefill encoded it from tensors, sent with the request or kept from an earlier one."""


class EncodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One item to encode. `token_ids` holds its placeholder run and at most one token either side."""

    request_id: str
    token_ids: tuple[int, ...]
    feature: Feature
    cache_salt: str | None = None
    timeout_s: float | None = None
    trace_headers: dict[str, str] | None = None


class EncodeResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`ref` is None when the encoder lacks the item and was sent no tensors."""

    ref: EncodingRef | None
    provenance: ItemProvenance
    metadata: dict[str, Any]
    encode_s: float


class ResolveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`affinity` is that of the prefill call to come, so that both reach the same replica."""

    identifiers: tuple[str, ...]
    cache_salt: str | None = None
    affinity: str = ""
    timeout_s: float | None = None


class ResolvedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a prefill replica holds of one item."""

    identifier: str
    metadata: dict[str, Any] | None
    has_tensors: bool
    ref: EncodingRef | None


class ResolveResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    items: tuple[ResolvedItem, ...]


class KVHandoff(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefill's KV blocks, held for one reader. Consumed exactly once: prefill frees them at the first read.

    `params` is vLLM's opaque `kv_transfer_params`. `lease_s` counts from the moment prefill finished.
    """

    params: dict[str, Any]
    lease_s: float


class TokenLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token_id: int
    logprob: float
    rank: int | None = None
    decoded: str | None = None


Logprobs = tuple[tuple[TokenLogprob, ...] | None, ...]


class DecodeChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of an answer: new text and tokens only, or everything where the caller asked for that.

    `weight_version` is the engine's label of its weights, told with the last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    finished: bool
    cumulative_logprob: float | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    weight_version: str | None = None


class PrefillRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole prompt. `sampling` is vLLM's encoding of the client's `SamplingParams`.

    Requests with equal `affinity` share what a replica has cached; empty where there is nothing to share.
    `wants_first` says that the caller can continue from prefill's own first token.
    """

    request_id: str
    token_ids: tuple[int, ...]
    features: tuple[Feature, ...]
    refs: dict[str, EncodingRef]
    sampling: bytes
    cache_salt: str | None = None
    priority: int = 0
    timeout_s: float | None = None
    trace_headers: dict[str, str] | None = None
    affinity: str = ""
    wants_first: bool = False


class ItemReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one feature's encoding reached prefill.

    `provenance` is None when it was read by the reference sent along: only the sender knows what the encoder
    did for it. `transfer_s` is 0 where nothing was read from a peer.
    """

    identifier: str
    provenance: ItemProvenance | None
    transfer_s: float = 0.0


class PrefillResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`items` follows the request's features. `refs` names prefill's own slab copies, for decode.

    `first` is the answer's first token where the caller wanted it and decode can continue from it exactly; when it is
    finished, it is the whole answer.
    """

    handoff: KVHandoff
    token_ids: tuple[int, ...]
    items: tuple[ItemReport, ...]
    refs: dict[str, EncodingRef]
    num_cached_tokens: int
    prefill_s: float
    prompt_logprobs: Logprobs | None = None
    num_created_cache_tokens: int = 0
    first: DecodeChunk | None = None


class DecodeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`features` carry metadata only. `handoff_expires_at` is Unix time in seconds, the margin taken off: only the wall
    clock tells how long a message lay in queues and sockets.

    The last `num_answered` of `token_ids` are the answer's own beginning: they count against its token limits.
    `tokens_only` asks for neither text nor stop strings, which depend on the whole answer: the caller sees to both.
    """

    request_id: str
    token_ids: tuple[int, ...]
    features: tuple[Feature, ...]
    refs: dict[str, EncodingRef]
    handoff: KVHandoff
    handoff_expires_at: float
    sampling: bytes
    cache_salt: str | None = None
    priority: int = 0
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None
    trace_headers: dict[str, str] | None = None
    num_answered: int = 0
    tokens_only: bool = False


Wire = TypeVar("Wire", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """The bytes of `message` as they cross a hop."""
    return msgspec.msgpack.encode(message)


def decode(kind: type[Wire], data: bytes | Wire) -> Wire:
    """A checked `kind` from bytes, or from a struct that a direct caller built (which nothing has checked).

    Raises:
        InvalidRequest: A field is missing, unknown or of the wrong type; `param` is its path. Permanent.
    """
    try:
        raw = data if isinstance(data, bytes) else msgspec.msgpack.encode(data)
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, TypeError) as error:
        raise InvalidRequest(f"{kind.__name__}: {error}", param=_path_in(str(error))) from error


def _path_in(message: str) -> str | None:
    """The field path that msgspec puts at the end of its messages, as `at `$.features[0]``."""
    _, found, path = message.rpartition("`$")
    return path.rstrip("`").lstrip(".") or None if found else None


def metadata_of(feature: Feature) -> dict[str, Any] | None:
    """The feature's metadata whatever its payload is, or None when it has none."""
    match feature.payload:
        case Metadata(fields=fields):
            return fields
        case Tensors(metadata=fields):
            return fields
        case _:
            return None


def without_tensors(features: Sequence[Feature]) -> tuple[Feature, ...]:
    """The features as prefill and decode are sent them: metadata in place of tensors."""
    return tuple(
        msgspec.structs.replace(f, payload=Metadata(f.payload.metadata)) if isinstance(f.payload, Tensors) else f
        for f in features
    )
