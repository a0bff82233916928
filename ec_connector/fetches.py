"""Reads from peers: greet a peer once, learn the place, READ, check the digest.

A state machine that owns every read under way and every extent whose read has not settled. I/O goes through
the ports, and the time is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ec_connector.config import Limits
from ec_connector.pool import Extent, Pool
from ec_connector.ports import Greeted, Memory, Network, Reader
from ec_connector.protocol import (
    Done,
    Get,
    Grant,
    Hello,
    Nack,
    PeerReply,
    Reason,
    Refused,
    Release,
    Welcome,
)
from ec_connector.transport.reads import PeerUnusable, Read, ReadState, Region
from serving.protocol import EncodingRef

_SETTLE_POLL_S = 0.1
"""Given-up reads are looked at this often. They hold memory, not requests."""


class Fetch(msgspec.Struct, eq=False):
    """One item on its way. `lease` is the producer's pin that its end will release."""

    ref: EncodingRef
    extent: Extent
    started: float
    deadline: float
    lease: str
    digest: int = 0
    token: int = 0
    read: Read | None = None
    transfer_s: float = 0.0


class _Peer(msgspec.Struct, eq=False):
    """A producer we talk to. `name` and `welcome` are set once it has answered."""

    waiting: list[Fetch]
    name: str = ""
    welcome: Welcome | None = None

    def region(self) -> Region:
        assert self.welcome is not None
        return Region(self.welcome.address, self.welcome.slab_bytes, self.welcome.device)


class _Unsettled(msgspec.Struct, frozen=True, eq=False):
    """A given-up read that may still write into its extent."""

    fetch: Fetch
    read: Read
    drop_at: float


class Fetches:
    """All reads of one agent. At most one per identifier (the pool sees to that)."""

    def __init__(
        self,
        pool: Pool,
        memory: Memory,
        reader: Reader,
        network: Network,
        *,
        limits: Limits,
        hello: Hello,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._reader = reader
        self._network = network
        self._limits = limits
        self._hello = hello
        self._clock = clock  # measures; what happens when is decided by `now` alone
        self._peers: dict[str, _Peer] = {}
        self._active: dict[str, Fetch] = {}
        self._ended: list[tuple[Fetch, Reason | None]] = []
        self._unsettled: list[_Unsettled] = []
        self._tokens = 0
        self.reads = 0
        self.reads_in_place = 0
        self.read_bytes = 0
        self.read_seconds = 0.0
        self.nacks = 0

    def start(self, now: float, ref: EncodingRef, extent: Extent) -> None:
        """Read `ref` into the filling `extent`. The end shows in `poll`."""
        fetch = Fetch(ref, extent, now, now + self._limits.read_deadline_s, ref.lease, ref.digest)
        self._active[ref.identifier] = fetch
        peer = self._peers.get(ref.peer)
        if peer is None:
            self._peers[ref.peer] = _Peer([fetch])
            self._network.connect(ref.peer)
            self._network.send(ref.peer, self._hello)
        elif peer.welcome is None:
            peer.waiting.append(fetch)
        else:
            self._locate(now, peer, fetch)

    def uses(self, lease: str) -> bool:
        """Whether a read under way will release `lease` itself."""
        return any(fetch.lease == lease for fetch in self._active.values())

    def release(self, peer: str, lease: str) -> None:
        """Tell a producer that this rank will not use a lease. Nothing happens for the empty one."""
        if lease:
            self._network.connect(peer)
            self._network.send(peer, Release(lease, self._limits.reader, self._limits.readers))

    def on_reply(self, now: float, address: str, reply: PeerReply) -> None:
        peer = self._peers.get(address)
        if peer is None:
            return
        match reply:
            case Welcome():
                self._greeted(now, address, peer, reply)
            case Refused():
                for fetch in self._of_peer(address):
                    self._give_up(now, fetch, Reason.MISMATCH)
                self._forget_peer(address)
            case Grant():
                if asked := self._by_token(address, reply.token):
                    self._granted(now, peer, asked, reply)
                else:
                    self.release(address, reply.lease)  # given up meanwhile
            case Nack():
                if asked := self._by_token(address, reply.token):
                    self.nacks += 1
                    self._give_up(now, asked, Reason.LOST)

    def on_lost(self, now: float, address: str) -> None:
        """The connection to a peer broke, or a read from it: its items are lost, and nothing else is."""
        if address not in self._peers:
            return
        for fetch in self._of_peer(address):
            self._give_up(now, fetch, Reason.LOST)
        self._forget_peer(address)

    def poll(self, now: float) -> list[tuple[Fetch, Reason | None]]:
        """Fetches that ended since the last call; a reason where they failed. Settled extents are freed."""
        for fetch in list(self._active.values()):
            if fetch.read is not None and self._is_active(fetch):
                self._check(now, fetch)
            if self._is_active(fetch) and now >= fetch.deadline:
                self._give_up(now, fetch, Reason.TIMEOUT)
        for entry in list(self._unsettled):
            self._settle(now, entry)
        ended, self._ended = self._ended, []
        return ended

    @property
    def moving(self) -> bool:
        """Whether a read is under way, so that `poll` should be called again at once."""
        return any(fetch.read is not None for fetch in self._active.values())

    @property
    def idle(self) -> bool:
        """Whether no request waits for a peer."""
        return not self._active

    def greeted(self) -> list[Greeted]:
        """The peers that can be read from at present."""
        return [Greeted(a, p.name, p.region(), p.welcome.place) for a, p in self._peers.items() if p.welcome]

    def next_deadline(self, now: float) -> float | None:
        """When `poll` has something to do at the latest; None when nothing is timed."""
        deadlines = [fetch.deadline for fetch in self._active.values()]
        deadlines += [now + _SETTLE_POLL_S] if self._unsettled else []
        return min(deadlines, default=None)

    def _greeted(self, now: float, address: str, peer: _Peer, welcome: Welcome) -> None:
        try:
            peer.name = self._reader.add_peer(welcome.nixl_metadata)
        except PeerUnusable:
            self.on_lost(now, address)
            return
        peer.welcome = welcome
        waiting, peer.waiting = peer.waiting, []
        for fetch in waiting:
            if self._is_active(fetch):
                self._locate(now, peer, fetch)

    def _locate(self, now: float, peer: _Peer, fetch: Fetch) -> None:
        """Read at the announced place, or ask for it."""
        assert peer.welcome is not None
        if fetch.ref.epoch != peer.welcome.epoch:
            self._give_up(now, fetch, Reason.MISMATCH)
        elif fetch.ref.offset is not None:
            self._read(now, peer, fetch, fetch.ref.offset)
        else:
            self._tokens += 1
            fetch.token = self._tokens
            self._network.send(fetch.ref.peer, Get(fetch.token, fetch.ref.identifier))

    def _granted(self, now: float, peer: _Peer, fetch: Fetch, grant: Grant) -> None:
        fetch.lease = grant.lease
        fetch.digest = grant.digest
        announced = (fetch.ref.shape, fetch.ref.dtype, fetch.ref.size_bytes)
        if (grant.shape, grant.dtype, grant.size_bytes) != announced:
            self._give_up(now, fetch, Reason.MISMATCH)
        else:
            self._read(now, peer, fetch, grant.offset)

    def _read(self, now: float, peer: _Peer, fetch: Fetch, source_offset: int) -> None:
        region = peer.region()
        size = fetch.ref.size_bytes
        if source_offset < 0 or source_offset + size > region.size_bytes:
            self._give_up(now, fetch, Reason.MISMATCH)
            return
        fetch.read = self._reader.read(peer.name, region, source_offset, fetch.extent.offset, size)
        self.reads_in_place += fetch.read.state is ReadState.DONE
        self._check(now, fetch)

    def _check(self, now: float, fetch: Fetch) -> None:
        assert fetch.read is not None
        match self._reader.poll(fetch.read):
            case ReadState.MOVING:
                return
            case ReadState.LOST:
                self._give_up(now, fetch, Reason.LOST)
                self.on_lost(now, fetch.ref.peer)  # though its socket may not have noticed yet
            case ReadState.DONE:
                self._verify(now, fetch)

    def _verify(self, now: float, fetch: Fetch) -> None:
        """The end of a read. A wrong digest means that the place was reused, or was never what was announced."""
        digest = self._memory.digest(fetch.extent.offset, fetch.ref.size_bytes)
        if digest != fetch.digest:
            self._give_up(now, fetch, Reason.MISMATCH)
            return
        fetch.transfer_s = self._clock() - fetch.started
        self.reads += 1
        self.read_bytes += fetch.ref.size_bytes
        self.read_seconds += fetch.transfer_s
        self._pool.commit(fetch.extent, digest)
        del self._active[fetch.ref.identifier]
        self._ended.append((fetch, None))
        if fetch.lease:
            self._network.send(fetch.ref.peer, Done(fetch.lease, self._limits.reader, self._limits.readers))

    def _give_up(self, now: float, fetch: Fetch, reason: Reason) -> None:
        del self._active[fetch.ref.identifier]
        if fetch.read is not None and fetch.read.state is ReadState.MOVING:
            self._pool.quarantine(fetch.extent)
            self._unsettled.append(_Unsettled(fetch, fetch.read, now + self._limits.quarantine_s))
        else:
            self._pool.abandon(fetch.extent)
        self._ended.append((fetch, reason))
        if fetch.lease and fetch.ref.peer in self._peers and reason is not Reason.LOST:
            self.release(fetch.ref.peer, fetch.lease)

    def _settle(self, now: float, entry: _Unsettled) -> None:
        """Free a quarantined extent once its read has ended; past `drop_at`, cut the peer off to end it."""
        if self._reader.poll(entry.read) is not ReadState.MOVING:
            self._unsettled.remove(entry)
            self._pool.release(entry.fetch.extent)
        elif now >= entry.drop_at:
            self._unsettled.remove(entry)
            self._unsettled.append(_Unsettled(entry.fetch, entry.read, now + self._limits.quarantine_s))
            self.on_lost(now, entry.fetch.ref.peer)

    def _forget_peer(self, address: str) -> None:
        peer = self._peers.pop(address, None)
        self._network.disconnect(address)
        if peer is not None and peer.name:
            self._reader.drop_peer(peer.name)

    def _is_active(self, fetch: Fetch) -> bool:
        return self._active.get(fetch.ref.identifier) is fetch

    def _of_peer(self, address: str) -> list[Fetch]:
        return [fetch for fetch in self._active.values() if fetch.ref.peer == address]

    def _by_token(self, address: str, token: int) -> Fetch | None:
        return next((f for f in self._of_peer(address) if f.token == token and f.read is None), None)
