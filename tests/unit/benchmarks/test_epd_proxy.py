"""The baseline's proxy: who is sent what."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from benchmarks.epd_proxy import Proxy, application

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "what?"}
CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": [IMAGE, TEXT]}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 9,
}
BLOCKS = {"remote_block_ids": [1]}


class Stages:
    """The three servers as one, told apart by the first part of the path; `failing` answers 400."""

    def __init__(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}
        self.failing = ""

    async def chat(self, request: web.Request) -> web.Response:
        stage = request.match_info["stage"]
        self.bodies[stage] = await request.json()
        if stage == self.failing:
            return web.json_response({"error": "no"}, status=400)
        return web.json_response({"kv_transfer_params": BLOCKS} if stage == "prefill" else {"said": "red"})

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of a proxy in front of these servers."""
        app = web.Application()
        app.router.add_post("/{stage}/v1/chat/completions", self.chat)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        proxy = Proxy(
            *(f"http://127.0.0.1:{runner.addresses[0][1]}/{stage}" for stage in ("encode", "prefill", "decode"))
        )
        asgi = application(proxy)
        try:
            async with (
                proxy.lifespan(asgi),
                httpx.AsyncClient(transport=httpx.ASGITransport(asgi), base_url="http://proxy") as client,
            ):
                yield client
        finally:
            await runner.cleanup()


async def test_each_server_gets_its_part() -> None:
    stages = Stages()
    async with stages.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        sent = (await client.get("/hop_bytes")).json()
    assert answer.json() == {"said": "red"}
    assert stages.bodies["encode"]["messages"] == [{"role": "user", "content": [IMAGE]}]
    prefill = stages.bodies["prefill"]
    assert prefill["max_completion_tokens"] == 1
    assert prefill["kv_transfer_params"]["do_remote_decode"]
    assert not prefill.keys() & {"stream", "stream_options", "max_tokens"}
    assert stages.bodies["decode"] == {**CHAT, "kv_transfer_params": BLOCKS}
    assert all(count > 0 for count in sent.values())


async def test_text_alone_needs_no_encoder() -> None:
    stages = Stages()
    async with stages.client() as client:
        await client.post("/v1/chat/completions", json={**CHAT, "messages": [{"role": "user", "content": "hi"}]})
    assert list(stages.bodies) == ["prefill", "decode"]


@pytest.mark.parametrize("failing", ["encode", "prefill", "decode"])
async def test_a_refusal_is_passed_on(failing: str) -> None:
    stages = Stages()
    stages.failing = failing
    async with stages.client() as client:
        answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 400
    assert failing in answer.json()["error"]["message"]
