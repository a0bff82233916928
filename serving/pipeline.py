"""One request's way through the stages: check, resolve, encode, prefill, decode.

A plain object over three Protocols: it knows neither Ray nor vLLM, and holds nothing per request beyond the
running call. What it remembers across requests (which stage acknowledged which item) are hints: a wrong one
costs a round trip, never an answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import count

import msgspec

from serving.errors import (
    ECReferenceRequired,
    EncodingUnavailable,
    HandoffExpired,
    MultiModalCacheMiss,
    StageUnavailable,
    TriptychError,
)
from serving.limits import Limits
from serving.messages import (
    Encoding,
    affinity,
    decode_request,
    encode_request,
    for_prefill,
    prefill_request,
    report_of,
)
from serving.metrics import PipelineMetrics
from serving.protocol import (
    DecodeChunk,
    EncodeResult,
    Feature,
    ItemProvenance,
    PrefillResult,
    ResolvedItem,
    ResolveRequest,
    Tensors,
    without_tensors,
)
from serving.recent import Recent
from serving.stages import (
    Admission,
    Check,
    Decoder,
    Encoder,
    PipelineRequest,
    Prefiller,
    Report,
)

logger = logging.getLogger(__name__)

_HINTS = 65_536
"""Identifiers remembered per stage. At 32 bytes a name this is a few MiB in each ingress process."""


class _Prefilled(msgspec.Struct, frozen=True):
    result: PrefillResult
    features: tuple[Feature, ...]
    report: Report
    deadline: float


class Pipeline:
    """Runs requests of one model.

    Args:
        encoder: The encode stage.
        prefiller: The prefill stage; requests that name the same leading items should reach the same replica.
        decoder: The decode stage.
        check: The admission policy, run before any stage is called.
        limits: Bounds what is in flight and what may wait.
        metrics: Where outcomes and times go.
        handoff_margin_s: Part of prefill's lease that is not used: clock skew plus the longest engine step.
        attempts: Times one request may be prefilled before its loss is reported.
    """

    def __init__(
        self,
        encoder: Encoder,
        prefiller: Prefiller,
        decoder: Decoder,
        *,
        check: Check,
        limits: Limits,
        metrics: PipelineMetrics,
        handoff_margin_s: float,
        attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encoder = encoder
        self._prefiller = prefiller
        self._decoder = decoder
        self._check = check
        self._limits = limits
        self._metrics = metrics
        self._handoff_margin_s = handoff_margin_s
        self._attempts = attempts
        self._clock = clock
        self._at_encoder = Recent(_HINTS)
        self._at_prefill = Recent(_HINTS)

    async def generate(self, request: PipelineRequest) -> AsyncGenerator[Report | DecodeChunk, None]:
        """Yield one `Report`, then the chunks.

        Nothing is yielded before prefill has succeeded, so whatever goes wrong until then can still be
        answered with a status. Iterate under `contextlib.aclosing`: closing frees what every stage holds.

        Raises:
            TriptychError: As the tree in `serving/errors.py` says.
        """
        admitted = self._judge(request, None)
        deadline = None if request.timeout_s is None else self._clock() + request.timeout_s
        async with self._limits.slot(has_media=bool(request.features)), self._counted() as began_at:
            serial = count(1)
            for attempt in range(1, self._attempts + 1):
                prefilled = await self._prefill(request, admitted, serial, deadline)
                started = False
                try:
                    async with aclosing(self._decode(request, prefilled, deadline)) as chunks:
                        async for chunk in chunks:
                            if not started:
                                self._metrics.first_token(self._clock() - began_at)
                                yield prefilled.report
                                started = True
                            yield chunk
                    return
                except (HandoffExpired, StageUnavailable) as error:
                    if started or attempt == self._attempts:
                        raise
                    self._metrics.retried(error.code)

    def _judge(self, request: PipelineRequest, held: Mapping[str, ResolvedItem] | None) -> Admission:
        try:
            admitted = self._check(request, held)
        except TriptychError as error:
            self._metrics.judged(error.code)
            raise
        if held is not None or not admitted.unresolved:
            self._metrics.judged("admitted")
        return admitted

    @asynccontextmanager
    async def _counted(self) -> AsyncGenerator[float, None]:
        """Count a request from here to its end, however it ends. Yields the moment it began."""
        began_at, outcome = self._clock(), "cancelled"
        self._metrics.began()
        try:
            yield began_at
            outcome = "completed"
        except TriptychError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.ended(outcome, self._clock() - began_at)

    async def _prefill(
        self, request: PipelineRequest, admitted: Admission, serial: Iterator[int], deadline: float | None
    ) -> _Prefilled:
        """Bring every encoding to prefill and run it; what is lost on the way is done once more."""
        held = await self._resolve(request, admitted)
        if admitted.unresolved:
            admitted = self._judge(request, held)
        at_hand = {
            name: Encoding(item.ref, ItemProvenance.PREFILL_SLAB, item.metadata)
            for name, item in held.items()
            if item.ref is not None and item.metadata is not None
        }
        for attempt in range(1, self._attempts + 1):
            started_at = self._clock()
            encodings = at_hand | await self._encode_all(request, admitted.features, at_hand, deadline)
            encode_s = self._clock() - started_at
            features = tuple(for_prefill(feature, encodings) for feature in admitted.features)
            refs = admitted.refs | {name: encoding.ref for name, encoding in encodings.items()}
            sent_at = self._clock()
            message = prefill_request(request, next(serial), features, refs, timeout_s=self._remaining(deadline))
            try:
                result = await self._prefiller.prefill(message)
            except (ECReferenceRequired, EncodingUnavailable, MultiModalCacheMiss, StageUnavailable) as error:
                at_hand = self._after_loss(error, request, encodings)
                if attempt == self._attempts:
                    raise _as_loss(error) from error
                self._metrics.retried(error.code)
                continue
            except BaseException:
                await self._let_go(encodings)
                raise
            for feature in features:
                self._at_prefill.add(feature.identifier)
            report = report_of(features, encodings, result, encode_s)
            self._metrics.prefilled(report)
            return _Prefilled(result, features, report, sent_at + result.handoff.lease_s - self._handoff_margin_s)
        raise AssertionError("the loop returns or raises")

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

    async def _let_go(self, encodings: Mapping[str, Encoding]) -> None:
        """Drop the pins of encodings that prefill did not read.

        An engine that ran the request has dropped them itself; doing it twice does nothing. Shielded: the caller
        is often being cancelled. After a loss it is left to the leases: what died cannot be told.
        """
        refs = [encoding.ref for encoding in encodings.values()]
        if refs:
            await asyncio.shield(asyncio.ensure_future(_forgiving(self._encoder.release(refs))))

    async def _resolve(self, request: PipelineRequest, admitted: Admission) -> dict[str, ResolvedItem]:
        """Ask prefill for items whose fate depends on it, and for those with tensors that it probably still holds."""
        hinted = (
            feature.identifier
            for feature in admitted.features
            if isinstance(feature.payload, Tensors) and feature.identifier in self._at_prefill
        )
        wanted = tuple(dict.fromkeys((*admitted.unresolved, *hinted)))
        if not wanted:
            return {}
        answer = await self._prefiller.resolve(ResolveRequest(wanted, request.cache_salt, affinity(request)))
        return {item.identifier: item for item in answer.items}

    async def _encode_all(
        self,
        request: PipelineRequest,
        features: Sequence[Feature],
        at_hand: Mapping[str, Encoding],
        deadline: float | None,
    ) -> dict[str, Encoding]:
        """Encode every item that has tensors and is not at prefill: one call an item, all at once.

        An item that stands twice in the prompt is encoded once. One failure cancels its siblings.
        """
        items = {feature.identifier: feature for feature in features if isinstance(feature.payload, Tensors)}
        missing = [feature for name, feature in items.items() if name not in at_hand]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._encode(request, feature, deadline)) for feature in missing]
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        return {feature.identifier: task.result() for feature, task in zip(missing, tasks, strict=True)}

    async def _encode(self, request: PipelineRequest, feature: Feature, deadline: float | None) -> Encoding:
        """Encode one item, sending its tensors only to an encoder that may need them; a dead one is asked elsewhere."""
        call = encode_request(request, feature, timeout_s=self._remaining(deadline))
        if feature.identifier in self._at_encoder:
            bare = msgspec.structs.replace(call, feature=without_tensors([call.feature])[0])
            result = await self._elsewhere(lambda: self._encoder.encode(bare))
            if result.ref is not None:
                return Encoding(result.ref, result.provenance, result.metadata)
        result = await self._elsewhere(lambda: self._encoder.encode(call))
        if result.ref is None:
            raise EncodingUnavailable("the encoder did not keep the item", hashes=[feature.identifier])
        self._at_encoder.add(feature.identifier)
        return Encoding(result.ref, result.provenance, result.metadata)

    async def _elsewhere(self, call: Callable[[], Awaitable[EncodeResult]]) -> EncodeResult:
        for _ in range(1, self._attempts):
            try:
                return await call()
            except StageUnavailable as error:
                self._metrics.retried(error.code)
        return await call()

    async def _decode(
        self, request: PipelineRequest, prefilled: _Prefilled, deadline: float | None
    ) -> AsyncGenerator[DecodeChunk, None]:
        """Hand the KV blocks to decode and stream; whatever ends before decode's first chunk returns them."""
        async with AsyncExitStack() as unread:
            unread.push_async_callback(self._reject, request, prefilled.result)
            remaining_s = prefilled.deadline - self._clock()
            if remaining_s <= 0:
                raise HandoffExpired("prefill's KV blocks were not read within their lease")
            message = decode_request(
                request,
                prefilled.features,
                prefilled.result,
                handoff_remaining_s=remaining_s,
                timeout_s=self._remaining(deadline),
            )
            async with aclosing(self._decoder.decode(message)) as chunks:
                async for chunk in chunks:
                    unread.pop_all()  # decode has read the blocks, and prefill has freed them
                    yield chunk

    async def _reject(self, request: PipelineRequest, result: PrefillResult) -> None:
        """Free prefill's blocks and announcements. Shielded: the caller is often being cancelled."""

        async def free() -> None:
            await _forgiving(self._decoder.reject(request.request_id, result.handoff))
            if result.refs:
                await _forgiving(self._prefiller.release(list(result.refs.values()), affinity(request)))

        await asyncio.shield(asyncio.ensure_future(free()))

    def _remaining(self, deadline: float | None) -> float | None:
        return None if deadline is None else max(deadline - self._clock(), 0.0)


def _as_loss(error: TriptychError) -> TriptychError:
    """`error`, unless it refuses a reference that the pipeline itself brought: no fault of the client's."""
    if isinstance(error, ECReferenceRequired):
        return EncodingUnavailable("references expired before prefill could use them", hashes=error.hashes)
    return error


async def _forgiving(call: Awaitable[None]) -> None:
    """A call whose failure costs nothing but the wait for a lease to end."""
    try:
        await call
    except TriptychError as error:
        logger.info("could not free what a request held: %s", error)
