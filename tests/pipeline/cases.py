"""Prompts on which the pipeline must answer as one engine does, and where each of their items must come from."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image

from models import pictures


@dataclass(frozen=True)
class Prompt:
    """Parts in order: text, or the number of a picture. `cut` ends the prompt with its last picture."""

    parts: tuple[str | int, ...]
    provenance: tuple[str, ...]
    cut: bool = False

    def for_engine(self) -> dict[str, Any]:
        """As `tests.aggregated` takes it."""
        parts = [part if isinstance(part, str) else {"image": picture(part)} for part in self.parts]
        return {"parts": parts, "cut": self.cut}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's form."""
        content = [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture(part)}"}}
            for part in self.parts
        ]
        return [{"role": "user", "content": content}]


_NEW: Final = "encoded"
_DESCRIBE: Final = "the quick brown fox jumps over the lazy dog Describe the image."
"""Long enough that every model's prompt fills a KV block of 32 tokens: else nothing of it is ever cached."""
_BOTH: Final = "Describe each picture."

CASES: Final[Mapping[str, tuple[Prompt, ...]]] = {
    "text": (Prompt(("Count to five.",), ()),),
    "one_image": (Prompt((1, _DESCRIBE), (_NEW,)),),
    "two_images": (Prompt((2, "and", 3, _BOTH), (_NEW, _NEW)),),
    "same_image_twice": (Prompt((4, "and", 4, _BOTH), (_NEW, _NEW)),),
    "adjacent_images": (Prompt((5, 6, _BOTH), (_NEW, _NEW)),),
    "ends_in_image": (Prompt((_DESCRIBE, 7), (_NEW,), cut=True),),
    "again": (Prompt((1, _DESCRIBE), ("prefix_cache",)),),
    "same_text_other_image": (Prompt((8, _DESCRIBE), (_NEW,)),),
    "same_image_other_text": (Prompt((1, "What is in this picture?"), ("prefill_slab",)),),
    "image_later_in_the_prompt": (Prompt(("Look at this.", 1, _DESCRIBE), ("prefill_slab",)),),
    "four_at_once": tuple(Prompt((9 + index, _DESCRIBE), (_NEW,)) for index in range(4)),
}
"""In this order, on caches that start cold. Expected is what the whole design promises: a new picture is encoded by
the encoder, one in a cached KV block needs nothing, one whose block differs comes from prefill's slab."""


def picture(number: int) -> str:
    """A picture as base64 PNG. Even numbers are single shapes, odd ones tiles; all square, as LLaVA needs."""
    seed = pictures.HELD_OUT + 100 + number
    drawn = pictures.shape(seed) if number % 2 == 0 else pictures.tiles(seed, layout=(2, 2))
    return encoded(drawn.image)


def encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
