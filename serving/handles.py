"""The stages as the pipeline sees them, over Ray Serve deployment handles.

The one place where Ray's errors become ours, where a cancelled caller cancels the call, and where messages are
turned into the bytes that cross a hop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

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

_RETRY_AFTER_S = 1.0
_RELEASE_TIMEOUT_S = 5.0
"""Nobody waits longer to free what a lease frees anyway."""


class EncodeHandle:
    """The encode stage."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._encode = handle.options(method_name="encode")
        self._release = handle.options(method_name="release")

    async def encode(self, request: EncodeRequest) -> EncodeResult:
        handle = self._encode.options(session_id=request.feature.identifier)
        answer = await _call(handle, encode(request), stage="encode", timeout_s=request.timeout_s)
        return decode(EncodeResult, answer)

    async def release(self, refs: Sequence[EncodingRef]) -> None:
        """Each goes where its item's encode calls go, which is nearly always the replica that announced it."""
        for ref in refs:
            handle = self._release.options(session_id=ref.identifier)
            await _call(handle, ref.lease, stage="encode", timeout_s=_RELEASE_TIMEOUT_S)


class PrefillHandle:
    """The prefill stage."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._resolve = handle.options(method_name="resolve")
        self._prefill = handle.options(method_name="prefill")
        self._release = handle.options(method_name="release")

    async def resolve(self, request: ResolveRequest) -> ResolveResult:
        handle = self._resolve.options(session_id=request.affinity)
        return decode(ResolveResult, await _call(handle, encode(request), stage="prefill", timeout_s=None))

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        handle = self._prefill.options(session_id=request.affinity)
        answer = await _call(handle, encode(request), stage="prefill", timeout_s=request.timeout_s)
        return decode(PrefillResult, answer)

    async def release(self, refs: Sequence[EncodingRef], affinity: str) -> None:
        handle = self._release.options(session_id=affinity)
        await _call(handle, *(ref.lease for ref in refs), stage="prefill", timeout_s=_RELEASE_TIMEOUT_S)


class DecodeHandle:
    """The decode stage."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._decode = handle.options(method_name="decode", stream=True)
        self._reject = handle.options(method_name="reject")

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        data_out = encode(request)
        HOP_BYTES.labels("decode").inc(len(data_out))
        stream = self._decode.remote(data_out)
        finished = False
        try:
            while not finished:
                remaining_s = None if deadline is None else deadline - time.monotonic()
                async with _boundary("decode", remaining_s):  # not around the yield: the consumer may change tasks
                    data = await anext(stream, None)
                if data is None:
                    raise EngineFault("decode ended its stream without finishing the request")
                chunk = decode(DecodeChunk, data)
                finished = chunk.finished
                yield chunk
        finally:
            if not finished:
                stream.cancel()

    async def reject(self, request_id: str, handoff: KVHandoff) -> None:
        await _call(self._reject, request_id, encode(handoff), stage="decode", timeout_s=None)


async def _call(handle: DeploymentHandle, *args: bytes | str, stage: str, timeout_s: float | None) -> bytes:
    async with _boundary(stage, timeout_s):
        HOP_BYTES.labels(stage).inc(sum(len(arg) for arg in args))
        response = handle.remote(*args)
        try:
            answer: bytes = await response
            return answer
        except asyncio.CancelledError:
            response.cancel()
            raise


@asynccontextmanager
async def _boundary(stage: str, timeout_s: float | None) -> AsyncIterator[None]:
    """Turn what Ray raises into what a client can be told."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"the request's deadline passed in {stage}") from error
    except BackPressureError as error:
        raise Overloaded(f"{stage}'s queue is full", retry_after_s=_RETRY_AFTER_S) from error
    except (RayActorError, DeploymentUnavailableError) as error:
        raise StageUnavailable(f"a replica of {stage} is gone", retry_after_s=_RETRY_AFTER_S) from error
    except (TaskCancelledError, RequestCancelledError) as error:
        raise StageUnavailable(f"{stage} dropped the request", retry_after_s=_RETRY_AFTER_S) from error
    except RayTaskError as error:
        raise _cause(error, stage) from error


def _cause(error: RayTaskError, stage: str) -> TriptychError:
    """The error that the replica raised, or a fault that names its type and nothing of the request."""
    cause = error.cause
    if isinstance(cause, TriptychError):
        return cause
    return EngineFault(f"{stage} failed with {type(cause).__name__}")
