"""Where media may be fetched from on behalf of clients.

A server that fetches any URL reaches private services (SSRF). vLLM takes an empty list of allowed hosts to mean
all of them and follows redirects anywhere; here an empty list means none, each redirect is judged like the
URL itself, and whatever goes wrong with a client's URL is the client's error with the field's name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from functools import partial
from pickle import UnpicklingError
from typing import Any, TypeVar

import aiohttp
import torch
from PIL import Image
from vllm.connections import HTTPConnection
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.multimodal.media import MediaConnector, MediaIO
from vllm.multimodal.media.connector import MEDIA_CONNECTOR_REGISTRY
from yarl import URL

_PARAM = "image_url"
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 64 << 10

Media = TypeVar("Media")


class AllowedHosts(HTTPConnection):  # type: ignore[misc]
    """Fetches from named hosts only. One attempt: vLLM's own retries multiply the configured timeout by 21.

    Args:
        hosts: Exact host names or addresses. A named host may resolve to a private address.
        max_bytes: Largest body.
    """

    def __init__(self, hosts: Collection[str], *, max_bytes: int) -> None:
        super().__init__()
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes

    async def async_get_bytes(
        self, url: str, *, timeout: float | None = None, allow_redirects: bool = True, max_bytes: int | None = None
    ) -> bytes:
        """The body at `url`, after at most five redirects.

        Raises:
            VLLMValidationError: The host of the URL, or of a redirect, is not allowed; or the body is too large.
            aiohttp.ClientError, TimeoutError: It could not be fetched.
        """
        limit = min(self._max_bytes, max_bytes or self._max_bytes)
        target = URL(url)
        for _ in range(1 + _MAX_REDIRECTS):
            self._check(target)
            client = await self.get_async_client()
            limits = aiohttp.ClientTimeout(total=timeout)
            async with client.get(target, headers=self._headers(), timeout=limits, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    target = target.join(URL(response.headers["Location"]))
                    continue
                response.raise_for_status()
                return await _body(response, limit)
        raise VLLMValidationError("the media URL redirects too often", parameter=_PARAM)

    def get_bytes(self, url: str, **options: Any) -> bytes:
        raise NotImplementedError("a front fetches asynchronously")

    async def close(self) -> None:
        client = self._async_client
        if client is not None:
            await client.close()

    def _check(self, url: URL) -> None:
        if url.scheme not in ("http", "https") or (url.host or "").lower() not in self._hosts:
            raise VLLMValidationError(
                f"media may not be fetched from {url.host!r}; send a data URL, or have the host allowed "
                "(media.allowed_domains)",
                parameter=_PARAM,
            )


class GuardedMediaConnector(MediaConnector):  # type: ignore[misc]
    """vLLM's connector over `AllowedHosts`. Every failure over a client's URL is 4xx; files are never read."""

    async def load_from_url_async(self, url: str, media_io: MediaIO, **options: Any) -> Any:
        scheme = url.partition(":")[0].lower()
        if scheme not in ("data", "http", "https"):
            raise VLLMValidationError("media must be a data URL or an http(s) URL", parameter=_PARAM)
        try:
            return await super().load_from_url_async(url, media_io, **options)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise VLLMUnprocessableEntityError(
                f"the media URL could not be fetched ({type(error).__name__})", parameter=_PARAM
            ) from error
        except (NotImplementedError, Image.DecompressionBombError) as error:
            raise VLLMValidationError(str(error), parameter=_PARAM) from error

    async def fetch_image_embedding_async(self, data: str) -> torch.Tensor:
        return await _decoded(super().fetch_image_embedding_async(data), "image_embeds")

    async def fetch_audio_embedding_async(self, data: str) -> torch.Tensor:
        return await _decoded(super().fetch_audio_embedding_async(data), "audio_embeds")

    async def fetch_video_embedding_async(self, data: str) -> torch.Tensor:
        return await _decoded(super().fetch_video_embedding_async(data), "video_embeds")

    def _assert_url_in_allowed_media_domains(self, url_spec: Any) -> None:
        """Left to the connection, which judges the URL as it will be fetched."""


def install_media_connector(connection: AllowedHosts) -> None:
    """Make every renderer of this process fetch through `connection`.

    vLLM looks its connector up by name for each request. The default name is replaced, so that no setting can
    bring the unguarded one back.
    """
    MEDIA_CONNECTOR_REGISTRY.register("http")(partial(GuardedMediaConnector, connection=connection))


async def _decoded(tensor: Awaitable[torch.Tensor], param: str) -> torch.Tensor:
    """A tensor that a client sent as base64 of what `torch.save` or `numpy.save` write; torch raises many things."""
    try:
        return await tensor
    except (UnpicklingError, RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError) as error:
        raise VLLMValidationError(f"the tensor does not decode ({type(error).__name__})", parameter=param) from error


async def _body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > limit:
            raise VLLMValidationError(f"the media exceeds {limit} bytes", parameter=_PARAM)
    return bytes(body)
