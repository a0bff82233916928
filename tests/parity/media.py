"""Pictures and videos as chat content."""

from __future__ import annotations

import base64
import io
from typing import Any

from models import pictures
from tests.pipeline.cases import picture

QUESTION = "the quick brown fox jumps over the lazy dog Describe the image."
"""Long enough that a prompt fills a KV block: cached-token counts then have something to count."""


def image(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": image_url(number)}}


def image_url(number: int) -> str:
    return f"data:image/png;base64,{picture(1000 + number)}"


def video(number: int, frames: int = 4) -> dict[str, Any]:
    """A video whose every frame shows other tiles, as the list of JPEGs that vLLM's clients may send."""
    encoded = []
    for frame in range(frames):
        buffer = io.BytesIO()
        pictures.tiles(pictures.HELD_OUT + 5000 + 100 * number + frame, layout=(2, 2)).image.save(buffer, "JPEG")
        encoded.append(base64.b64encode(buffer.getvalue()).decode())
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(encoded)}"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    """One user's turn of text and media."""
    return [{"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}]
