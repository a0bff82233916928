"""A consumer whose peers are lost or whose slab is short, and the views that engines hold."""

from __future__ import annotations

from ec_connector.pool import GRANULE_BYTES, Spec, State
from ec_connector.protocol import (
    WIRE_VERSION,
    Absent,
    Drop,
    Grant,
    Hello,
    Missing,
    Pinned,
    PinView,
    Reason,
    Release,
    Source,
    Want,
    WantedItem,
    Welcome,
)
from ec_connector.transport.reads import ReadState
from tests.unit.ec_connector.ec_fakes import MIB, OTHER_PEER, PEER, PLACE, ref
from tests.unit.ec_connector.ec_world import BUSY_S, DEADLINE_S, QUARANTINE_S, World


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
