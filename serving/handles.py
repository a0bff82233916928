"""The stages as the pipeline sees them, over Ray Serve deployment handles.

The one place where Ray's errors become ours, where a cancelled caller cancels the call, where messages are turned into
the bytes that cross a hop, and where it is decided how they cross: small ones over the gRPC connection that Serve has
to each replica, which takes half the CPU time of a call between Ray's actors, large ones as such a call, through Ray's
object store.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import replace

import grpc
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.context import _get_serve_request_context, _serve_request_context
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from serving.abandoned import Abandoned
from serving.errors import DeadlineExceeded, EngineFault, Overloaded, StageUnavailable, TriptychError
from serving.metrics import HOP_BYTES
from serving.protocol import (
    DecodeChunk,
    DecodeRequest,
    EncodeRequest,
    EncodeResult,
    EncodingRef,
    KVHandoff,
    PrefillRequest,
    PrefillResult,
    ResolveRequest,
    ResolveResult,
    decode,
    encode,
)

Undo = Callable[[bytes], Awaitable[None]]
_RETRY_AFTER_S = 1.0
_RELEASE_TIMEOUT_S = 30.0
"""By then a lease has freed it, or soon will."""
_HEALTH_TIMEOUT_S = 5.0
_GRACE_S = 1.0
"""Of a call that is cancelled when its work is done, the answer is lost, and with it the names of what it holds: KV
blocks and copies stay until their leases end. Most calls are done within this time, and are undone; the few that take
longer are cancelled."""


class StageHandle:
    """What all stages have in common: one way to call, one translation of errors, one sign of life.

    Args:
        name: The stage, for messages and metrics.
        handle: Its deployment.
        max_grpc_bytes: Largest message that goes over gRPC.
    """

    def __init__(self, name: str, handle: DeploymentHandle, max_grpc_bytes: int) -> None:
        self._name = name
        self._handle = handle.options(request_serialization="pickle", response_serialization="pickle")
        self._max_grpc_bytes = max_grpc_bytes
        self._answered_at = -math.inf
        self._abandoned = Abandoned()

    async def check_health(self) -> None:
        """Whether any replica answers. A stage that has answered lately is not asked: its queue may be full of work.

        Raises:
            StageUnavailable: None does. A stage without live replicas answers nobody, hence the timeout.
        """
        if time.monotonic() - self._answered_at < _HEALTH_TIMEOUT_S:
            return
        try:
            await self._call("check_health", timeout_s=_HEALTH_TIMEOUT_S)
        except DeadlineExceeded as error:
            raise StageUnavailable(f"no replica of {self._name} answers", retry_after_s=_RETRY_AFTER_S) from error

    async def _call(
        self,
        method: str,
        *args: bytes | str,
        timeout_s: float | None,
        session_id: str = "",
        undo: Undo | None = None,
    ) -> bytes:
        """One call. If the caller is cancelled so is the call.

        Args:
            session_id: What the stage's router chooses a replica by.
            undo: Gets the answer instead of a caller that was cancelled, if one comes within the grace.
        """
        async with self._boundary(timeout_s):
            handle = self._to(method, args, session_id=session_id)
            response = handle.remote(*args) if undo is None else _on_its_own(handle, *args)
            outcome = asyncio.ensure_future(_outcome(response))
            try:
                # Shielded: while Serve looks for a replica, a cancelled wait is a cancelled call.
                return await asyncio.shield(outcome)
            except asyncio.CancelledError:
                self._abandoned.later(self._settle(response, outcome, undo))
                raise

    def _to(
        self, method: str, args: Sequence[bytes | str], *, session_id: str = "", stream: bool = False
    ) -> DeploymentHandle:
        """The handle for one message."""
        size = sum(len(arg) for arg in args)
        HOP_BYTES.labels(self._name).inc(size)
        return self._handle.options(
            method_name=method, session_id=session_id, stream=stream, _by_reference=size > self._max_grpc_bytes
        )

    async def _settle(self, response: DeploymentResponse, outcome: asyncio.Future[bytes], undo: Undo | None) -> None:
        """Cancel a call that does not end within the grace, and free what it leaves behind if it does."""
        if undo is not None:
            await asyncio.wait({outcome}, timeout=_GRACE_S)
        response.cancel()
        async with self._boundary(_RELEASE_TIMEOUT_S):
            answer = await outcome
        if undo is not None:
            await undo(answer)

    def _tell(self, method: str, *args: bytes | str, session_id: str = "") -> None:
        """A call that frees something, which nobody waits for: it may stand in the queue behind much work."""

        async def call() -> None:
            await self._call(method, *args, session_id=session_id, timeout_s=_RELEASE_TIMEOUT_S)

        self._abandoned.later(call())

    @asynccontextmanager
    async def _boundary(self, timeout_s: float | None) -> AsyncIterator[None]:
        """Turn what Ray and a replica raise into what a client can be told.

        A replica's own error comes as itself over gRPC, inside a `RayTaskError` otherwise. So may a cancellation: one
        that is not of this task is a replica's that stops.
        """
        stage = self._name
        try:
            async with asyncio.timeout(timeout_s):
                yield
            self._answered_at = time.monotonic()
        except TimeoutError as error:
            raise DeadlineExceeded(f"the request's deadline passed in {stage}") from error
        except BackPressureError as error:
            raise Overloaded(f"{stage}'s queue is full", retry_after_s=_RETRY_AFTER_S) from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise StageUnavailable(f"a replica of {stage} is gone", retry_after_s=_RETRY_AFTER_S) from error
        except (TaskCancelledError, RequestCancelledError) as error:
            raise StageUnavailable(f"{stage} dropped the request", retry_after_s=_RETRY_AFTER_S) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise StageUnavailable(f"{stage} dropped the request", retry_after_s=_RETRY_AFTER_S) from error
        except grpc.aio.AioRpcError as error:
            raise StageUnavailable(f"{stage}'s connection broke", retry_after_s=_RETRY_AFTER_S) from error
        except RayTaskError as error:  # first: it also passes for an instance of its cause's class
            raise _cause(error.cause, stage) from error
        except TriptychError:
            raise
        except Exception as error:  # whatever a replica may raise
            raise _cause(error, stage) from error


class EncodeHandle(StageHandle):
    """The encode stage."""

    def __init__(self, handle: DeploymentHandle, max_grpc_bytes: int) -> None:
        super().__init__("encode", handle, max_grpc_bytes)

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        async def undo(answer: bytes) -> None:
            ref = decode(EncodeResult, answer).ref
            if ref is not None:
                await self.release([ref])

        answer = await self._call(
            "encode", encode(request), session_id=request.feature.identifier, timeout_s=request.timeout_s, undo=undo
        )
        return decode(EncodeResult, answer)

    async def release(self, refs: Sequence[EncodingRef]) -> None:
        """Each goes where its item's encode calls go, which is nearly always the replica that announced it."""
        for ref in refs:
            self._tell("release", ref.lease, session_id=ref.identifier)


class PrefillHandle(StageHandle):
    """The prefill stage.

    Args:
        handle: Its deployment.
        max_grpc_bytes: Largest message that goes over gRPC.
        reject: Returns a hand-off that nobody will read; decode's engines do that.
    """

    def __init__(
        self,
        handle: DeploymentHandle,
        max_grpc_bytes: int,
        reject: Callable[[str, KVHandoff], Awaitable[None]],
    ) -> None:
        super().__init__("prefill", handle, max_grpc_bytes)
        self._reject = reject

    async def resolve(self, request: ResolveRequest) -> ResolveResult:
        async def undo(answer: bytes) -> None:
            refs = [item.ref for item in decode(ResolveResult, answer).items if item.ref is not None]
            if refs:
                await self.release(refs, request.affinity)

        answer = await self._call(
            "resolve", encode(request), session_id=request.affinity, timeout_s=request.timeout_s, undo=undo
        )
        return decode(ResolveResult, answer)

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        async def undo(answer: bytes) -> None:
            result = decode(PrefillResult, answer)
            await self._reject(request.request_id, result.handoff)
            if result.refs:
                await self.release(list(result.refs.values()), request.affinity)

        answer = await self._call(
            "prefill", encode(request), session_id=request.affinity, timeout_s=request.timeout_s, undo=undo
        )
        return decode(PrefillResult, answer)

    async def release(self, refs: Sequence[EncodingRef], affinity: str) -> None:
        self._tell("release", *(ref.lease for ref in refs), session_id=affinity)


class DecodeHandle(StageHandle):
    """The decode stage.

    Args:
        handle: Its deployment.
        max_grpc_bytes: Largest message that goes over gRPC.
        max_queued: Calls of this process that Serve lets wait for a replica; one more is refused.
    """

    def __init__(self, handle: DeploymentHandle, max_grpc_bytes: int, max_queued: int) -> None:
        super().__init__("decode", handle, max_grpc_bytes)
        self._pressed_from = max_queued / 2
        self._waiting = 0

    @property
    def is_pressed(self) -> bool:
        """Early, since those that a replica works on without an answer yet cannot be told from those that wait."""
        return self._waiting >= self._pressed_from

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        message = encode(request)
        stream = self._to("decode", [message], stream=True).remote(message)
        self._waiting += 1
        waits, finished = True, False
        try:
            while not finished:
                remaining_s = None if deadline is None else deadline - time.monotonic()
                async with self._boundary(remaining_s):  # not around the yield: the consumer may change tasks
                    data = await anext(stream, None)
                if data is None:
                    raise EngineFault("decode ended its stream without finishing the request")
                chunk = decode(DecodeChunk, data)
                if waits:
                    waits = False
                    self._waiting -= 1
                finished = chunk.finished
                yield chunk
        finally:
            self._waiting -= waits
            if not finished:
                stream.cancel()

    async def reject(self, request_id: str, handoff: KVHandoff) -> None:
        self._tell("reject", request_id, encode(handoff))


def _on_its_own(handle: DeploymentHandle, *args: bytes | str) -> DeploymentResponse:
    """A call that goes on when the request that it is made for is cancelled.

    Ray would cancel it with the task that it is called from, and Serve while it still looks for a replica, though the
    replica may be at work or done; the answer that says what to undo would be lost. Both know the caller by its
    context alone. Of that only what names the request in logs is kept.
    """
    request = replace(_get_serve_request_context(), _internal_request_id="")

    def call() -> DeploymentResponse:
        _serve_request_context.set(request)
        return handle.remote(*args)

    return Context().run(call)


async def _outcome(response: DeploymentResponse) -> bytes:
    answer: bytes = await response
    return answer


def _cause(cause: Exception, stage: str) -> TriptychError:
    """The error that the replica raised, or a fault that names its type and nothing of the request."""
    if isinstance(cause, TriptychError):
        return cause
    return EngineFault(f"{stage} failed with {type(cause).__name__}")
