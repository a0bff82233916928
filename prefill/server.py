"""The prefill stage: a door of its own, a receiver cache, and an engine that keeps KV blocks for decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from prefill.admission import Admission, Admitted, Decision
from prefill.first_token import first_chunk, hands_over_whole_prompts, prefill_token_counts
from prefill.receiver_cache import ReceiverCache
from serving.abandoned import Abandoned
from serving.engine import Engine, EngineSettings, to_ref, transfer_params, wire_logprobs
from serving.engine_input import decode_sampling, to_engine_input
from serving.errors import EngineFault, MultiModalCacheMiss
from serving.protocol import (
    EncodingRef,
    Feature,
    ItemProvenance,
    ItemReport,
    KVHandoff,
    Metadata,
    PrefillRequest,
    PrefillResult,
    ResolvedItem,
    ResolveRequest,
    ResolveResult,
    Tensors,
    decode,
    encode,
    metadata_of,
)
from serving.references import ReferenceSigner, salt_digest

CheckRequest = Callable[[PrefillRequest, Mapping[str, ResolvedItem]], Admission]
"""The admission policy over a request and what the receiver cache holds of its items."""

_PROVENANCE: dict[str, ItemProvenance | None] = {
    "encoded": ItemProvenance.RECEIVER_CACHE,
    "slab": ItemProvenance.PREFILL_SLAB,
    "remote": None,
    "none": ItemProvenance.PREFIX_CACHE,
}


class PrefillServer:
    """Runs prompts and answers with a hand-off to decode.

    Callers that hold only this deployment's handle meet the same policy as the pipeline's: a request is resolved
    against the receiver cache, checked, and refused before the engine sees it.
    """

    def __init__(
        self,
        make_settings: Callable[[], EngineSettings],
        make_signer: Callable[[], ReferenceSigner],
        make_check: Callable[[Engine], CheckRequest],
    ) -> None:
        settings = make_settings()
        self._engine = Engine(settings)
        self._signer = make_signer()
        self._check = make_check(self._engine)
        self._cache = ReceiverCache(settings.model.prefill.receiver_cache_bytes)
        self._abandoned = Abandoned()
        self._lease_s = settings.cluster.kv_lease_s
        config = self._engine.llm.vllm_config
        self._block_size = config.cache_config.block_size if hands_over_whole_prompts(config.model_config) else None

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def resolve(self, data: bytes | ResolveRequest) -> bytes:
        """What this replica holds of each item: metadata or tensors, and a reference to its own slab copy.

        Returns:
            The bytes of a `ResolveResult`, items in the order in which they were first asked for.
        """
        request = decode(ResolveRequest, data)
        tenant = salt_digest(request.cache_salt)
        payloads = {name: self._cache.get(tenant, name) for name in request.identifiers}
        known = [name for name, payload in payloads.items() if self._can_sign(payload)]
        # Not interrupted: a copy that is announced to nobody would stay pinned until its lease ends.
        refs = await self._abandoned.run(self._engine.announce(known), self._let_go)
        items = []
        for name, payload in payloads.items():
            metadata = None if payload is None else payload.metadata if isinstance(payload, Tensors) else payload.fields
            ref = refs.get(name)
            if ref is not None:
                ref = self._signer.sign(ref, metadata=metadata or {}, cache_salt=request.cache_salt)
            items.append(ResolvedItem(name, metadata, isinstance(payload, Tensors), ref))
        return encode(ResolveResult(tuple(items)))

    async def _let_go(self, refs: Mapping[str, EncodingRef]) -> None:
        await self._engine.release([ref.lease for ref in refs.values()])

    def _can_sign(self, payload: Tensors | Metadata | None) -> bool:
        """Whether the metadata that a reference vouches for is known. The slab itself does not hold it."""
        return payload is not None or not self._engine.llm.model_config.uses_mrope

    async def prefill(self, data: bytes | PrefillRequest) -> bytes:
        """Run one prompt and keep its KV blocks for one reader.

        Returns:
            The bytes of a `PrefillResult`.

        Raises:
            TriptychError: The policy refused the request, or the engine could not get at an encoding. The engine
                was not touched in the first case and goes on in both.
        """
        request = decode(PrefillRequest, data)
        tenant = salt_digest(request.cache_salt)
        admission = self._check(request, self._cache.resolve(tenant, [f.identifier for f in request.features]))
        features = tuple(self._filled(tenant, item) for item in admission.items)
        for feature in features:
            if feature.payload is not None:
                self._cache.put(tenant, feature.identifier, feature.payload)
        followed = {name: ref for name, ref in admission.refs.items() if name not in _with_tensors(features)}
        asked = decode_sampling(request.sampling)
        counts = request.wants_first and prefill_token_counts(asked, len(request.token_ids), self._block_size)
        started_at = time.monotonic()
        output = await self._engine.run_to_end(
            to_engine_input(request.token_ids, features, request.cache_salt),
            _prefill_sampling(asked, transfer_params(followed), token_counts=counts),
            request.request_id,
            priority=request.priority,
            trace_headers=request.trace_headers,
        )
        result = self._result(request, features, output, time.monotonic() - started_at)
        return encode(msgspec.structs.replace(result, first=first_chunk(output, asked)) if counts else result)

    async def release(self, *leases: str) -> None:
        """Drop the pins of announcements that nobody will read; leases of other replicas are ignored."""
        await self._engine.release([lease for lease in leases if lease])

    async def stats(self) -> dict[str, float]:
        return await self._engine.stats()

    def _filled(self, tenant: str, item: Admitted) -> Feature:
        """The item as the engine gets it; its tensors come from the receiver cache where admission counted on them."""
        if item.decision is not Decision.HELD:
            return item.feature
        held = self._cache.get(tenant, item.feature.identifier)
        if not isinstance(held, Tensors):
            raise MultiModalCacheMiss("the receiver cache has just dropped it", hashes=[item.feature.identifier])
        return msgspec.structs.replace(item.feature, payload=held)

    def _result(
        self, request: PrefillRequest, features: Sequence[Feature], output: RequestOutput, prefill_s: float
    ) -> PrefillResult:
        if output.kv_transfer_params is None:
            raise EngineFault("prefill finished without KV blocks to hand over")
        announced = output.ec_transfer_params or {}
        refs = {}
        for feature in features:
            entry = announced.get(feature.identifier)
            if entry is not None and entry["ref"] is not None:
                refs[feature.identifier] = self._signer.sign(
                    to_ref(entry["ref"]), metadata=metadata_of(feature) or {}, cache_salt=request.cache_salt
                )
        return PrefillResult(
            handoff=KVHandoff(params=output.kv_transfer_params, lease_s=self._lease_s),
            token_ids=tuple(output.outputs[0].token_ids),
            items=tuple(_report(feature, announced.get(feature.identifier), output) for feature in features),
            refs=refs,
            num_cached_tokens=output.num_cached_tokens or 0,
            prefill_s=prefill_s,
            prompt_logprobs=wire_logprobs(output.prompt_logprobs),
            num_created_cache_tokens=output.num_cache_creation_tokens or 0,
        )

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # the constructor may have failed
            self._engine.close()


def _with_tensors(features: Sequence[Feature]) -> set[str]:
    return {feature.identifier for feature in features if isinstance(feature.payload, Tensors)}


def _report(feature: Feature, entry: dict[str, Any] | None, output: RequestOutput) -> ItemReport:
    """How this item's encoding got here; the prefix cache wins where it covered every one of its tokens."""
    if feature.placeholder.end <= (output.num_cached_tokens or 0):
        return ItemReport(feature.identifier, ItemProvenance.PREFIX_CACHE)
    if entry is None:
        raise EngineFault("prefill did not report where an item came from", hashes=[feature.identifier])
    return ItemReport(feature.identifier, _PROVENANCE[entry["source"]], entry["transfer_s"])


def _prefill_sampling(asked: SamplingParams, ec_params: dict[str, Any], *, token_counts: bool) -> SamplingParams:
    """One token of the client's sampling. Of prefill's answer only KV blocks and prompt logprobs are used, unless its
    token counts: then what may end the answer at that token stays."""
    sampling = asked.clone()
    sampling.max_tokens = 1
    sampling.min_tokens = 0
    sampling.n = 1
    sampling.stop = []
    sampling.logprobs = None
    sampling.structured_outputs = None
    if not token_counts:
        sampling.stop_token_ids = []
        sampling.detokenize = sampling.prompt_logprobs is not None
    sampling.output_kind = RequestOutputKind.FINAL_ONLY
    extra = dict(sampling.extra_args or {})
    extra["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    sampling.extra_args = extra | ({"ec_transfer_params": ec_params} if ec_params else {})
    return sampling
