"""What prefill keeps of items that passed through it: their metadata, and tensors where it was sent some.

It is asked before the engine is, so that a repeat by name alone finds what position set-up needs. Metadata and
tensors have separate budgets: one item's pixels would push out the metadata of ten thousand others, and metadata
is what M-RoPE models cannot do without.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from serving.errors import InvalidFeature
from serving.protocol import Metadata, ResolvedItem, Tensors

__all__ = ["CacheCounters", "ReceiverCache"]

_METADATA_SHARE = 16
"""One sixteenth of the bytes is for metadata: some 60,000 images for each 256 MiB."""
_ENTRY_BYTES = 256
"""Allowance for an entry's own objects: keys, dict slots, boxed numbers."""

_Value = TypeVar("_Value")
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """Totals since start, and what is held now. A lookup that finds metadata is a hit."""

    hits: int
    misses: int
    evictions: int
    items: int
    size_bytes: int


class ReceiverCache:
    """LRU by bytes, keyed by tenant and internal identifier. Any thread may call any method.

    An identifier's content never changes: a second `put` may add tensors to metadata, never differ from it. What one
    tenant sent is not there for another, whatever names it knows. Tenants are named by `salt_digest`.

    Args:
        capacity_bytes: Bytes of metadata and tensors together. 0 keeps nothing.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError("capacity_bytes must not be negative")
        share = capacity_bytes // _METADATA_SHARE
        self._metadata: _ByteLru[dict[str, Any]] = _ByteLru(share)
        self._tensors: _ByteLru[Tensors] = _ByteLru(capacity_bytes - share)
        self._lock = threading.Lock()
        self._hits = 0
        self._misses = 0

    def get(self, tenant: str, identifier: str) -> Tensors | Metadata | None:
        """The most that is held of an item. Makes it the most recently used."""
        key = (tenant, identifier)
        with self._lock:
            metadata, tensors = self._metadata.get(key), self._tensors.get(key)
            if metadata is None and tensors is None:
                self._misses += 1
                return None
            self._hits += 1
            return tensors if metadata is None or tensors is not None else Metadata(metadata)

    def put(self, tenant: str, identifier: str, payload: Tensors | Metadata) -> None:
        """Keep an admitted item. One that does not fit is not kept, or without its tensors.

        Raises:
            InvalidFeature: Other content is held under this identifier. Nothing changed.
        """
        metadata = payload.metadata if isinstance(payload, Tensors) else payload.fields
        key = (tenant, identifier)
        with self._lock:
            self._check_same(key, payload, metadata)
            self._metadata.put(key, metadata, len(msgspec.msgpack.encode(metadata)) + _ENTRY_BYTES)
            if isinstance(payload, Tensors):
                self._tensors.put(key, payload, payload.size_bytes + _ENTRY_BYTES)

    def resolve(self, tenant: str, identifiers: Sequence[str]) -> dict[str, ResolvedItem]:
        """What is held of each item, without references; items of which nothing is held are left out."""
        held = {name: self.get(tenant, name) for name in dict.fromkeys(identifiers)}
        return {name: _resolved(name, payload) for name, payload in held.items() if payload is not None}

    def counters(self) -> CacheCounters:
        with self._lock:
            return CacheCounters(
                hits=self._hits,
                misses=self._misses,
                evictions=self._metadata.evictions + self._tensors.evictions,
                items=len(self._metadata.entries.keys() | self._tensors.entries.keys()),
                size_bytes=self._metadata.size_bytes + self._tensors.size_bytes,
            )

    def _check_same(self, key: _Key, payload: Tensors | Metadata, metadata: dict[str, Any]) -> None:
        tensors = self._tensors.peek(key)
        kept = self._metadata.peek(key) if tensors is None else tensors.metadata
        differs = kept is not None and kept != metadata
        if isinstance(payload, Tensors) and tensors is not None and tensors.frames != payload.frames:
            differs = True
        if differs:
            raise InvalidFeature("an item's identifier already names other content", hashes=[key[1]])


class _ByteLru(Generic[_Value]):
    """Entries with sizes, least recently used first. Not thread-safe."""

    def __init__(self, capacity_bytes: int) -> None:
        self.entries: OrderedDict[_Key, tuple[_Value, int]] = OrderedDict()
        self.size_bytes = 0
        self.evictions = 0
        self._capacity_bytes = capacity_bytes

    def peek(self, key: _Key) -> _Value | None:
        found = self.entries.get(key)
        return None if found is None else found[0]

    def get(self, key: _Key) -> _Value | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.peek(key)

    def put(self, key: _Key, value: _Value, size_bytes: int) -> None:
        """Keep `value`, evicting others; a value that exceeds the whole capacity evicts nothing and is not kept."""
        if size_bytes > self._capacity_bytes:
            return
        _, replaced_bytes = self.entries.pop(key, (None, 0))
        self.size_bytes += size_bytes - replaced_bytes
        self.entries[key] = (value, size_bytes)
        while self.size_bytes > self._capacity_bytes:
            _, (_, freed_bytes) = self.entries.popitem(last=False)
            self.size_bytes -= freed_bytes
            self.evictions += 1


def _resolved(identifier: str, payload: Tensors | Metadata) -> ResolvedItem:
    has_tensors = isinstance(payload, Tensors)
    metadata = payload.metadata if isinstance(payload, Tensors) else payload.fields
    return ResolvedItem(identifier, metadata, has_tensors, None)
