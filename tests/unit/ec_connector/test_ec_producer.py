"""Announcements and leases of a producer, with a fake clock."""

from __future__ import annotations

from ec_connector.pool import GRANULE_BYTES, Extent, Pool, Spec
from ec_connector.producer import Producer
from ec_connector.protocol import Done, Get, Grant, Nack, Release

LEASE_S = 60.0


class World:
    def __init__(self) -> None:
        self.pool = Pool(4 * GRANULE_BYTES)
        self.producer = Producer(self.pool, peer="tcp://127.0.0.1:1", epoch="now", pin_lease_s=LEASE_S)

    def filling(self, identifier: str) -> Extent:
        extents = self.pool.reserve([Spec(identifier, 4096, (32, 64), "bfloat16")])
        assert extents is not None
        return extents[0]

    def ready(self, identifier: str) -> Extent:
        extent = self.filling(identifier)
        self.pool.commit(extent, digest=11)
        return extent


class TestAnnouncement:
    def test_a_ready_item_is_pinned_and_placed(self) -> None:
        world = World()
        extent = world.ready("a")
        reference = world.producer.announce(0.0, ["a", "gone"], {"a": {"grid": [1]}})
        assert set(reference) == {"a"}
        ref = reference["a"]
        assert (ref.offset, ref.generation, ref.digest, ref.shape) == (0, 1, 11, (32, 64))
        assert (ref.peer, ref.epoch, ref.size_bytes) == ("tcp://127.0.0.1:1", "now", 4096)
        assert extent.pins == 1
        assert world.producer.metadata_of("a") == {"grid": [1]}

    def test_an_item_being_filled_has_no_place_and_no_lease(self) -> None:
        world = World()
        world.filling("a")
        ref = world.producer.announce(0.0, ["a"], {})["a"]
        assert (ref.offset, ref.lease) == (None, "")

    def test_each_announcement_holds_its_own_pin(self) -> None:
        world = World()
        extent = world.ready("a")
        leases = [world.producer.announce(0.0, ["a"], {})["a"].lease for _ in range(2)]
        assert extent.pins == 2
        assert world.producer.release([leases[0], "unknown"]) == 1
        assert extent.pins == 1


class TestLeases:
    def test_every_reader_must_be_done(self) -> None:
        world = World()
        extent = world.ready("a")
        lease = world.producer.announce(0.0, ["a"], {})["a"].lease
        world.producer.reader_done(Done(lease, 0, 2))
        world.producer.reader_done(Done(lease, 0, 2))
        assert extent.pins == 1
        world.producer.reader_done(Release(lease, 1, 2))
        assert extent.pins == 0
        world.producer.reader_done(Done(lease, 1, 2))
        assert extent.pins == 0, "a report that came twice"

    def test_a_lease_expires(self) -> None:
        world = World()
        extent = world.ready("a")
        world.producer.announce(5.0, ["a"], {})
        assert world.producer.next_deadline() == 5.0 + LEASE_S
        world.producer.poll(4.9 + LEASE_S)
        assert extent.pins == 1
        world.producer.poll(5.0 + LEASE_S)
        assert extent.pins == 0
        assert world.producer.leases_expired == 1
        assert world.producer.next_deadline() is None


class TestRevocation:
    def test_only_revocable_leases_go_the_oldest_first(self) -> None:
        world = World()
        firm, spare, grant = world.ready("firm"), world.ready("spare"), Get(1, "firm")
        world.producer.announce(0.0, ["firm"], {})
        first, second = (world.producer.announce(0.0, ["spare"], {}, revocable=True)["spare"].lease for _ in range(2))
        world.producer.get(0.0, b"peer", grant)
        assert world.producer.revoke_one()
        assert world.producer.release([first]) == 0
        assert world.producer.revoke_one()
        assert not world.producer.revoke_one()
        assert world.producer.release([second]) == 0
        assert (firm.pins, spare.pins, world.producer.leases_revoked) == (2, 0, 2)


class TestGet:
    def test_a_ready_item_is_granted_under_a_lease(self) -> None:
        world = World()
        extent = world.ready("a")
        reply = world.producer.get(0.0, b"peer", Get(3, "a"))
        assert isinstance(reply, Grant)
        assert (reply.token, reply.offset, reply.digest) == (3, extent.offset, 11)
        world.producer.reader_done(Done(reply.lease, 0, 1))
        assert extent.pins == 0

    def test_an_absent_item_is_refused(self) -> None:
        assert World().producer.get(0.0, b"peer", Get(3, "a")) == Nack(3, "absent")

    def test_an_item_being_filled_is_answered_once_it_is_ready(self) -> None:
        world = World()
        extent = world.filling("a")
        assert world.producer.get(0.0, b"peer", Get(3, "a")) is None
        assert world.producer.poll(1.0) == []
        world.pool.commit(extent, digest=11)
        [(sender, reply)] = world.producer.poll(2.0)
        assert sender == b"peer"
        assert isinstance(reply, Grant)
        assert world.producer.poll(3.0) == []

    def test_an_item_that_is_abandoned_is_refused(self) -> None:
        world = World()
        extent = world.filling("a")
        world.producer.get(0.0, b"peer", Get(3, "a"))
        world.pool.abandon(extent)
        assert world.producer.poll(1.0) == [(b"peer", Nack(3, "absent"))]
