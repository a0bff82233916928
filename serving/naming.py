"""Puts internal identifiers in the place of what clients call their items, and back where clients are told of them.

See `serving/identity.py` for why. Items come under a client's own name in two ways: token-in features, renamed here
after rendering; and `uuid`s in messages, renamed in the body before rendering, since the renderer's own cache of
processed media is keyed by them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from serving.client_refs import EC_PARAMS, client_refs
from serving.errors import TriptychError
from serving.identity import IdentityIndex, internal_id, is_internal, payload_digest, unknown_id
from serving.protocol import EncodingRef, Feature, Tensors
from serving.stages import Report

_NAMES = 65_536
"""Names remembered in each ingress process; with digests about 20 MiB."""

_INLINE_BYTES = 1 << 20
"""Payloads up to this size are hashed in the event loop (about 1 ms); larger ones in a thread."""

_UUID_KEY = b'"uuid"'
_NOT_MEDIA = ("type", "uuid", "detail", "cache_control")
_MEDIA = frozenset(
    {
        "image_url",
        "input_image",
        "image_embeds",
        "image_pil",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "input_video",
        "video_embeds",
    }
)
"""Types of content parts, and the keys that may stand in for a type. Source: vLLM's `renderers/chat_utils.py`."""


class Renamed(msgspec.Struct, frozen=True):
    """A prompt's features under internal identifiers. `external` leads back to the client's names."""

    features: tuple[Feature, ...]
    external: Mapping[str, str]

    def refs(self, refs: Mapping[str, EncodingRef | None]) -> dict[str, EncodingRef | None]:
        """A client's references by internal identifier. One whose item has another name now is none."""
        internal = {name: identifier for identifier, name in self.external.items()}
        return {
            internal.get(name, name): ref if internal.get(name, name) == name else None for name, ref in refs.items()
        }

    def report(self, report: Report) -> Report:
        """`report` as the client is told it."""
        items = tuple(
            msgspec.structs.replace(item, identifier=self.external.get(item.identifier, item.identifier))
            for item in report.items
        )
        return msgspec.structs.replace(report, items=items)

    def error(self, error: TriptychError) -> TriptychError:
        """`error` as the client is told it."""
        hashes = [self.external.get(name, name) for name in error.hashes]
        return (
            error
            if hashes == list(error.hashes)
            else type(error)(error.message, error.param, hashes, error.retry_after_s)
        )


class ItemNames:
    """The names of one model's items, as far as this process has seen them.

    Args:
        model: The served name: one client's items for two models are different ones.
        verify: Whether a reference is genuine, unexpired and the tenant's.
    """

    def __init__(self, model: str, verify: Callable[[EncodingRef, str | None], bool]) -> None:
        self._model = model
        self._verify = verify
        self._index = IdentityIndex(_NAMES)

    async def rename(
        self,
        features: Sequence[Feature],
        cache_salt: str | None,
        *,
        client_named: bool,
        refs: Mapping[str, EncodingRef | None],
    ) -> Renamed:
        """Internal identifiers for a prompt's features.

        Args:
            features: As rendered, or as a token-in client sent them.
            cache_salt: The tenant.
            client_named: Whether the client chose the identifiers. Those that our renderer gave stay, and are
                remembered, so that the tenant can name the items alone later.
            refs: References that came along. Who holds a genuine one has been told the item's internal identifier, and
                may use it. Without one it is a name like any other: it would open what other tenants sent.
        """
        referenced = self._referenced(refs, cache_salt)
        renamed: list[Feature] = []
        external: dict[str, str] = {}
        for feature in features:
            name = feature.identifier
            internal = await self._internal(feature, cache_salt, client_named, name in referenced)
            external[internal] = name
            renamed.append(msgspec.structs.replace(feature, identifier=internal))
        return Renamed(tuple(renamed), external)

    def _referenced(self, refs: Mapping[str, EncodingRef | None], cache_salt: str | None) -> set[str]:
        return {name for name, ref in refs.items() if ref is not None and self._verify(ref, cache_salt)}

    async def _internal(self, feature: Feature, cache_salt: str | None, client_named: bool, referenced: bool) -> str:
        name = feature.identifier
        if not client_named:
            if isinstance(feature.payload, Tensors):
                self._index.record(cache_salt, name, name)
            return name
        if not isinstance(feature.payload, Tensors):
            known = self._index.find(cache_salt, name)
            return name if referenced else known or unknown_id(cache_salt, name, model=self._model)
        digest = await _digest(feature.payload)
        internal = name if is_internal(name, digest) else internal_id(cache_salt, name, digest, model=self._model)
        self._index.record(cache_salt, name, internal)
        self._index.record(cache_salt, internal, internal)
        return internal

    def rename_uuids(self, body: bytes) -> bytes:
        """A request's JSON body with internal identifiers for `uuid`s; other bodies as they are.

        A uuid beside media holds the media's digest from now on; one beside a URL is dropped, since what is behind a
        URL can change; one alone means what the tenant last sent under it.
        """
        if _UUID_KEY not in body:
            return body
        try:
            request = msgspec.json.decode(body)
        except msgspec.DecodeError:
            return body  # the application says what is wrong with it
        if not isinstance(request, dict):
            return body
        salt = request.get("cache_salt")
        said = [request.get("messages"), request.get("input")]
        try:
            refs, _ = client_refs({EC_PARAMS: request.get(EC_PARAMS)})
        except TriptychError:
            refs = {}  # the client is told when the request itself is judged
        self.rename_in(said, salt if isinstance(salt, str) else None, refs)
        return msgspec.json.encode(request)

    def rename_in(
        self, said: Any, cache_salt: str | None, refs: Mapping[str, EncodingRef | None] = MappingProxyType({})
    ) -> None:
        """Put internal identifiers in the place of uuids in `said`, but those that the client has references for."""
        referenced = self._referenced(refs, cache_salt)
        for part in _media_parts(said):
            name = str(part["uuid"])
            if name not in referenced:
                part["uuid"] = self._internal_uuid(name, part, cache_salt)

    def _internal_uuid(self, name: str, part: Mapping[str, Any], cache_salt: str | None) -> str | None:
        media = {key: value for key, value in part.items() if key not in _NOT_MEDIA and value is not None}
        if not media:
            return self._index.find(cache_salt, name) or unknown_id(cache_salt, name, model=self._model)
        encoded = msgspec.json.encode(media, order="sorted")
        if b'"http://' in encoded or b'"https://' in encoded:
            return None
        internal = internal_id(cache_salt, name, hashlib.sha256(encoded).hexdigest(), model=self._model)
        self._index.record(cache_salt, name, internal)
        return internal


def _media_parts(value: Any) -> Iterator[dict[str, Any]]:
    """Every media part with a `uuid` in `value`, at any depth; routes differ in where messages stand."""
    if isinstance(value, dict):
        if value.get("uuid") is not None and (str(value.get("type")) in _MEDIA or _MEDIA & value.keys()):
            yield value
        for inner in value.values():
            yield from _media_parts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _media_parts(inner)


async def _digest(payload: Tensors) -> str:
    if payload.size_bytes <= _INLINE_BYTES:
        return payload_digest(payload)
    return await asyncio.to_thread(payload_digest, payload)
