"""One request's way through the stages: check, resolve, encode, prefill, decode.

A plain object over three Protocols: it knows neither Ray nor vLLM, and holds nothing per request beyond the
running call. What it remembers across requests (which stage acknowledged which item) are hints: a wrong one
costs a round trip, never an answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from serving.errors import EncodingUnavailable, HandoffExpired, MultiModalCacheMiss, StageUnavailable, TriptychError
from serving.limits import Limits
from serving.messages import affinity, decode_request
from serving.metrics import PipelineMetrics
from serving.progress import LightAdmission, Progress, lightened
from serving.prompting import Attempts, Prefilled, Prompting, forgiving
from serving.protocol import DecodeChunk, PrefillResult
from serving.stages import Admission, Check, Continue, Decoder, Encoder, PipelineRequest, Prefiller, Report
from serving.tracing import RequestTrace

__all__ = ["Pipeline"]

_LOSSES = (HandoffExpired, StageUnavailable, EncodingUnavailable, MultiModalCacheMiss)
"""What decode fails a request with and a new prefill mends. Encodings are among it: a preempted request is computed
anew from its prompt, and items that prefill's prefix cache covered came to decode without a reference."""


class Pipeline:
    """Runs requests of one model.

    Args:
        encoder: The encode stage.
        prefiller: The prefill stage; requests that name the same leading items should reach the same replica.
        decoder: The decode stage.
        check: The admission policy, run before any stage is called.
        continue_from: Writes the text of an answer that goes on elsewhere after a loss.
        limits: Bounds what is in flight and what may wait.
        metrics: Where outcomes and times go.
        trace: Begins a request's spans.
        handoff_margin_s: Part of prefill's lease that is not used: clock skew plus the longest engine step.
        attempts: Times one request may be prefilled before its loss is reported.
        clock: Monotonic seconds.
        wall_clock: Unix time; decode compares it with its own.
    """

    def __init__(
        self,
        encoder: Encoder,
        prefiller: Prefiller,
        decoder: Decoder,
        *,
        check: Check,
        continue_from: Continue,
        limits: Limits,
        metrics: PipelineMetrics,
        trace: Callable[[PipelineRequest], RequestTrace],
        handoff_margin_s: float,
        attempts: int = 3,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._prompting = Prompting(
            encoder,
            prefiller,
            check=check,
            metrics=metrics,
            handoff_margin_s=handoff_margin_s,
            attempts=attempts,
            clock=clock,
        )
        self._prefiller = prefiller
        self._decoder = decoder
        self._continue_from = continue_from
        self._limits = limits
        self._metrics = metrics
        self._trace = trace
        self._attempts = attempts
        self._clock = clock
        self._wall_clock = wall_clock

    async def generate(self, request: PipelineRequest) -> AsyncGenerator[Report | DecodeChunk, None]:
        """Yield one `Report`, then the chunks.

        Nothing is yielded before prefill has succeeded, so whatever goes wrong until then can still be
        answered with a status. After a loss the answer is begun again, or goes on where it stood if the request
        allows that. Iterate under `contextlib.aclosing`: closing frees what every stage holds.

        Raises:
            TriptychError: As the tree in `serving/errors.py` says.
        """
        admitted: Admission = self._prompting.judge(request)
        light = lightened(request)
        deadline = None if request.timeout_s is None else self._clock() + request.timeout_s
        attempts = Attempts(request.request_id, self._attempts, self._metrics.retried)
        progress = Progress()
        async with self._running(light) as (began_at, trace):
            while True:
                prefilled = await self._prompting.prefill(
                    request, admitted, attempts, trace, answered=progress.token_ids, deadline=deadline
                )
                try:
                    async with aclosing(self._answer(light, prefilled, attempts, trace, progress, deadline)) as chunks:
                        async for chunk in chunks:
                            if not progress.has_begun:
                                early = chunk is prefilled.result.first
                                self._metrics.first_token(self._clock() - began_at, early=early)
                                trace.event("first_token", early=early)
                                yield prefilled.report
                                request, admitted = light, LightAdmission.of(admitted)
                            token_s = progress.add(chunk, self._clock())
                            if token_s is not None:
                                self._metrics.token(token_s)
                            yield chunk
                    return
                except _LOSSES as error:
                    if progress.has_begun and not request.can_resume:
                        raise
                    attempts.again(error)
                    trace.event("retry", reason=error.code)
                    if progress.has_begun:
                        self._metrics.resumed()

    @asynccontextmanager
    async def _running(self, request: PipelineRequest) -> AsyncGenerator[tuple[float, RequestTrace], None]:
        """Hold a slot, counted and traced however the request ends. Yields the moment it came, and its spans."""
        trace = self._trace(request)
        outcome, began_at = "cancelled", self._clock()
        try:
            async with AsyncExitStack() as slot:
                with self._metrics.queued():
                    await slot.enter_async_context(self._limits.slot(has_media=bool(request.features)))
                slot.enter_context(self._metrics.in_flight())
                yield began_at, trace
            outcome = "completed"
        except TriptychError as error:
            outcome = error.code
            raise
        finally:
            self._metrics.ended(outcome, self._clock() - began_at)
            trace.end(outcome)

    async def _answer(
        self,
        request: PipelineRequest,
        prefilled: Prefilled,
        attempts: Attempts,
        trace: RequestTrace,
        progress: Progress,
        deadline: float | None,
    ) -> AsyncGenerator[DecodeChunk, None]:
        """Hand the KV blocks to decode and stream; whatever ends before decode's first chunk returns them.

        Args:
            progress: The answer so far, to which the caller adds each chunk before it asks for the next.
        """
        answered = tuple(progress.token_ids)
        continuation = self._continue_from(request, answered, progress.text) if answered else None
        async with AsyncExitStack() as unread:
            unread.push_async_callback(self._reject, request, prefilled.result)
            first = self._early(prefilled)
            if first is not None:
                yield first
                if first.finished:
                    return
            remaining_s = prefilled.deadline - self._clock()
            if remaining_s <= 0:
                raise HandoffExpired("prefill's KV blocks were not read within their lease")
            with trace.stage("decode", attempt=attempts.number) as span:
                message = decode_request(
                    request,
                    attempts.number,
                    prefilled.features,
                    prefilled.result,
                    answered=progress.token_ids,
                    tokens_only=continuation is not None,
                    handoff_expires_at=self._wall_clock() + remaining_s,
                    timeout_s=None if deadline is None else max(deadline - self._clock(), 0.0),
                    trace_headers=span.headers,
                )
                async with aclosing(self._decoder.decode(message)) as chunks:
                    is_read = False
                    async for chunk in chunks:
                        if not is_read:
                            is_read = True
                            unread.pop_all()  # decode has read the blocks, and prefill has freed them
                            self._metrics.handed_off("read")
                        said = chunk if continuation is None else continuation.add(chunk)
                        yield said
                        if said.finished:
                            return

    def _early(self, prefilled: Prefilled) -> DecodeChunk | None:
        """Prefill's token, if it may begin the answer: not while decode might refuse, or that would come too late."""
        first = prefilled.result.first
        return first if first is not None and (first.finished or not self._decoder.is_pressed) else None

    async def _reject(self, request: PipelineRequest, result: PrefillResult) -> None:
        """Free prefill's blocks and announcements. Shielded: the caller is often being cancelled."""
        self._metrics.handed_off("returned")

        async def free() -> None:
            await forgiving(self._decoder.reject(request.request_id, result.handoff))
            if result.refs:
                await forgiving(self._prefiller.release(list(result.refs.values()), affinity(request)))

        await asyncio.shield(asyncio.ensure_future(free()))
