"""The shape of upstream's `disagg_epd_proxy`: a chat request goes to E, P and D, and each renders it again.

    python -m benchmarks.epd_proxy --port N --encode URL --prefill URL --decode URL

Written from how that example is documented to behave; the three are vLLM's own servers:

1. The request's media, without its text, go to the encode server in one request, which publishes their encodings.
2. The whole request goes to prefill with `max_tokens` 1; its answer names the KV blocks that it keeps.
3. The whole request goes to decode with those names, and the answer is passed on as it comes.

`GET /hop_bytes` tells how many bytes of bodies each server has been sent.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

_MEDIA = ("image_url", "video_url", "input_audio", "audio_url")
_ROUTE = "/v1/chat/completions"
_KEEP_ALIVE_S = 2.0
"""Shorter than vLLM's servers keep idle connections: one that is just being closed must not be used."""


class StageFailed(Exception):
    """A server refused its part. `status` is what it answered."""

    def __init__(self, stage: str, status: int, detail: str) -> None:
        super().__init__(stage, status, detail)
        self.status = status
        self.detail = f"{stage}: {detail}"


class Proxy:
    """Three servers, seen as one.

    Args:
        encode: URL of the server with the vision tower, an EC producer.
        prefill: URL of the EC consumer and KV producer.
        decode: URL of the KV consumer.
    """

    def __init__(self, encode: str, prefill: str, decode: str) -> None:
        self._urls = {"encode": encode, "prefill": prefill, "decode": decode}
        self._session: aiohttp.ClientSession | None = None
        self.hop_bytes = dict.fromkeys(self._urls, 0)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600.0)) as session:
            self._session = session
            yield

    async def chat(self, request: Request) -> Response:
        body = json.loads(await request.body())
        try:
            media = _media_of(body["messages"])
            if media:
                await self._ask("encode", {"model": body["model"], "messages": [{"role": "user", "content": media}]})
            answer = await self._ask("prefill", _for_prefill(body))
            response = await self._post("decode", {**body, "kv_transfer_params": answer["kv_transfer_params"]})
        except StageFailed as error:
            return JSONResponse({"error": {"message": error.detail}}, status_code=error.status)
        return StreamingResponse(_passed_on(response), media_type=response.headers.get("content-type"))

    async def tell_hop_bytes(self, request: Request) -> Response:
        return JSONResponse(self.hop_bytes)

    async def health(self, request: Request) -> Response:
        return Response()

    async def _ask(self, stage: str, body: dict[str, Any]) -> dict[str, Any]:
        async with await self._post(stage, body) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    async def _post(self, stage: str, body: dict[str, Any]) -> aiohttp.ClientResponse:
        assert self._session is not None  # the lifespan has begun
        data = json.dumps(body).encode()
        self.hop_bytes[stage] += len(data)
        headers = {"content-type": "application/json"}
        response = await self._session.post(self._urls[stage] + _ROUTE, data=data, headers=headers)
        if response.status != 200:
            raise StageFailed(stage, response.status, await response.text())
        return response


def _media_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part for content in contents for part in content if part["type"] in _MEDIA]


def _for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """One token, and the KV blocks kept for another engine."""
    changed = {"stream", "stream_options", "max_tokens", "max_completion_tokens"}
    kept = {name: value for name, value in body.items() if name not in changed}
    kept_blocks = {"do_remote_decode": True, "do_remote_prefill": False}
    return {**kept, "max_completion_tokens": 1, "kv_transfer_params": kept_blocks}


async def _passed_on(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async with response:
        async for chunk in response.content.iter_any():
            yield chunk


def application(proxy: Proxy) -> Starlette:
    routes = [
        Route(_ROUTE, proxy.chat, methods=["POST"]),
        Route("/hop_bytes", proxy.tell_hop_bytes),
        Route("/health", proxy.health),
    ]
    return Starlette(routes=routes, lifespan=proxy.lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    for stage in ("encode", "prefill", "decode"):
        parser.add_argument(f"--{stage}", metavar="URL", required=True)
    given = parser.parse_args()
    proxy = Proxy(given.encode, given.prefill, given.decode)
    uvicorn.run(application(proxy), host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
