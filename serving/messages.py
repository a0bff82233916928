"""What the pipeline says to each stage, made from the request and from what the earlier stages answered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from serving.protocol import (
    DecodeRequest,
    EncodeRequest,
    EncodingRef,
    Feature,
    ItemProvenance,
    Metadata,
    Placeholder,
    PrefillRequest,
    PrefillResult,
    without_tensors,
)
from serving.stages import PipelineRequest, Report, ReportedItem

_AFFINITY_TOKENS = 64
"""Leading tokens that make two text prompts neighbours: a few KV blocks, so about what a prefix hit saves."""


class Encoding(msgspec.Struct, frozen=True):
    ref: EncodingRef
    provenance: ItemProvenance
    metadata: dict[str, Any]


def encode_request(
    request: PipelineRequest,
    feature: Feature,
    *,
    timeout_s: float | None,
    trace_headers: dict[str, str] | None = None,
) -> EncodeRequest:
    """One item's own little prompt: its placeholder run and one token either side, offsets made relative.

    The neighbours keep the run away from the prompt's edges, where vLLM treats the last token specially.
    """
    place = feature.placeholder
    first = max(place.offset - 1, 0)
    moved = Placeholder(place.offset - first, place.length, place.is_embed)
    return EncodeRequest(
        request_id=f"{request.request_id}-e{place.offset}",
        token_ids=request.token_ids[first : place.end + 1],
        feature=msgspec.structs.replace(feature, placeholder=moved),
        cache_salt=request.cache_salt,
        timeout_s=timeout_s,
        trace_headers=trace_headers,
    )


def affinity(request: PipelineRequest) -> str:
    """What requests that profit from one replica's caches have in common: the first item, or the first tokens."""
    if request.features:
        return request.features[0].identifier
    return hashlib.blake2b(repr(request.token_ids[:_AFFINITY_TOKENS]).encode(), digest_size=16).hexdigest()


def for_prefill(feature: Feature, encodings: Mapping[str, Encoding]) -> Feature:
    """The feature without pixels, with the metadata that its encoding was announced with."""
    encoding = encodings.get(feature.identifier)
    if encoding is None:
        return feature
    return msgspec.structs.replace(feature, payload=Metadata(encoding.metadata))


def report_of(
    features: Sequence[Feature], encodings: Mapping[str, Encoding], result: PrefillResult, encode_s: float
) -> Report:
    items = tuple(
        ReportedItem(
            feature.identifier,
            feature.modality,
            done.provenance or _sent_provenance(encodings.get(feature.identifier)),
        )
        for feature, done in zip(features, result.items, strict=True)
    )
    return Report(
        items=items,
        encode_s=encode_s if features else 0.0,
        ec_transfer_s=max((done.transfer_s for done in result.items), default=0.0),
        prefill_s=result.prefill_s,
        num_cached_tokens=result.num_cached_tokens,
        prompt_logprobs=result.prompt_logprobs,
        refs=result.refs,
        num_created_cache_tokens=result.num_created_cache_tokens,
    )


def _sent_provenance(encoding: Encoding | None) -> ItemProvenance:
    """Where an item came from that prefill read by reference; a client's own reference names an encoder's slab."""
    return ItemProvenance.ENCODER_SLAB if encoding is None else encoding.provenance


def prefill_request(
    request: PipelineRequest,
    serial: int,
    features: Sequence[Feature],
    refs: Mapping[str, EncodingRef],
    *,
    answered: Sequence[int],
    timeout_s: float | None,
    trace_headers: dict[str, str] | None,
) -> PrefillRequest:
    """The whole prompt, without pixels, and what has been answered already.

    Each try has an id of its own: an engine may still hold an earlier one. The first token of an answer that has begun
    is not wanted early: its text depends on the tokens before it.
    """
    return PrefillRequest(
        request_id=f"{request.request_id}-p{serial}",
        token_ids=(*request.token_ids, *answered),
        features=tuple(features),
        refs=dict(refs),
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        priority=request.priority,
        timeout_s=timeout_s,
        trace_headers=trace_headers,
        affinity=affinity(request),
        wants_first=request.can_resume and not answered,
    )


def decode_request(
    request: PipelineRequest,
    serial: int,
    features: Sequence[Feature],
    prefilled: PrefillResult,
    *,
    answered: Sequence[int],
    tokens_only: bool,
    handoff_expires_at: float,
    timeout_s: float | None,
    trace_headers: dict[str, str] | None,
) -> DecodeRequest:
    """What decode needs to continue: positions from metadata, encodings by prefill's own references."""
    return DecodeRequest(
        request_id=f"{request.request_id}-d{serial}",
        token_ids=(*request.token_ids, *answered),
        features=without_tensors(features),
        refs=prefilled.refs,
        handoff=prefilled.handoff,
        handoff_expires_at=handoff_expires_at,
        sampling=request.sampling,
        cache_salt=request.cache_salt,
        priority=request.priority,
        reasoning_ended=request.reasoning_ended,
        reasoning_parser_kwargs=request.reasoning_parser_kwargs,
        timeout_s=timeout_s,
        trace_headers=trace_headers,
        num_answered=len(answered),
        tokens_only=tokens_only,
    )
