"""Requests, reads and pins of a consumer, with a fake clock and fake ports."""

from __future__ import annotations

import pytest

from ec_connector.config import Limits
from ec_connector.consumer import Consumer, Rules
from ec_connector.fetches import Fetches
from ec_connector.pool import GRANULE_BYTES, Extent, Pool, Spec, State
from ec_connector.protocol import (
    WIRE_VERSION,
    Absent,
    Done,
    Drop,
    Get,
    Grant,
    Hello,
    Missing,
    Nack,
    Pinned,
    PinView,
    Reason,
    Refused,
    Release,
    Source,
    Want,
    WantedItem,
    Welcome,
)
from ec_connector.transport.reads import ReadState
from serving.protocol import EncodingRef
from tests.unit.ec_connector.ec_fakes import MIB, OTHER_PEER, PEER, PLACE, FakeMemory, FakeNetwork, FakeReader, ref

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


class TestReading:
    def test_an_announced_item_needs_one_greeting_and_one_read(self) -> None:
        world = World()
        assert world.want("r", ref("a", offset=3 * MIB)) == []
        assert world.network.take() == [Hello(WIRE_VERSION, "model")]
        assert world.welcome() == [Pinned("r", "a", Source.REMOTE, 0.0)]
        assert world.reader.reads[0].handle == (f"agent of {PEER}", 3 * MIB, 0, MIB)
        assert world.network.take() == [Done("lease-a", 0, 1)]
        assert world.want("r", ref("b")) == [Pinned("r", "b", Source.REMOTE, 0.0)]
        assert world.network.take() == [Done("lease-b", 0, 1)]
        world.consumer.drop(Drop("r"))
        world.assert_idle()

    def test_an_item_without_a_place_is_asked_for(self) -> None:
        world = World()
        world.want("r", ref("a", offset=None, lease=""))
        world.welcome()
        get = world.network.take()[-1]
        assert get == Get(1, "a")
        grant = Grant(1, "granted", 5 * MIB, 9, (8192, 64), "bfloat16", MIB, 7)
        world.fetches.on_reply(world.now, PEER, grant)
        assert world.poll() == [Pinned("r", "a", Source.REMOTE, 0.0)]
        assert world.reader.reads[0].handle[1] == 5 * MIB
        assert world.network.take() == [Done("granted", 0, 1)]

    def test_a_slow_read_is_pinned_when_it_ends(self) -> None:
        world = World()
        world.reader.state = ReadState.MOVING
        world.want("r", ref("a"))
        assert world.welcome() == []
        assert world.fetches.moving
        world.reader.end(ReadState.DONE)
        assert world.poll(0.25) == [Pinned("r", "a", Source.REMOTE, 0.25)]

    def test_two_requests_share_one_read_and_both_leases_end(self) -> None:
        world = World()
        world.want("r1", ref("a", lease="one"))
        world.want("r2", ref("a", lease="two"))
        assert world.welcome() == [Pinned("r1", "a", Source.REMOTE, 0.0), Pinned("r2", "a", Source.REMOTE, 0.0)]
        assert len(world.reader.reads) == 1
        assert world.network.take()[1:] == [Done("one", 0, 1), Release("two", 0, 1)]

    def test_an_item_in_the_slab_is_not_read_and_its_lease_is_released(self) -> None:
        world = World()
        world.fill("a")
        assert world.want("r", ref("a")) == [Pinned("r", "a", Source.SLAB, 0.0)]
        assert world.network.take() == [Release("lease-a", 0, 1)]
        assert world.reader.reads == []

    def test_a_local_save_under_way_is_waited_for(self) -> None:
        world = World()
        extents = world.pool.reserve([Spec("a", MIB, (8192, 64), "bfloat16")])
        assert extents is not None
        assert world.want("r", ref("a")) == []
        world.pool.commit(extents[0], digest=7)
        assert world.poll() == [Pinned("r", "a", Source.SLAB, 0.0)]

    def test_leases_of_items_nobody_asked_for_are_released(self) -> None:
        world = World()
        world.consumer.drop(Drop("r", ((PEER, "unused"),)))
        assert world.network.take() == [Release("unused", 0, 1)]


class TestRefusal:
    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"digest": 8}, Reason.MISMATCH),
            ({"epoch": "older"}, Reason.MISMATCH),
            ({"offset": 64 * MIB}, Reason.MISMATCH),
            ({"offset": -1}, Reason.MISMATCH),
        ],
    )
    def test_what_differs_from_the_peer_is_a_mismatch(self, change: dict[str, object], reason: Reason) -> None:
        world = World()
        world.want("r", ref("a", **change))  # type: ignore[arg-type]
        assert world.welcome() == [Missing("r", "a", reason)]
        assert Release("lease-a", 0, 1) in world.network.take()
        world.consumer.drop(Drop("r"))
        world.assert_idle()

    def test_wrong_rows_are_a_mismatch_without_asking_anyone(self) -> None:
        world = World()
        world.consumer.want(Want("r", (WantedItem("a", 5, ref=ref("a")),)))
        assert world.poll() == [Missing("r", "a", Reason.MISMATCH)]
        assert not any(isinstance(message, Hello) for message in world.network.take())

    def test_wrong_rows_in_the_slab_are_a_mismatch(self) -> None:
        world = World()
        world.fill("a")
        world.consumer.want(Want("r", (WantedItem("a", 5),)))
        assert world.poll() == [Missing("r", "a", Reason.MISMATCH)]

    def test_nothing_at_all_is_a_cache_miss(self) -> None:
        world = World()
        world.consumer.want(Want("r", (WantedItem("a", 5),)))
        assert world.poll() == [Missing("r", "a", Reason.CACHE_MISS)]

    def test_more_than_the_slab_is_too_large(self) -> None:
        assert World().want("r", ref("a", size_bytes=5 * MIB)) == [Missing("r", "a", Reason.TOO_LARGE)]

    def test_another_model_or_version_is_refused_by_the_peer(self) -> None:
        world = World()
        world.want("r", ref("a"))
        world.fetches.on_reply(world.now, PEER, Refused("wire version"))
        assert world.poll() == [Missing("r", "a", Reason.MISMATCH)]
        world.want("r2", ref("b"))
        assert Hello(WIRE_VERSION, "model") in world.network.take(), "a peer that restarted must get another chance"

    def test_an_item_the_peer_no_longer_holds_is_lost(self) -> None:
        world = World()
        world.want("r", ref("a", offset=None, lease=""))
        world.welcome()
        world.fetches.on_reply(world.now, PEER, Nack(1, "absent"))
        assert world.poll() == [Missing("r", "a", Reason.LOST)]

    def test_a_grant_of_another_shape_is_a_mismatch_and_given_back(self) -> None:
        world = World()
        world.want("r", ref("a", offset=None, lease=""))
        world.welcome()
        world.fetches.on_reply(world.now, PEER, Grant(1, "granted", 0, 9, (4096, 128), "bfloat16", MIB, 7))
        assert world.poll() == [Missing("r", "a", Reason.MISMATCH)]
        assert Release("granted", 0, 1) in world.network.take()

    def test_one_bad_item_ends_the_request_and_frees_the_other_leases(self) -> None:
        world = World()
        world.consumer.want(Want("r", (WantedItem("a", 5), WantedItem("b", 8192, ref=ref("b")))))
        assert world.poll() == [Missing("r", "a", Reason.CACHE_MISS)]
        assert world.network.take() == [Release("lease-b", 0, 1)]
        world.consumer.drop(Drop("r"))
        world.assert_idle()


class TestLoss:
    def test_a_lost_connection_fails_that_peers_items_only(self) -> None:
        world = World()
        world.want("r1", ref("a"))
        world.want("r2", ref("b", peer=OTHER_PEER))
        world.fetches.on_lost(world.now, PEER)
        assert world.poll() == [Missing("r1", "a", Reason.LOST)]
        assert world.welcome(OTHER_PEER) == [Pinned("r2", "b", Source.REMOTE, 0.0)]

    def test_a_read_that_fails_drops_the_peer_and_greets_it_anew(self) -> None:
        world = World()
        world.reader.state = ReadState.LOST
        world.want("r", ref("a"))
        assert world.welcome() == [Missing("r", "a", Reason.LOST)]
        assert world.reader.dropped == [f"agent of {PEER}"]
        world.reader.state = ReadState.DONE
        world.network.take()
        world.want("r2", ref("a"))
        assert world.network.take() == [Hello(WIRE_VERSION, "model")]
        assert world.welcome() == [Pinned("r2", "a", Source.REMOTE, 0.0)]

    def test_another_request_with_another_peer_goes_on(self) -> None:
        world = World()
        world.want("r1", ref("a"))
        world.want("r2", ref("a", peer=OTHER_PEER))
        world.fetches.on_lost(world.now, PEER)
        assert world.poll() == [Missing("r1", "a", Reason.LOST)]
        assert world.welcome(OTHER_PEER) == [Pinned("r2", "a", Source.REMOTE, 0.0)]

    def test_one_with_tensors_encodes_instead(self) -> None:
        world = World()
        world.want("r1", ref("a"))
        world.consumer.want(Want("r2", (WantedItem("a", 8192, optional=True),)))
        assert world.poll() == []
        world.fetches.on_lost(world.now, PEER)
        assert world.poll() == [Missing("r1", "a", Reason.LOST), Absent("r2", "a")]

    def test_unreadable_metadata_is_a_loss(self) -> None:
        world = World()
        world.want("r", ref("a"))
        world.fetches.on_reply(world.now, PEER, Welcome("epoch", b"", 0, MIB, -1, PLACE))
        assert world.poll() == [Missing("r", "a", Reason.LOST)]

    def test_a_silent_peer_times_out(self) -> None:
        world = World()
        world.want("r", ref("a"))
        assert world.poll(DEADLINE_S - 0.1) == []
        assert world.poll(0.2) == [Missing("r", "a", Reason.TIMEOUT)]
        world.consumer.drop(Drop("r"))
        world.assert_idle()

    def test_a_read_past_its_deadline_keeps_its_extent_until_it_has_ended(self) -> None:
        world = World()
        world.reader.state = ReadState.MOVING
        world.want("r", ref("a"))
        world.welcome()
        assert world.poll(DEADLINE_S) == [Missing("r", "a", Reason.TIMEOUT)]
        world.consumer.drop(Drop("r"))
        assert world.pool.stats().quarantined == 1
        world.poll(1.0)
        assert world.pool.stats().quarantined == 1
        world.reader.end(ReadState.DONE)
        world.poll(1.0)
        world.assert_idle()

    def test_a_read_that_never_ends_costs_its_peer_the_connection(self) -> None:
        world = World()
        world.reader.state = ReadState.MOVING
        world.want("r", ref("a"))
        world.welcome()
        world.poll(DEADLINE_S)
        world.poll(QUARANTINE_S)
        assert world.reader.dropped == [f"agent of {PEER}"]
        assert world.pool.stats().quarantined == 1, "the extent was reused while something may write into it"

    def test_a_late_grant_is_ignored(self) -> None:
        world = World()
        world.want("r", ref("a", offset=None, lease=""))
        world.welcome()
        world.poll(DEADLINE_S)
        world.fetches.on_reply(world.now, PEER, Grant(1, "late", 0, 9, (8192, 64), "bfloat16", MIB, 7))
        assert world.poll() == []
        assert Release("late", 0, 1) in world.network.take(), "the producer keeps a pin that nobody will use"


class TestRoom:
    def test_all_items_of_a_request_or_none(self) -> None:
        world = World(slab_bytes=3 * MIB)
        world.want("r1", ref("a"), ref("b"))
        assert world.pool.stats().filling == 2
        world.want("r2", ref("c"), ref("d"))
        assert world.pool.stats().filling == 2, "the second request holds what the first may need"

    def test_arrival_order_is_kept_where_room_is_short(self) -> None:
        world = World(slab_bytes=2 * MIB)
        world.want("r1", ref("a"))
        world.want("r2", ref("b"), ref("c"))
        world.want("r3", ref("d"))
        assert world.welcome() == [Pinned("r1", "a", Source.REMOTE, 0.0)]
        assert len(world.reader.reads) == 1, "a later, smaller request overtook"
        world.consumer.drop(Drop("r1"))
        assert {message.request_id for message in world.poll()} == {"r2"}  # type: ignore[attr-defined]
        world.consumer.drop(Drop("r2"))
        assert world.poll() == [Pinned("r3", "d", Source.REMOTE, 0.0)]

    def test_one_that_needs_no_room_overtakes(self) -> None:
        world = World(slab_bytes=2 * MIB)
        world.fill("here")
        world.consumer.want(Want("r0", (WantedItem("here", 8192),)))
        world.poll()
        world.want("r1", ref("a"), ref("b"))
        world.consumer.want(Want("r2", (WantedItem("here", 8192),)))
        assert world.poll() == [Pinned("r2", "here", Source.SLAB, 0.0)]

    def test_a_slab_full_of_pins_is_busy_after_a_while(self) -> None:
        world = World(slab_bytes=2 * MIB)
        world.want("r1", ref("a"), ref("b"))
        world.welcome()
        world.want("r2", ref("c"))
        assert world.poll(BUSY_S - 0.1) == []
        assert world.poll(0.2) == [Missing("r2", "c", Reason.BUSY)]
        world.consumer.drop(Drop("r2"))
        world.consumer.drop(Drop("r1"))
        world.assert_idle()

    def test_a_producer_reserves_room_for_what_it_will_encode(self) -> None:
        world = World(slab_bytes=2 * MIB)
        world.consumer.want(Want("r", (WantedItem("a", 8192, optional=True, room_width=64),)))
        assert world.poll() == [Absent("r", "a")]
        assert world.consumer.is_promised("a")
        extent = world.consumer.claim(Spec("a", MIB, (8192, 64), "bfloat16"))
        assert extent is not None
        world.pool.commit(extent, digest=7)
        world.consumer.drop(Drop("r"))
        world.assert_idle()
        assert world.pool.find("a") is extent

    def test_room_that_was_not_used_is_given_back(self) -> None:
        world = World(slab_bytes=2 * MIB)
        world.consumer.want(Want("r", (WantedItem("a", 8192, optional=True, room_width=64),)))
        world.poll()
        assert world.consumer.claim(Spec("a", 2 * GRANULE_BYTES, (64, 64), "bfloat16")) is None
        assert world.pool.find("a") is None
        world.consumer.drop(Drop("r"))
        world.assert_idle()

    def test_a_request_that_ends_gives_back_what_it_was_promised(self) -> None:
        world = World(slab_bytes=MIB)
        world.consumer.want(Want("r", (WantedItem("a", 8192, optional=True, room_width=64),)))
        world.poll()
        world.consumer.drop(Drop("r"))
        assert world.pool.find("a") is None
        world.assert_idle()

    def test_pins_that_can_be_revoked_make_room_oldest_first(self) -> None:
        world = World(slab_bytes=2 * MIB)
        world.revocable = [world.fill("old"), world.fill("new")]
        for extent in world.revocable:
            world.pool.pin(extent)
        world.want("r", ref("a"))
        assert world.welcome() == [Pinned("r", "a", Source.REMOTE, 0.0)]
        assert world.pool.find("old") is None
        assert world.pool.find("new") is not None

    def test_a_request_that_waits_sees_when_only_revocable_pins_are_left(self) -> None:
        world = World(slab_bytes=MIB)
        extent = world.fill("a")
        world.consumer.want(Want("r1", (WantedItem("a", 8192),)))
        world.poll()
        world.want("r2", ref("b"))
        world.pool.pin(extent)
        world.revocable.append(extent)
        world.consumer.drop(Drop("r1"))
        world.poll()
        assert world.welcome() == [Pinned("r2", "b", Source.REMOTE, 0.0)]

    def test_a_producer_without_room_is_busy(self) -> None:
        world = World(slab_bytes=GRANULE_BYTES)
        world.pool.pin(world.fill("other", GRANULE_BYTES))
        world.consumer.want(Want("r", (WantedItem("a", 8, optional=True, room_width=64),)))
        assert world.poll() == []
        assert world.poll(BUSY_S) == [Missing("r", "a", Reason.BUSY)]


class TestViews:
    def test_a_view_outlives_its_request(self) -> None:
        world = World(slab_bytes=GRANULE_BYTES)
        world.fill("a", GRANULE_BYTES)
        world.consumer.want(Want("r", (WantedItem("a", 32),)))
        world.poll()
        world.consumer.pin_view(PinView(1, "a"))
        world.consumer.drop(Drop("r"))
        assert world.pool.reserve([Spec("b", GRANULE_BYTES, (32, 64), "bfloat16")]) is None
        world.consumer.drop_views([1])
        assert world.pool.reserve([Spec("b", GRANULE_BYTES, (32, 64), "bfloat16")]) is not None

    def test_a_late_eviction_does_not_unpin_a_newer_load(self) -> None:
        world = World()
        extent = world.fill("a")
        world.consumer.want(Want("r", (WantedItem("a", 8192),)))
        world.poll()
        world.consumer.pin_view(PinView(1, "a"))
        world.consumer.pin_view(PinView(2, "a"))
        world.consumer.drop(Drop("r"))
        world.consumer.drop_views([1])
        world.consumer.drop_views([1])
        assert extent.pins == 1
        world.consumer.drop_views(None)
        assert extent.pins == 0
        world.assert_idle()

    def test_a_request_that_ends_while_it_waits_leaves_nothing(self) -> None:
        world = World()
        world.reader.state = ReadState.MOVING
        world.want("r", ref("a"))
        world.welcome()
        world.consumer.drop(Drop("r"))
        world.reader.end(ReadState.DONE)
        assert world.poll() == []
        world.assert_idle()
        extent = world.pool.find("a")
        assert extent is not None
        assert extent.state is State.READY, "what arrived is worth keeping"
