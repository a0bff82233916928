"""A consumer over fakes, with the clock in the test's hand."""

from __future__ import annotations

from ec_connector.config import Limits
from ec_connector.consumer import Consumer, Rules
from ec_connector.fetches import Fetches
from ec_connector.pool import Extent, Pool, Spec
from ec_connector.protocol import (
    WIRE_VERSION,
    Hello,
    Want,
    WantedItem,
    Welcome,
)
from serving.protocol import EncodingRef
from tests.unit.ec_connector.ec_fakes import MIB, PEER, PLACE, FakeMemory, FakeNetwork, FakeReader

DEADLINE_S, QUARANTINE_S, BUSY_S = 10.0, 30.0, 5.0


class World:
    """A consumer over fakes; `now` is the clock."""

    def __init__(self, slab_bytes: int = 4 * MIB) -> None:
        self.now = 100.0
        self.pool = Pool(slab_bytes)
        self.reader, self.network, self.memory = FakeReader(), FakeNetwork(), FakeMemory()
        self.fetches = Fetches(
            self.pool,
            self.memory,
            self.reader,
            self.network,
            limits=Limits(DEADLINE_S, QUARANTINE_S, reader=0, readers=1),
            hello=Hello(WIRE_VERSION, "model"),
            clock=lambda: self.now,
        )
        self.revocable: list[Extent] = []
        rules = Rules(lambda _: None, self.revoke_one, BUSY_S, "bfloat16", 2)
        self.consumer = Consumer(self.pool, self.fetches, rules)

    def revoke_one(self) -> bool:
        if not self.revocable:
            return False
        self.pool.unpin(self.revocable.pop(0))
        return True

    def want(self, request_id: str, *refs: EncodingRef) -> list[object]:
        items = tuple(WantedItem(r.identifier, r.shape[0], ref=r) for r in refs)
        self.consumer.want(Want(request_id, items))
        return self.poll()

    def poll(self, after_s: float = 0.0) -> list[object]:
        self.now += after_s
        return list(self.consumer.poll(self.now))

    def welcome(self, peer: str = PEER, epoch: str = "epoch") -> list[object]:
        self.fetches.on_reply(
            self.now, peer, Welcome(epoch, b"agent of " + peer.encode(), 1 << 30, 64 * MIB, -1, PLACE)
        )
        return self.poll()

    def fill(self, identifier: str, size_bytes: int = MIB) -> Extent:
        """An item that this engine saved itself."""
        extents = self.pool.reserve([Spec(identifier, size_bytes, (size_bytes // 128, 64), "bfloat16")])
        assert extents is not None
        self.pool.commit(extents[0], digest=7)
        return extents[0]

    def assert_idle(self) -> None:
        """Nothing is pinned, filling, quarantined, timed or on its way."""
        stats = self.pool.stats()
        assert (stats.pinned, stats.filling, stats.quarantined) == (0, 0, 0)
        assert self.consumer.open_pins == 0
        assert self.consumer.next_deadline() is None
        assert self.fetches.next_deadline(self.now) is None
