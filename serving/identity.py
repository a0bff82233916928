"""Names of items: what a client calls an item never becomes the key of a cache by itself.

A client may call two pictures by one name, or a picture of its own by the name of someone else's. An internal
identifier therefore holds the tenant, the client's name and the payload's digest; whoever has the payload can
check that the name belongs to it. Media that our own renderer hashed keep their content hash.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import msgspec

from serving.protocol import Tensors
from serving.references import salt_digest

__all__ = ["IdentityIndex", "internal_id", "is_internal", "payload_digest", "unknown_id"]

_PREFIX = "item-"
_DIGEST_HEX = 40
_OWNER_HEX = 24


def payload_digest(tensors: Tensors) -> str:
    """A collision-resistant digest over an item's tensors and metadata. 40 hex digits.

    Clients choose the content, so a fast non-cryptographic hash would not do. SHA-256 has instructions of its
    own on current processors and beats BLAKE2b there. Releases the interpreter lock: call it from a thread for
    large items. Equal tensors encoded in another field order have another digest; that costs reuse, never truth.
    """
    digest = hashlib.sha256()
    for frame in tensors.frames:
        digest.update(len(frame).to_bytes(8, "little"))
        digest.update(frame)
    digest.update(msgspec.json.encode(tensors.metadata, order="sorted"))
    return digest.hexdigest()[:_DIGEST_HEX]


def internal_id(cache_salt: str | None, external_id: str, digest: str, *, model: str = "") -> str:
    """The key of an item that a client named and sent.

    Args:
        cache_salt: The tenant.
        external_id: What the client calls the item.
        digest: `payload_digest` of what it sent.
        model: Keeps one client's items for two models apart; their encodings differ.
    """
    return f"{_PREFIX}{_owner(cache_salt, external_id, model)}-{digest}"


def unknown_id(cache_salt: str | None, external_id: str, *, model: str = "") -> str:
    """A key for a name that was never seen with a payload. No payload can have it, so no cache ever holds it."""
    return f"{_PREFIX}{_owner(cache_salt, external_id, model)}-unknown"


def is_internal(identifier: str, digest: str) -> bool:
    """Whether `identifier` is an internal one of exactly this payload, so that it need not be derived again."""
    return identifier.startswith(_PREFIX) and identifier.endswith(f"-{digest}")


def _owner(cache_salt: str | None, external_id: str, model: str) -> str:
    parts = msgspec.msgpack.encode((cache_salt, external_id, model))
    return hashlib.sha256(parts).hexdigest()[:_OWNER_HEX]


class IdentityIndex:
    """Per tenant, the latest internal identifier of each name: how items sent by name alone are found.

    Not thread-safe; one per process. Losing an entry costs a client one more upload.

    Args:
        capacity: Names remembered; the least recently used is forgotten first.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("capacity must be positive")
        self._capacity = capacity
        self._latest: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._latest)

    def record(self, cache_salt: str | None, external_id: str, internal: str) -> None:
        """Remember that the tenant's `external_id` now means `internal` (a content hash may name itself)."""
        key = (salt_digest(cache_salt), external_id)
        self._latest[key] = internal
        self._latest.move_to_end(key)
        if len(self._latest) > self._capacity:
            self._latest.popitem(last=False)

    def find(self, cache_salt: str | None, external_id: str) -> str | None:
        key = (salt_digest(cache_salt), external_id)
        if key in self._latest:
            self._latest.move_to_end(key)
        return self._latest.get(key)
