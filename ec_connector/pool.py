"""Extents of one slab: which bytes hold which encoding, and which may be reused.

    absent -> filling -> ready -> (pinned while anything points at it) -> ready -> absent
                    \\-> quarantined -> absent

An extent is one contiguous run of granules, so that an encoding is one descriptor of a transfer. Ready extents
that nothing pins are evicted least recently used first. Pure bookkeeping: no I/O, no clock, no memory.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Sequence
from typing import Any

import msgspec

GRANULE_BYTES = 4 << 10
"""Allocation unit, one page. What an item wastes is less, so many small items cannot crowd out a slab sized by rows."""


class State(enum.Enum):
    FILLING = "filling"
    READY = "ready"
    QUARANTINED = "quarantined"


class Extent(msgspec.Struct, eq=False):
    """One encoding's place in the slab. Only the pool changes `state` and `pins`.

    `generation` is unique within a pool, so a place that was reused can be told from the one announced.
    `metadata` is what the producing request knew of the item (such as its grid), kept for later announcements.
    """

    identifier: str
    offset: int
    size_bytes: int
    generation: int
    shape: tuple[int, int]
    dtype: str
    state: State = State.FILLING
    digest: int = 0
    pins: int = 0
    metadata: dict[str, Any] | None = None


class Spec(msgspec.Struct, frozen=True):
    """An encoding to make room for. `shape` is (rows, width)."""

    identifier: str
    size_bytes: int
    shape: tuple[int, int]
    dtype: str


class PoolStats(msgspec.Struct, frozen=True):
    """Sizes in bytes of granules taken, not of payload."""

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    quarantined_bytes: int
    filling: int
    ready: int
    pinned: int
    quarantined: int
    evictions: int


class Pool:
    """The extents of a slab of `capacity_bytes`. One thread owns it.

    `freed` counts every event after which a reservation that failed before could succeed.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes // GRANULE_BYTES * GRANULE_BYTES
        self._free = FreeList(self.capacity_bytes)
        self._by_id: dict[str, Extent] = {}  # filling and ready; ready ones in order of last use
        self._quarantined: list[Extent] = []
        self._generation = 0
        self.evictions = 0
        self.freed = 0

    def find(self, identifier: str) -> Extent | None:
        """The filling or ready extent of `identifier`."""
        return self._by_id.get(identifier)

    def touch(self, extent: Extent) -> None:
        """Mark a use: the extent becomes the last one to be evicted."""
        self._by_id[extent.identifier] = self._by_id.pop(extent.identifier)

    def reserve(self, specs: Sequence[Spec]) -> list[Extent] | None:
        """Room for all of `specs`, evicting what nothing pins, or None and nothing changed.

        None of the identifiers may be present already. The extents returned are filling.
        """
        if any(spec.identifier in self._by_id for spec in specs):
            raise ValueError("an extent for one of the identifiers exists")
        sizes = [spec.size_bytes for spec in specs]
        offsets = self._free.take_all(sizes)
        if offsets is None:
            offsets = self._evict_for(sizes)
        if offsets is None:
            return None
        return [self._insert(spec, offset) for spec, offset in zip(specs, offsets, strict=True)]

    def commit(self, extent: Extent, digest: int) -> None:
        """filling -> ready. `digest` is xxh3_64 over the bytes."""
        self._expect(extent, State.FILLING)
        extent.state = State.READY
        extent.digest = digest
        self.touch(extent)
        self.freed += 1

    def abandon(self, extent: Extent) -> None:
        """filling -> absent: nothing was written, or nothing can write any more."""
        self._expect(extent, State.FILLING)
        del self._by_id[extent.identifier]
        self._give_back(extent)

    def quarantine(self, extent: Extent) -> None:
        """filling -> quarantined: something may still write into it, so it is neither found nor reused."""
        self._expect(extent, State.FILLING)
        del self._by_id[extent.identifier]
        extent.state = State.QUARANTINED
        self._quarantined.append(extent)

    def release(self, extent: Extent) -> None:
        """quarantined -> absent: the writer is known to have stopped."""
        self._expect(extent, State.QUARANTINED)
        self._quarantined.remove(extent)
        self._give_back(extent)

    def pin(self, extent: Extent) -> None:
        """Keep a ready extent where it is until `unpin`. Pins count."""
        self._expect(extent, State.READY)
        extent.pins += 1
        self.touch(extent)

    def unpin(self, extent: Extent) -> None:
        if extent.pins <= 0:
            raise ValueError(f"extent {extent.generation} is not pinned")
        extent.pins -= 1
        self.freed += 1  # also where pins remain: they may be revocable

    def fits_empty(self, size_bytes: int) -> bool:
        """Whether an item of this size could ever be held."""
        return granule_bytes(size_bytes) <= self.capacity_bytes

    def stats(self) -> PoolStats:
        held = list(self._by_id.values())
        pinned = [extent for extent in held if extent.pins]
        return PoolStats(
            capacity_bytes=self.capacity_bytes,
            used_bytes=self.capacity_bytes - self._free.total_bytes,
            pinned_bytes=sum(granule_bytes(extent.size_bytes) for extent in pinned),
            quarantined_bytes=sum(granule_bytes(extent.size_bytes) for extent in self._quarantined),
            filling=sum(extent.state is State.FILLING for extent in held),
            ready=sum(extent.state is State.READY for extent in held),
            pinned=len(pinned),
            quarantined=len(self._quarantined),
            evictions=self.evictions,
        )

    def extents(self) -> list[Extent]:
        """Every extent that takes room, in no particular order."""
        return [*self._by_id.values(), *self._quarantined]

    def _evict_for(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets for all of `sizes` at the cost of the least recently used, or None and nothing evicted."""
        trial = self._free.copy()
        victims: list[Extent] = []
        for victim in self._by_id.values():
            if victim.state is not State.READY or victim.pins:
                continue
            victims.append(victim)
            trial.give(victim.offset, victim.size_bytes)
            offsets = trial.take_all(sizes)
            if offsets is not None:
                break
        else:
            return None
        for victim in victims:
            del self._by_id[victim.identifier]
        self.evictions += len(victims)
        self._free = trial
        return offsets

    def _insert(self, spec: Spec, offset: int) -> Extent:
        self._generation += 1
        extent = Extent(spec.identifier, offset, spec.size_bytes, self._generation, spec.shape, spec.dtype)
        self._by_id[spec.identifier] = extent
        return extent

    def _give_back(self, extent: Extent) -> None:
        self._free.give(extent.offset, extent.size_bytes)
        self.freed += 1

    @staticmethod
    def _expect(extent: Extent, state: State) -> None:
        if extent.state is not state:
            raise ValueError(f"extent {extent.generation} is {extent.state.value}, not {state.value}")


class FreeList:
    """Free runs of a slab in order of offset, neighbours merged; first fit."""

    def __init__(self, capacity_bytes: int) -> None:
        self._runs: list[tuple[int, int]] = [(0, capacity_bytes)] if capacity_bytes else []
        self.total_bytes = capacity_bytes

    def copy(self) -> FreeList:
        twin = FreeList(0)
        twin._runs = list(self._runs)
        twin.total_bytes = self.total_bytes
        return twin

    def take_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets for all of `sizes`, or None and nothing taken."""
        before, total = list(self._runs), self.total_bytes
        offsets = []
        for size in sizes:
            offset = self._take(granule_bytes(size))
            if offset is None:
                self._runs, self.total_bytes = before, total
                return None
            offsets.append(offset)
        return offsets

    def give(self, offset: int, size_bytes: int) -> None:
        """Return a run, merging it with its neighbours."""
        length = granule_bytes(size_bytes)
        self.total_bytes += length
        index = bisect.bisect(self._runs, (offset, 0))
        if index < len(self._runs) and offset + length == self._runs[index][0]:
            length += self._runs.pop(index)[1]
        if index > 0 and sum(self._runs[index - 1]) == offset:
            index -= 1
            start, before = self._runs.pop(index)
            offset, length = start, before + length
        self._runs.insert(index, (offset, length))

    def _take(self, length: int) -> int | None:
        for index, (offset, run) in enumerate(self._runs):
            if run >= length:
                if run == length:
                    del self._runs[index]
                else:
                    self._runs[index] = (offset + length, run - length)
                self.total_bytes -= length
                return offset
        return None


def granule_bytes(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole granules, at least one."""
    return max(1, -(-size_bytes // GRANULE_BYTES)) * GRANULE_BYTES
