"""The data plane's vocabulary, apart from any library: regions, reads and their states."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

HOST_DEVICE = -1
"""`device` of host memory; a CUDA device is its index."""


PROBE_BYTES = 1 << 20
"""Room behind every slab that a peer's lane is measured with. What lands there is never looked at."""


class ReadState(enum.Enum):
    MOVING = "moving"
    DONE = "done"
    LOST = "lost"
    """The peer is gone or its memory is; nothing writes into the destination any more."""


class PeerUnusable(Exception):
    """A peer's metadata cannot be loaded: it died, or speaks for another NIXL."""


class Region(msgspec.Struct, frozen=True):
    """Registered memory: base address, size in bytes, device (`HOST_DEVICE` or a CUDA index)."""

    address: int
    size_bytes: int
    device: int

    @property
    def segment(self) -> str:
        return "DRAM" if self.device == HOST_DEVICE else "VRAM"

    def descriptor(self, offset: int, size_bytes: int) -> tuple[int, int, int]:
        """(address, length, device) of a part of the region, as NIXL counts devices."""
        return (self.address + offset, size_bytes, max(self.device, 0))


class Read:
    """One READ under way. `handle` belongs to the data plane."""

    def __init__(self, handle: Any, state: ReadState) -> None:
        self.handle = handle
        self.state = state
