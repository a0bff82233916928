"""Renders the three forms of a `/generate` request, and names the field that is at fault when one does not render."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.scale_out.token_in_token_out.mm_features import mm_kwargs_from_features
from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.renderers.online_renderer import OnlineRenderer

from serving.engine_input import MALFORMED, cache_miss
from serving.errors import InvalidFeature, InvalidRequest, Unsupported
from serving.generate_types import GenerateRequest

_BARE_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]+")


class PromptRenderer:
    """Turns requests into engine inputs, through the renderer that vLLM's own routes use.

    Args:
        renderer: vLLM's, of one model.
        has_chat_template: Whether the model's prompts are conversations.
    """

    def __init__(self, renderer: OnlineRenderer, *, has_chat_template: bool) -> None:
        self._renderer = renderer
        self._has_chat_template = has_chat_template

    async def render(self, request: GenerateRequest) -> EngineInput:
        """The engine input of a request, its media fetched, decoded and processed.

        Raises:
            InvalidRequest: It does not render; `param` names the field, such as `images[1]`. Permanent.
        """
        if request.token_ids is not None:
            return _token_input(request.token_ids, request.features, request.cache_salt)
        if request.messages is not None:
            async with _blaming("messages"):
                return await self._chat(request.messages, request.cache_salt)
        assert request.prompt is not None  # the request's own validator saw to it
        if not self._has_chat_template:
            if request.images:
                raise Unsupported("this model has no chat template to place images with", param="images")
            async with _blaming("prompt"):
                return await self._completion(request.prompt, request.cache_salt)
        content: list[dict[str, Any]] = await self._images(request.images)
        async with _blaming("images" if request.images else "prompt"):
            return await self._chat(
                [{"role": "user", "content": [*content, {"type": "text", "text": request.prompt}]}], request.cache_salt
            )

    async def _chat(self, messages: list[dict[str, Any]], cache_salt: str | None) -> EngineInput:
        options = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], cache_salt=cache_salt)
        _, (engine_input,) = await self._renderer.preprocess_chat(
            options,
            messages,
            default_template=self._renderer.chat_template,
            default_template_content_format=self._renderer.chat_template_content_format,
            default_template_kwargs=self._renderer.default_chat_template_kwargs,
        )
        return engine_input

    async def _completion(self, prompt: str, cache_salt: str | None) -> EngineInput:
        options = CompletionRequest(prompt=prompt, cache_salt=cache_salt)
        (engine_input,) = await self._renderer.preprocess_completion(options, prompt, None)
        return engine_input

    async def _images(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """Content parts that hold the decoded images, fetched all at once."""
        if not images:
            return []
        config = self._renderer.model_config.get_multimodal_config()
        connector: MediaConnector = MEDIA_CONNECTOR_REGISTRY.load(
            "http", media_io_kwargs=config.media_io_kwargs if config is not None else None
        )

        async def fetch(index: int, image: str) -> dict[str, Any]:
            async with _blaming(f"images[{index}]"):
                return {"type": "image_pil", "image_pil": await connector.fetch_image_async(_as_url(image))}

        return list(await asyncio.gather(*(fetch(index, image) for index, image in enumerate(images))))


@asynccontextmanager
async def _blaming(field: str) -> AsyncIterator[None]:
    """Turn what vLLM and the media libraries raise over a client's input into an error that names `field`."""
    try:
        yield
    except (VLLMClientError, ValidationError, TemplateError, ValueError, TypeError, KeyError, OSError) as error:
        raise cache_miss(error) or InvalidRequest(f"{field}: {_sentence(error)}", param=field) from error
    except NotImplementedError as error:
        raise Unsupported(f"{field}: {_sentence(error)}", param=field) from error


def _sentence(error: Exception) -> str:
    """The first line of what `error` says, without pydantic's echo of the input."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    if isinstance(error, KeyError):
        return f"missing {error}"
    return str(error).split("\n", 1)[0][:300] or type(error).__name__


def _as_url(image: str) -> str:
    """Plain base64 as the data URL that it stands for; the decoder finds the format out by itself."""
    if ":" not in image[:16] and _BARE_BASE64.fullmatch(image):
        return "data:image/unknown;base64," + "".join(image.split())
    return image


def _token_input(token_ids: list[int], features: MultiModalFeatures | None, cache_salt: str | None) -> EngineInput:
    if features is None:
        return tokens_input(token_ids, cache_salt=cache_salt)
    for modality, ranges in features.mm_placeholders.items():
        for index, place in enumerate(ranges):
            if place.offset + place.length > len(token_ids):
                raise InvalidFeature("the range lies outside the prompt", param=f"features.{modality}[{index}]")
    try:
        items = mm_kwargs_from_features(features)
    except MALFORMED as error:
        raise InvalidFeature("a feature's data does not decode", param="features.kwargs_data") from error
    ranges = {
        modality: [PlaceholderRange(offset=place.offset, length=place.length) for place in places]
        for modality, places in features.mm_placeholders.items()
    }
    return mm_input(token_ids, MultiModalKwargsItems(items), features.mm_hashes, ranges, cache_salt=cache_salt)
