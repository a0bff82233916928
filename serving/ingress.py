"""The Ingress deployment: all models' fronts in one replica, mounted through Serve's own hook.

    Ingress(models=[FrontModel(...), ...], make_pipeline=..., media=MediaLimits(...), request_timeout_s=600.0)

`make_pipeline` is called once for each model in the replica, where handles and locks belong. Everything else is plain
values. `serving/app.py` binds it:

    serve.deployment(serve.ingress()(Ingress)).options(...).bind(models, make_pipeline, media, request_timeout_s)

Callers inside the cluster use the deployment's handle: `handle.generate.remote(request)` and
`handle.options(stream=True).generate_stream.remote(request)`, with a `GenerateRequest` or its dict.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from serving.dispatch import Dispatcher
from serving.engine_client import Generator
from serving.errors import InvalidRequest, ModelNotFound
from serving.front import Front
from serving.gate import ASGIApp, DisconnectGuard
from serving.generate_types import GenerateDelta, GenerateRequest, GenerateResponse, parse_request
from serving.media import AllowedHosts, install_media_connector
from serving.protocol import EncodingRef
from serving.render import FrontModel, ModelFront


class MediaLimits(msgspec.Struct, frozen=True):
    """What may be fetched on behalf of clients. No hosts: data URLs only."""

    allowed_hosts: tuple[str, ...] = ()
    max_download_bytes: int = 64 << 20


class ServedPipeline(msgspec.Struct, frozen=True):
    """One model's pipeline, a check that raises a `TriptychError` while its stages cannot serve, and one of references.

    `verify` takes a reference and a `cache_salt`: whether it is genuine, unexpired and this tenant's.
    """

    pipeline: Generator
    check_stages: Callable[[], Awaitable[None]]
    verify: Callable[[EncodingRef, str | None], bool]


class Ingress:
    """Serves all models over HTTP and to handle callers. No engine, no accelerator.

    Args:
        models: The models, in the order in which they are listed.
        make_pipeline: Called once for each model, in the replica's event loop.
        media: Limits on fetched media.
        request_timeout_s: Deadline of one request over all stages; None means unlimited.
    """

    def __init__(
        self,
        models: Sequence[FrontModel],
        make_pipeline: Callable[[ModelFront], ServedPipeline],
        media: MediaLimits,
        request_timeout_s: float | None,
    ) -> None:
        self._models = tuple(models)
        self._make_pipeline = make_pipeline
        self._request_timeout_s = request_timeout_s
        self._connection = AllowedHosts(media.allowed_hosts, max_bytes=media.max_download_bytes)
        self._fronts: dict[str, Front] = {}
        self._building = asyncio.Lock()

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """What Serve mounts."""
        fronts = await self._built()
        return DisconnectGuard(Dispatcher({name: front.served for name, front in fronts.items()}))

    async def generate(self, request: GenerateRequest | dict[str, Any]) -> GenerateResponse:
        """`POST /generate` without HTTP.

        Raises:
            TriptychError: What HTTP would have answered, as an exception.
        """
        checked = parse_request(request)
        front = await self._front(checked.model)
        return await front.service.complete(_prepared(checked, front))

    async def generate_stream(
        self, request: GenerateRequest | dict[str, Any]
    ) -> AsyncGenerator[GenerateDelta | GenerateResponse, None]:
        """`POST /generate` with `stream`, without HTTP: deltas, then the `GenerateResponse`."""
        checked = parse_request(request)
        front = await self._front(checked.model)
        async with aclosing(front.service.stream(_prepared(checked, front))) as events:
            async for event in events:
                yield event

    async def _front(self, name: str | None) -> Front:
        fronts = await self._built()
        if name is None and len(fronts) == 1:
            return next(iter(fronts.values()))
        known = ", ".join(fronts)
        if name is None:
            raise InvalidRequest(f"several models are served, name one of them: {known}", param="model")
        if name not in fronts:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist; served: {known}", param="model")
        return fronts[name]

    async def _built(self) -> dict[str, Front]:
        """All fronts; built by whoever comes first, Serve's mount or a handle call."""
        async with self._building:
            if not self._fronts:
                install_media_connector(self._connection)
                self._fronts = {model.name: await self._build(model) for model in self._models}
        return self._fronts

    async def _build(self, model: FrontModel) -> Front:
        # Tokenizers and processors take seconds to load; health checks must be answered meanwhile.
        front = await asyncio.to_thread(ModelFront, model)
        served = self._make_pipeline(front)
        return await Front.build(
            front,
            served.pipeline,
            request_timeout_s=self._request_timeout_s,
            check_stages=served.check_stages,
            verify=served.verify,
        )

    async def close(self) -> None:
        """Free the renderers' threads and the fetching connection."""
        for front in self._fronts.values():
            front.close()
        await self._connection.close()


def _prepared(request: GenerateRequest, front: Front) -> GenerateRequest:
    """The request with internal identifiers for its uuids, as the dispatcher does to a body."""
    if request.messages is None:
        return request
    messages = copy.deepcopy(request.messages)
    front.names.rename_in(messages, request.cache_salt)
    return request.model_copy(update={"messages": messages})
