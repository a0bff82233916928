"""The producer's side of a transfer: announcements, leases, and answers to peers.

A state machine over the pool. It performs no I/O: methods return the messages to send, and the time is a
parameter. Each lease holds one pin on one extent, until every reader is done or the lease expires.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ec_connector.pool import Extent, Pool, State
from ec_connector.protocol import Done, Get, Grant, Nack, PeerReply, Release
from serving.protocol import EncodingRef


class Lease(msgspec.Struct):
    """A pin that belongs to one announcement or grant. `done` are the reader ranks that no longer need it.

    A `revocable` one may be dropped early; whoever reads then finds another digest.
    """

    extent: Extent
    expires_at: float
    done: set[int]
    revocable: bool


class _ParkedGet(msgspec.Struct, frozen=True):
    """A Get for an extent that is still being filled."""

    sender: bytes
    message: Get


class Producer:
    """Announces extents and keeps them in place for those who read them.

    Args:
        pool: The slab's extents.
        peer: This agent's control address, as peers reach it.
        epoch: Unique to this start of the agent.
        pin_lease_s: Life of a lease that nobody uses.
    """

    def __init__(self, pool: Pool, *, peer: str, epoch: str, pin_lease_s: float) -> None:
        self._pool = pool
        self._peer = peer
        self._epoch = epoch
        self._pin_lease_s = pin_lease_s
        self._leases: dict[str, Lease] = {}
        self._parked: list[_ParkedGet] = []
        self.leases_expired = 0
        self.leases_revoked = 0
        self.nacks = 0

    @property
    def open_leases(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> bool:
        """Whether a peer waits for an item that is being filled."""
        return bool(self._parked)

    def announce(
        self,
        now: float,
        identifiers: Iterable[str],
        metadata: Mapping[str, dict[str, Any]],
        *,
        revocable: bool = False,
    ) -> dict[str, EncodingRef]:
        """Unsigned references to what the slab holds of `identifiers`; a lease each for what is ready.

        Items still being filled get no place yet (`offset` None); the reader asks for it with Get.
        """
        refs = {}
        for identifier in identifiers:
            extent = self._pool.find(identifier)
            if extent is None:
                continue
            if metadata.get(identifier):
                extent.metadata = metadata[identifier]
            refs[identifier] = self._reference(now, extent, revocable)
        return refs

    def metadata_of(self, identifier: str) -> dict[str, Any] | None:
        """What an earlier announcement said of the item."""
        extent = self._pool.find(identifier)
        return None if extent is None else extent.metadata

    def get(self, now: float, sender: bytes, message: Get) -> PeerReply | None:
        """The answer to a Get, or None while the item is being filled (`poll` answers later)."""
        extent = self._pool.find(message.identifier)
        if extent is None:
            self.nacks += 1
            return Nack(message.token, "absent")
        if extent.state is State.FILLING:
            self._parked.append(_ParkedGet(sender, message))
            return None
        return Grant(
            token=message.token,
            lease=self._open(now, extent, revocable=False),
            offset=extent.offset,
            generation=extent.generation,
            shape=extent.shape,
            dtype=extent.dtype,
            size_bytes=extent.size_bytes,
            digest=extent.digest,
        )

    def reader_done(self, message: Done | Release) -> None:
        """One reader needs its lease no longer. Unknown leases have expired or were reported twice."""
        lease = self._leases.get(message.lease)
        if lease is None:
            return
        lease.done.add(message.reader)
        if len(lease.done) >= message.readers:
            self._close(message.lease)

    def release(self, leases: Iterable[str]) -> int:
        """Drop leases whatever their readers; returns how many were open."""
        known = [lease for lease in leases if lease in self._leases]
        for lease in known:
            self._close(lease)
        return len(known)

    def revoke_one(self) -> bool:
        """Drop the oldest revocable lease; False when there is none."""
        lease_id = next((lease_id for lease_id, lease in self._leases.items() if lease.revocable), None)
        if lease_id is None:
            return False
        self.leases_revoked += 1
        self._close(lease_id)
        return True

    def poll(self, now: float) -> list[tuple[bytes, PeerReply]]:
        """Expire leases, and answer parked Gets whose item became ready or went away: (sender, reply)."""
        for lease_id, lease in list(self._leases.items()):
            if lease.expires_at <= now:
                self.leases_expired += 1
                self._close(lease_id)
        parked, self._parked = self._parked, []
        answers = []
        for waiting in parked:
            reply = self.get(now, waiting.sender, waiting.message)
            if reply is not None:
                answers.append((waiting.sender, reply))
        return answers

    def next_deadline(self) -> float | None:
        """When `poll` has something to do at the latest; None when nothing is timed."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def _reference(self, now: float, extent: Extent, revocable: bool) -> EncodingRef:
        ready = extent.state is State.READY
        return EncodingRef(
            identifier=extent.identifier,
            peer=self._peer,
            epoch=self._epoch,
            offset=extent.offset if ready else None,
            generation=extent.generation,
            shape=extent.shape,
            dtype=extent.dtype,
            size_bytes=extent.size_bytes,
            digest=extent.digest,
            lease=self._open(now, extent, revocable=revocable) if ready else "",
        )

    def _open(self, now: float, extent: Extent, *, revocable: bool) -> str:
        lease_id = uuid.uuid4().hex
        self._pool.pin(extent)
        self._leases[lease_id] = Lease(extent, now + self._pin_lease_s, set(), revocable)
        return lease_id

    def _close(self, lease_id: str) -> None:
        self._pool.unpin(self._leases.pop(lease_id).extent)
