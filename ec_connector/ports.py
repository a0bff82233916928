"""What the state machines need from the world: control connections, the data plane, the bytes of the slab."""

from __future__ import annotations

from typing import Protocol

import msgspec

from ec_connector.protocol import PeerMessage, Place
from ec_connector.transport.reads import Read, ReadState, Region


class Greeted(msgspec.Struct, frozen=True):
    """A peer that can be read from, under the data plane's `name` for it."""

    address: str
    name: str
    region: Region
    place: Place


class Network(Protocol):
    """Control connections to peers, by address."""

    def connect(self, address: str) -> None: ...
    def disconnect(self, address: str) -> None: ...
    def send(self, address: str, message: PeerMessage) -> None: ...


class Reader(Protocol):
    """The data plane; `NixlAgent` is one."""

    def add_peer(self, metadata: bytes) -> str: ...
    def drop_peer(self, name: str) -> None: ...
    def read(self, peer: str, source: Region, source_offset: int, offset: int, size_bytes: int) -> Read: ...
    def poll(self, read: Read) -> ReadState: ...


class Memory(Protocol):
    """The bytes behind the pool."""

    def digest(self, offset: int, size_bytes: int) -> int: ...
