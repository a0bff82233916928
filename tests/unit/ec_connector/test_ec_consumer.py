"""Requests, reads and pins of a consumer, with a fake clock and fake ports."""

from __future__ import annotations

import pytest

from ec_connector.pool import Spec
from ec_connector.protocol import (
    WIRE_VERSION,
    Done,
    Drop,
    Get,
    Grant,
    Hello,
    Missing,
    Nack,
    Pinned,
    Reason,
    Refused,
    Release,
    Source,
    Want,
    WantedItem,
)
from ec_connector.transport.reads import ReadState
from tests.unit.ec_connector.ec_fakes import MIB, PEER, ref
from tests.unit.ec_connector.ec_world import World


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
