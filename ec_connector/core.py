"""Everything one agent knows, without its thread and sockets.

Puts the pool, the producer's and the consumer's state machines and the slab together, and answers the three
who talk to an agent: peers, the engine's scheduler, and the worker. One thread at a time; methods for the worker
touch neither NIXL nor sockets, which belong to the IO thread.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ec_connector.config import ECConfig, Limits
from ec_connector.consumer import Consumer, Rules
from ec_connector.counters import counters
from ec_connector.failures import Failures
from ec_connector.fetches import Fetches
from ec_connector.lanes import Here, Probes
from ec_connector.pool import Extent, Pool, Spec, State
from ec_connector.ports import Network, Reader
from ec_connector.producer import Producer
from ec_connector.protocol import (
    WIRE_VERSION,
    Announce,
    Announced,
    Count,
    Counted,
    Done,
    Drop,
    Fail,
    Get,
    Hello,
    Noted,
    PeerMessage,
    PeerReply,
    PinView,
    Reason,
    Refused,
    Release,
    Retract,
    ToAgent,
    ToScheduler,
    Want,
    Welcome,
    announced_fields,
)
from ec_connector.slab import Slab, element_type
from serving.protocol import EncodingRef

_DEVICE_POLL_S = 0.001

Ready = Callable[[], bool]
"""Whether the device has finished what was asked of it."""


class Identity(msgspec.Struct, frozen=True):
    """Who this agent is. `peer` is its control address, `epoch` is unique to this start.

    `rank` of `ranks` counts the workers of one engine; `dtype` and `compatibility` describe the model.
    """

    engine_id: str
    rank: int
    ranks: int
    peer: str
    epoch: str
    compatibility: str
    dtype: str


class Core:
    """The state of one agent.

    Args:
        identity: Who we are.
        config: The operator's settings.
        slab: The memory.
        nixl_metadata: What peers need to read it.
        reader: The data plane.
        network: Control connections to peers.
        here: Where this process runs.
        clock: Monotonic seconds, for measuring.
    """

    def __init__(
        self,
        identity: Identity,
        config: ECConfig,
        slab: Slab,
        *,
        nixl_metadata: bytes,
        reader: Reader,
        network: Network,
        here: Here,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._config = config
        self._slab = slab
        self._nixl_metadata = nixl_metadata
        self.pool = Pool(config.slab_bytes)
        self.producer = Producer(self.pool, peer=identity.peer, epoch=identity.epoch, pin_lease_s=config.pin_lease_s)
        self._place = here.place
        region = slab.region
        self.probes = Probes(reader, here, clock, offset=slab.probe_offset, device=region.device)
        self.fetches = Fetches(
            self.pool,
            slab,
            reader,
            network,
            limits=Limits(config.read_deadline_s, config.quarantine_s, identity.rank, identity.ranks),
            hello=Hello(WIRE_VERSION, identity.compatibility),
            clock=clock,
        )
        rules = Rules(
            objects_to=self._objects_to,
            revoke_one=self.producer.revoke_one,
            busy_wait_s=config.busy_wait_s,
            dtype=identity.dtype,
            itemsize=element_type(identity.dtype).itemsize,
        )
        self.consumer = Consumer(self.pool, self.fetches, rules)
        self.failures = Failures()
        self._on_device: list[tuple[Ready, Callable[[], None]]] = []
        self.saves = 0
        self.save_bytes = 0
        self.saves_skipped = 0
        self.loads = 0

    # --- peers ------------------------------------------------------------------------------------------------

    def on_peer(self, now: float, sender: bytes, message: PeerMessage) -> PeerReply | None:
        """The answer to a peer's message, if it has one now."""
        match message:
            case Hello():
                return self._welcome(message)
            case Get():
                return self.producer.get(now, sender, message)
            case Done() | Release():
                self.producer.reader_done(message)
                return None

    def _welcome(self, hello: Hello) -> PeerReply:
        if hello.wire_version != WIRE_VERSION:
            return Refused(f"wire version {hello.wire_version}, not {WIRE_VERSION}")
        if hello.compatibility != self._identity.compatibility:
            return Refused("another model, revision or dtype")
        region = self._slab.region
        return Welcome(
            self._identity.epoch,
            self._nixl_metadata,
            region.address,
            region.size_bytes,
            region.device,
            self._place,
        )

    # --- the scheduler ----------------------------------------------------------------------------------------

    def on_local(self, now: float, message: ToAgent) -> ToScheduler | None:
        """Act on a message of the engine's scheduler; the answer, if it has one now."""
        match message:
            case Want():
                self.consumer.want(message)
            case Drop():
                self.consumer.drop(message)
            case PinView():
                self.consumer.pin_view(message)
            case Announce():
                refs = self.producer.announce(now, message.identifiers, message.metadata, revocable=message.revocable)
                return Announced(message.token, self._identity.peer, self._identity.epoch, refs)
            case Retract():
                self.producer.release(message.leases)
            case Fail():
                self.failures.add(message)
                return Noted(message.request_id)
            case Count():
                return Counted(counters(self))
        return None

    # --- the worker -------------------------------------------------------------------------------------------

    def absent(self, identifiers: Sequence[str]) -> list[str]:
        """Those of `identifiers` that the slab neither holds nor is filling."""
        return [i for i in identifiers if self.pool.find(i) is None or self.consumer.is_promised(i)]

    def reserve(self, spec: Spec) -> Extent | None:
        """A filling extent for an item to be saved; None when it is here already or everything is pinned."""
        promised = self.consumer.claim(spec)
        if promised is not None:
            return promised
        if self.pool.find(spec.identifier) is not None:
            return None
        extents = self.consumer.reserve([spec])
        if extents is None:
            self.saves_skipped += 1
            return None
        return extents[0]

    def saved(self, extent: Extent, ready: Ready | None, digest: int | None) -> None:
        """The copy into `extent` was issued; it is there once `ready` says so (None: already).

        `digest` is None where the copy was left to a device, so that the bytes can only be digested afterwards.
        """

        def commit() -> None:
            self.saves += 1
            self.save_bytes += extent.size_bytes
            self.pool.commit(extent, self._slab.digest(extent.offset, extent.size_bytes) if digest is None else digest)

        self._when(ready, commit)

    def locate(self, identifier: str) -> Extent:
        """The extent of an item that a request pins.

        Raises:
            LookupError: It is not there, which a request's pin rules out.
        """
        extent = self.pool.find(identifier)
        if extent is None or extent.state is not State.READY:
            raise LookupError(f"{identifier} was to be loaded, but the slab does not hold it")
        self.loads += 1
        return extent

    def evicted(self, load_ids: list[int] | None, ready: Ready | None) -> None:
        """vLLM dropped these views (None: all); the device stops reading them once `ready` says so."""
        self._when(ready, lambda: self.consumer.drop_views(load_ids))

    def announce(self, now: float, identifiers: Sequence[str]) -> dict[str, dict[str, Any] | None]:
        """The fields of an unsigned reference and the metadata, per item; None where the slab lacks it."""
        refs = self.producer.announce(now, identifiers, {})
        return {i: self._announcement(refs[i]) if i in refs else None for i in identifiers}

    # --- time -------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[ToScheduler]:
        """Advance what the scheduler waits for, as far as it goes; returns messages for it."""
        return self.consumer.poll(now)

    def poll(self, now: float) -> tuple[list[ToScheduler], list[tuple[bytes, PeerReply]]]:
        """Advance everything; returns messages for the scheduler, and (sender, reply) for peers."""
        pending, self._on_device = self._on_device, []
        for ready, action in pending:
            self._when(ready, action)
        to_scheduler = self.advance(now)
        if self.fetches.idle:
            for address in self.probes.poll(self.fetches.greeted()):
                self.fetches.on_lost(now, address)
        return to_scheduler, self.producer.poll(now)

    @property
    def waiting(self) -> bool:
        """Whether a request or a peer waits for what a change of the pool may bring."""
        return self.consumer.waiting or self.producer.waiting

    @property
    def unread_bytes(self) -> int:
        """How much `advance` may read at most."""
        return self.consumer.unread_bytes

    @property
    def moving(self) -> bool:
        """Whether a read is under way, so that `poll` should be called again at once."""
        return self.fetches.moving or (self.probes.running and self.fetches.idle)

    def wake_at(self, now: float) -> float | None:
        """When `poll` has something to do at the latest; None when nothing is timed."""
        if self.moving:
            return now
        deadlines = [self.consumer.next_deadline(), self.producer.next_deadline(), self.fetches.next_deadline(now)]
        deadlines += [now + _DEVICE_POLL_S] if self._on_device else []
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _when(self, ready: Ready | None, action: Callable[[], None]) -> None:
        if ready is None or ready():
            action()
        else:
            self._on_device.append((ready, action))

    def _announcement(self, ref: EncodingRef) -> dict[str, Any]:
        return {**announced_fields(ref), "metadata": self.producer.metadata_of(ref.identifier)}

    def _objects_to(self, ref: EncodingRef) -> Reason | None:
        """What rules a reference out before its peer is contacted."""
        if ref.peer == self._identity.peer:
            return Reason.LOST  # it was here, and had it stayed nobody would have to ask
        if ref.dtype != self._identity.dtype or min(ref.shape) <= 0:
            return Reason.MISMATCH
        if ref.size_bytes != math.prod(ref.shape) * element_type(ref.dtype).itemsize:
            return Reason.MISMATCH
        return None if self._config.allows(urlsplit(ref.peer).hostname or "") else Reason.MISMATCH


def control_address(host: str, port: int) -> str:
    """`tcp://host:port`, with IPv6 addresses in brackets."""
    return f"tcp://[{host}]:{port}" if ipaddress.ip_address(host).version == 6 else f"tcp://{host}:{port}"
