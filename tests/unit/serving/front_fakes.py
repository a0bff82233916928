"""A pipeline for tests of the front, and what they send to it.

`FakePipeline` runs no stage: it yields the report and chunks that a test gave it, or raises where the test says. It
does not check requests, keep caches, or know of deadlines.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from PIL import Image

from serving.errors import TriptychError
from serving.protocol import DecodeChunk, EncodingRef, ItemProvenance, Logprobs
from serving.stages import PipelineRequest, Report, ReportedItem

HELLO = (DecodeChunk("Hel", (72,), finished=False), DecodeChunk("lo", (105,), finished=True, finish_reason="stop"))


class FakePipeline:
    """Answers every request with `chunks`.

    Attributes:
        error: Raised in place of the report (`fail_after` 0) or after that many chunks.
        pause: Waited for before each chunk after the first, when set.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.requests: list[PipelineRequest] = []
        self.chunks: tuple[DecodeChunk, ...] = HELLO
        self.error: type[TriptychError] | None = None
        self.error_args: dict[str, object] = {}
        self.fail_after = 0
        self.prompt_logprobs: Logprobs | None = None
        self.pause: asyncio.Event | None = None
        self.paused = asyncio.Event()
        self.running = 0

    async def generate(self, request: PipelineRequest) -> AsyncGenerator[Report | DecodeChunk, None]:
        self.requests.append(request)
        self.running += 1
        try:
            self._maybe_fail(0)
            yield Report(
                items=tuple(ReportedItem(f.identifier, f.modality, ItemProvenance.ENCODED) for f in request.features),
                encode_s=0.01,
                ec_transfer_s=0.001,
                prefill_s=0.02,
                num_cached_tokens=3,
                prompt_logprobs=self.prompt_logprobs,
                num_created_cache_tokens=2,
            )
            for count, chunk in enumerate(self.chunks):
                if count and self.pause is not None:
                    self.paused.set()
                    await self.pause.wait()
                if count:
                    self._maybe_fail(count)
                yield chunk
        finally:
            self.running -= 1

    def _maybe_fail(self, count: int) -> None:
        if self.error is not None and self.fail_after == count:
            raise self.error("refused by the test", **self.error_args)


def genuine(ref: EncodingRef, cache_salt: str | None) -> bool:
    """Believes every reference."""
    return True


async def healthy() -> None:
    """A model whose stages can serve."""


def png(seed: int, size: tuple[int, int] = (112, 84)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (seed % 256, seed * 3 % 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(seed: int) -> str:
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


MODEL = "tiny-qwen2-vl"
PICTURE = {"type": "image_url", "image_url": {"url": data_url(5)}}
SAID = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 8},
    "/v1/completions": {"prompt": "hello", "max_tokens": 8},
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
    "/v1/messages": {"messages": SAID, "max_tokens": 8},
    "/inference/v1/generate": {"token_ids": [40, 41], "sampling_params": {"max_tokens": 8}},
    "/generate": {"prompt": "hello", "sampling_params": {"max_tokens": 8}},
}
ROUTES = list(BODIES)
BOTH = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EACH = pytest.mark.parametrize("path", ROUTES)


def body(path: str, stream: bool = False, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "stream": stream, **BODIES[path], **fields}
