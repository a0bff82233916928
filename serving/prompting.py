"""A prompt's way to a hand-off: resolve, encode, prefill. What is lost on the way is done once more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from serving.errors import (
    ECReferenceRequired,
    EncodingUnavailable,
    MultiModalCacheMiss,
    StageUnavailable,
    TriptychError,
)
from serving.messages import Encoding, affinity, encode_request, for_prefill, prefill_request, report_of
from serving.metrics import PipelineMetrics
from serving.progress import with_pixels
from serving.protocol import (
    EncodeResult,
    EncodingRef,
    Feature,
    ItemProvenance,
    PrefillResult,
    ResolvedItem,
    ResolveRequest,
    ResolveResult,
    Tensors,
    without_tensors,
)
from serving.recent import Recent
from serving.stages import Admission, Check, Encoder, PipelineRequest, Prefiller, Report
from serving.tracing import RequestTrace

__all__ = ["Attempts", "Prefilled", "Prompting", "forgiving"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_HINTS = 65_536
"""Identifiers remembered per stage. At 32 bytes a name this is a few MiB in each ingress process."""


class Prefilled(msgspec.Struct, frozen=True):
    """A prompt that prefill holds for decode until `deadline`, on the pipeline's clock."""

    result: PrefillResult
    features: tuple[Feature, ...]
    report: Report
    deadline: float


class Attempts:
    """How often one request may be prefilled, whatever makes it necessary.

    Args:
        request_id: For the log.
        limit: Prefills that one request may cost.
        retried: Told the code of each error that costs one more.
    """

    def __init__(self, request_id: str, limit: int, retried: Callable[[str], None]) -> None:
        self._request_id = request_id
        self._limit = limit
        self._retried = retried
        self.number = 1

    def again(self, error: TriptychError) -> None:
        """Begin one more attempt because of `error`.

        Raises:
            TriptychError: `error`, when there are none left.
        """
        if self.number == self._limit:
            raise _as_loss(error)
        self.number += 1
        self._retried(error.code)
        logger.warning("request %s: %s (%s); attempt %d", self._request_id, error, error.code, self.number)


class Prompting:
    """Brings prompts of one model through encode and prefill.

    Args:
        encoder: The encode stage.
        prefiller: The prefill stage.
        check: The admission policy.
        metrics: Where outcomes and times go.
        handoff_margin_s: Part of prefill's lease that is not used: clock skew plus the longest engine step.
        attempts: Times one call that can be repeated is made to replicas that die.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        encoder: Encoder,
        prefiller: Prefiller,
        *,
        check: Check,
        metrics: PipelineMetrics,
        handoff_margin_s: float,
        attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._prefiller = prefiller
        self._check = check
        self._metrics = metrics
        self._handoff_margin_s = handoff_margin_s
        self._attempts = attempts
        self._clock = clock
        self._at_encoder = Recent(_HINTS)
        self._at_prefill = Recent(_HINTS)

    def judge(self, request: PipelineRequest, held: Mapping[str, ResolvedItem] | None = None) -> Admission:
        """What admission makes of the request, before (`held` of None) or after prefill was asked.

        Raises:
            TriptychError: It is refused.
        """
        try:
            admitted = self._check(request, held)
        except TriptychError as error:
            self._metrics.judged(error.code)
            raise
        if held is not None or not admitted.unresolved:
            self._metrics.judged("admitted")
        return admitted

    async def prefill(
        self,
        request: PipelineRequest,
        admitted: Admission,
        attempts: Attempts,
        trace: RequestTrace,
        *,
        answered: Sequence[int] = (),
        deadline: float | None,
    ) -> Prefilled:
        """Bring every encoding to prefill and run it.

        Args:
            answered: Tokens of the answer that exist already; they follow the prompt.

        Raises:
            TriptychError: As the tree in `serving/errors.py` says.
        """
        held = await self._resolve(request, admitted, deadline)
        encodings = {
            name: Encoding(item.ref, ItemProvenance.PREFILL_SLAB, item.metadata)
            for name, item in held.items()
            if item.ref is not None and item.metadata is not None
        }
        bare = {name: item.ref for name, item in held.items() if item.ref is not None and item.metadata is None}
        try:
            if admitted.unresolved:
                admitted = self.judge(request, held)
            await self._release_at_prefill(request, [ref for name, ref in bare.items() if name not in admitted.refs])
            while True:
                started_at = self._clock()
                await self._encode_all(request, admitted.features, encodings, trace, deadline)
                encode_s = self._clock() - started_at
                features = tuple(for_prefill(feature, encodings) for feature in admitted.features)
                refs = admitted.refs | {name: encoding.ref for name, encoding in encodings.items()}
                sent_at = self._clock()
                try:
                    with trace.stage("prefill", attempt=attempts.number) as span:
                        message = prefill_request(
                            request,
                            attempts.number,
                            features,
                            refs,
                            answered=answered,
                            timeout_s=self._remaining(deadline),
                            trace_headers=span.headers,
                        )
                        result = await self._prefiller.prefill(message)
                    break
                except (ECReferenceRequired, EncodingUnavailable, MultiModalCacheMiss, StageUnavailable) as error:
                    encodings = self._after_loss(error, request, encodings)
                    attempts.again(error)
        except BaseException:
            await self._let_go(request, encodings, bare.values())
            raise
        for feature in features:
            self._at_prefill.add(feature.identifier)
        report = report_of(features, encodings, result, encode_s)
        self._metrics.prefilled(report)
        return Prefilled(result, features, report, sent_at + result.handoff.lease_s - self._handoff_margin_s)

    def _after_loss(
        self, error: TriptychError, request: PipelineRequest, encodings: Mapping[str, Encoding]
    ) -> dict[str, Encoding]:
        """The encodings that are still good after a failed prefill.

        After a replica died none is: its slab is gone, and references that an encoder issued may expire while the
        call waits for the next replica. Asking the encoder again costs a round trip.

        Raises:
            TriptychError: `error` itself, when an item is lost whose tensors nobody here has.
        """
        if isinstance(error, StageUnavailable):
            return {}
        lost = set(error.hashes or encodings)
        for name in lost:
            self._at_encoder.discard(name)
            self._at_prefill.discard(name)
        if not any(f.identifier in lost and isinstance(f.payload, Tensors) for f in request.features):
            raise error
        return {name: encoding for name, encoding in encodings.items() if name not in lost}

    async def _let_go(
        self, request: PipelineRequest, encodings: Mapping[str, Encoding], bare: Iterable[EncodingRef]
    ) -> None:
        """Drop the pins of encodings that prefill did not read.

        Args:
            bare: Pins at prefill of items whose metadata it does not have.

        An engine that ran the request has dropped them itself; doing it twice does nothing. Shielded: the caller
        is often being cancelled. After a loss it is left to the leases: what died cannot be told.
        """
        of_prefill = [e.ref for e in encodings.values() if e.provenance is ItemProvenance.PREFILL_SLAB]
        of_encoder = [e.ref for e in encodings.values() if e.provenance is not ItemProvenance.PREFILL_SLAB]
        releases = [self._release_at_prefill(request, [*of_prefill, *bare])]
        if of_encoder:
            releases.append(forgiving(self._encoder.release(of_encoder)))
        await asyncio.shield(asyncio.gather(*releases))

    async def _release_at_prefill(self, request: PipelineRequest, refs: Sequence[EncodingRef]) -> None:
        if refs:
            await forgiving(self._prefiller.release(refs, affinity(request)))

    async def _resolve(
        self, request: PipelineRequest, admitted: Admission, deadline: float | None
    ) -> dict[str, ResolvedItem]:
        """Ask prefill for items whose fate depends on it, and for those with tensors that it probably still holds."""
        hinted = (
            feature.identifier
            for feature in admitted.features
            if isinstance(feature.payload, Tensors) and feature.identifier in self._at_prefill
        )
        wanted = tuple(dict.fromkeys((*admitted.unresolved, *hinted)))
        if not wanted:
            return {}

        async def ask() -> ResolveResult:
            message = ResolveRequest(wanted, request.cache_salt, affinity(request), self._remaining(deadline))
            return await self._prefiller.resolve(message)

        answer = await self._elsewhere(ask)
        return {item.identifier: item for item in answer.items}

    async def _encode_all(
        self,
        request: PipelineRequest,
        features: Sequence[Feature],
        encodings: dict[str, Encoding],
        trace: RequestTrace,
        deadline: float | None,
    ) -> None:
        """Encode every item that has tensors and is not among `encodings`, into them: one call an item, all at once.

        An item that stands twice in the prompt is encoded once. One failure cancels its siblings; what is done by then
        is in `encodings`, for the caller to let go of.
        """
        items = {feature.identifier: feature for feature in features if isinstance(feature.payload, Tensors)}

        async def add(feature: Feature) -> None:
            with trace.stage("encode", item=feature.identifier) as span:
                encoding = await self._encode(request, feature, span.headers, deadline)
                span.note(provenance=encoding.provenance)
            encodings[feature.identifier] = encoding

        try:
            async with asyncio.TaskGroup() as group:
                for name, feature in items.items():
                    if name not in encodings:
                        group.create_task(add(feature))
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None

    async def _encode(
        self,
        request: PipelineRequest,
        feature: Feature,
        trace_headers: dict[str, str] | None,
        deadline: float | None,
    ) -> Encoding:
        """Encode one item, sending its tensors only to an encoder that may need them; a dead one is asked elsewhere."""
        call = encode_request(request, feature, timeout_s=None, trace_headers=trace_headers)

        async def ask(sent: Feature) -> EncodeResult:
            message = msgspec.structs.replace(call, feature=sent, timeout_s=self._remaining(deadline))
            return await self._encoder.encode(message)

        if feature.identifier in self._at_encoder:
            (bare,) = without_tensors([call.feature])
            result = await self._elsewhere(lambda: ask(bare))
            if result.ref is not None:
                return Encoding(result.ref, result.provenance, result.metadata)
        whole = with_pixels(call.feature, request)
        result = await self._elsewhere(lambda: ask(whole))
        if result.ref is None:
            raise EncodingUnavailable("the encoder did not keep the item", hashes=[feature.identifier])
        self._at_encoder.add(feature.identifier)
        return Encoding(result.ref, result.provenance, result.metadata)

    async def _elsewhere(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """A call that changes nothing it could not change twice; while replicas die under it, others are asked."""
        for _ in range(1, self._attempts):
            try:
                return await call()
            except StageUnavailable as error:
                self._metrics.retried(error.code)
        return await call()

    def _remaining(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(deadline - self._clock(), 0.0)


def _as_loss(error: TriptychError) -> TriptychError:
    """What the client is told in the end. That the stages lost an item which they had is no fault of the client's."""
    if isinstance(error, ECReferenceRequired):
        return EncodingUnavailable("references expired before prefill could use them", hashes=error.hashes)
    if isinstance(error, MultiModalCacheMiss):
        return EncodingUnavailable("the item was lost on its way, several times", hashes=error.hashes)
    return error


async def forgiving(call: Awaitable[None]) -> None:
    """A call whose failure costs nothing but the wait for a lease to end."""
    try:
        await call
    except TriptychError as error:
        logger.info("could not free what a request held: %s", error)
