"""Calls of a stage over Serve handles that are not Ray's: they answer what a test lets them, from this process."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import RayActorError, RayTaskError, TaskCancelledError
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from serving.errors import DeadlineExceeded, EngineFault, InvalidFeature, Overloaded, StageUnavailable
from serving.handles import EncodeHandle, PrefillHandle
from serving.messages import encode_request
from serving.protocol import (
    EncodeResult,
    ItemProvenance,
    KVHandoff,
    PrefillRequest,
    PrefillResult,
    ResolvedItem,
    ResolveRequest,
    ResolveResult,
    encode,
)
from tests.fakes import ref_for
from tests.unit.serving.pipeline_fakes import image, request

LEASED = ref_for("a")
HANDOFF = KVHandoff({"number": 1}, 30.0)
MOST = 1 << 20
PREFILL = PrefillRequest("p", (1, 2), (), {}, b"")


class Response:
    """A call whose outcome a test sets. As Serve's, it has no answer once it, or a wait for it, is cancelled.

    Whatever the replica did by then.
    """

    def __init__(self) -> None:
        self.outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        return self.outcome.__await__()

    def cancel(self) -> None:
        self.cancelled = True
        if not self.outcome.done():
            self.outcome.set_exception(RequestCancelledError("1"))


class Handle:
    """Keeps the calls of every method."""

    def __init__(self, of: Handle | None = None, method: str = "", by_reference: bool = True) -> None:
        self.calls: dict[str, list[tuple[tuple[Any, ...], Response]]] = {} if of is None else of.calls
        self.references: list[bool] = [] if of is None else of.references
        self._by_reference = by_reference
        self._came: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event) if of is None else of._came
        self._method = method

    def options(
        self,
        *,
        method_name: str = "",
        session_id: str = "",
        stream: bool = False,
        _by_reference: bool = True,
        request_serialization: str = "",
        response_serialization: str = "",
    ) -> Handle:
        return Handle(self, method_name or self._method, _by_reference)

    def remote(self, *args: Any) -> Response:
        response = Response()
        self.references.append(self._by_reference)
        self.calls.setdefault(self._method, []).append((args, response))
        self._came[self._method].set()
        return response

    async def called(self, method: str) -> Response:
        await self._came[method].wait()
        return self.calls[method][-1][1]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (BackPressureError(1, 1), Overloaded),
        (RayActorError(), StageUnavailable),
        (TaskCancelledError(), StageUnavailable),
        (AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata()), StageUnavailable),
        (asyncio.CancelledError(), StageUnavailable),
    ],
)
async def test_what_ray_raises_is_told_with_a_time_to_retry(raised: Exception, told: type[Exception]) -> None:
    handle = Handle()
    call = encode_request(request(), image("a", 2), timeout_s=None)
    task = asyncio.ensure_future(EncodeHandle(handle, MOST).encode(call))  # type: ignore[arg-type]
    (await handle.called("encode")).outcome.set_exception(raised)
    with pytest.raises(told) as error:
        await task
    assert error.value.retry_after_s


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (InvalidFeature("bad"), InvalidFeature),
        (RuntimeError("secret"), EngineFault),
        (RayTaskError("encode", "secret", InvalidFeature("bad")).as_instanceof_cause(), InvalidFeature),
        (RayTaskError("encode", "secret", RuntimeError("secret")).as_instanceof_cause(), EngineFault),
    ],
)
async def test_what_a_replica_raises_is_told_as_it_is_or_by_its_type(raised: Exception, told: type[Exception]) -> None:
    handle = Handle()
    call = encode_request(request(), image("a", 2), timeout_s=None)
    task = asyncio.ensure_future(EncodeHandle(handle, MOST).encode(call))  # type: ignore[arg-type]
    (await handle.called("encode")).outcome.set_exception(raised)
    with pytest.raises(told) as error:
        await task
    assert "secret" not in str(error.value)


async def test_large_messages_go_through_the_object_store() -> None:
    call = encode_request(request(), image("a", 2), timeout_s=None)
    size = len(encode(call))
    for most, by_reference in ((size, False), (size - 1, True)):
        handle = Handle()
        task = asyncio.ensure_future(EncodeHandle(handle, most).encode(call))  # type: ignore[arg-type]
        (await handle.called("encode")).outcome.set_exception(InvalidFeature("bad"))
        with pytest.raises(InvalidFeature):
            await task
        assert handle.references == [by_reference]


async def test_a_call_that_outlives_its_deadline_is_cancelled_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.handles._GRACE_S", 0.01)
    handle = Handle()
    call = encode_request(request(), image("a", 2), timeout_s=0.01)
    with pytest.raises(DeadlineExceeded):
        await EncodeHandle(handle, MOST).encode(call)  # type: ignore[arg-type]
    response = await handle.called("encode")
    assert not response.cancelled
    with pytest.raises(RequestCancelledError):
        await response


async def test_an_encoding_that_was_cancelled_too_late_is_released() -> None:
    handle = Handle()
    call = encode_request(request(), image("a", 2), timeout_s=None)
    task = asyncio.ensure_future(EncodeHandle(handle, MOST).encode(call))  # type: ignore[arg-type]
    response = await handle.called("encode")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    response.outcome.set_result(encode(EncodeResult(LEASED, ItemProvenance.ENCODED, {}, 0.0)))
    (await handle.called("release")).outcome.set_result(None)
    assert handle.calls["release"][0][0] == (LEASED.lease,)


async def test_a_prefill_that_was_cancelled_too_late_is_returned() -> None:
    handle = Handle()
    returned: list[KVHandoff] = []

    async def reject(request_id: str, handoff: KVHandoff) -> None:
        returned.append(handoff)

    task = asyncio.ensure_future(PrefillHandle(handle, MOST, reject).prefill(PREFILL))  # type: ignore[arg-type]
    response = await handle.called("prefill")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    response.outcome.set_result(encode(PrefillResult(HANDOFF, (5,), (), {"a": LEASED}, 0, 0.0)))
    (await handle.called("release")).outcome.set_result(None)
    assert returned == [HANDOFF]


async def test_a_resolve_that_was_cancelled_too_late_is_released() -> None:
    """Its answer is still under way when the caller leaves."""
    handle = Handle()
    task = asyncio.ensure_future(PrefillHandle(handle, MOST, _never).resolve(ResolveRequest(("a",))))  # type: ignore[arg-type]
    response = await handle.called("resolve")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    response.outcome.set_result(encode(ResolveResult((ResolvedItem("a", {}, False, LEASED),))))
    (await handle.called("release")).outcome.set_result(None)
    assert handle.calls["release"][0][0] == (LEASED.lease,)


async def test_a_resolve_that_failed_after_its_caller_had_left_releases_nothing() -> None:
    handle = Handle()
    task = asyncio.ensure_future(PrefillHandle(handle, MOST, _never).resolve(ResolveRequest(("a",))))  # type: ignore[arg-type]
    response = await handle.called("resolve")
    task.cancel()
    response.outcome.set_exception(TaskCancelledError())
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert "release" not in handle.calls


async def test_a_call_that_can_be_undone_is_not_known_as_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and Serve cancel what a request has called with the request; they find it by the context of the call."""
    of_caller: ContextVar[str] = ContextVar("of_caller", default="")
    seen: list[tuple[str, str, str]] = []
    remote = Handle.remote

    def observed(self: Handle, *args: Any) -> Response:
        context = _get_serve_request_context()
        seen.append((of_caller.get(), context.request_id, context._internal_request_id))
        return remote(self, *args)

    monkeypatch.setattr(Handle, "remote", observed)
    handle = Handle()
    of_caller.set("task")
    _serve_request_context.set(_RequestContext(request_id="r", _internal_request_id="internal"))
    task = asyncio.ensure_future(PrefillHandle(handle, MOST, _never).resolve(ResolveRequest(("a",))))  # type: ignore[arg-type]
    (await handle.called("resolve")).outcome.set_result(encode(ResolveResult(())))
    await task
    assert seen == [("", "r", "")]


async def test_a_resolve_ends_with_the_requests_deadline() -> None:
    request = ResolveRequest(("a",), timeout_s=0.01)
    with pytest.raises(DeadlineExceeded):
        await PrefillHandle(Handle(), MOST, _never).resolve(request)  # type: ignore[arg-type]


async def test_nobody_waits_for_what_frees() -> None:
    handle = Handle()
    await EncodeHandle(handle, MOST).release([LEASED, LEASED])  # type: ignore[arg-type]
    (await handle.called("release")).outcome.set_exception(BackPressureError(1, 1))
    assert len(handle.calls["release"]) == 2


async def test_a_busy_stage_is_healthy_without_being_asked() -> None:
    handle = Handle()
    stage = EncodeHandle(handle, MOST)  # type: ignore[arg-type]
    task = asyncio.ensure_future(stage.check_health())
    (await handle.called("check_health")).outcome.set_result(None)
    await task
    await stage.check_health()
    assert len(handle.calls["check_health"]) == 1


async def _never(request_id: str, handoff: KVHandoff) -> None:
    raise AssertionError("nothing was prefilled")
