"""Pictures and videos as chat content."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL.Image import Image

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
    for frame in _frames(number, frames):
        buffer = io.BytesIO()
        frame.save(buffer, "JPEG")
        encoded.append(base64.b64encode(buffer.getvalue()).decode())
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(encoded)}"}}


def film(number: int, frames: int = 8) -> dict[str, Any]:
    """The same as an MP4 file of two frames a second."""
    pixels = [np.asarray(frame.convert("RGB"))[:, :, ::-1] for frame in _frames(number, frames)]
    with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
        height, width, _ = pixels[0].shape
        writer = cv2.VideoWriter(file.name, cv2.VideoWriter.fourcc(*"mp4v"), 2.0, (width, height))
        assert writer.isOpened()
        for frame in pixels:
            writer.write(np.ascontiguousarray(frame))
        writer.release()
        encoded = base64.b64encode(Path(file.name).read_bytes()).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encoded}"}}


def _frames(number: int, count: int) -> list[Image]:
    first = pictures.HELD_OUT + 5000 + 100 * number
    return [pictures.tiles(first + frame, layout=(2, 2)).image for frame in range(count)]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: str | dict[str, Any]) -> list[dict[str, Any]]:
    """One user's turn of text and media."""
    return [{"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}]
