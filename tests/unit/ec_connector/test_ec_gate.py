"""The gate believes nothing to be local that not all ranks have pinned."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from ec_connector.gate import Gate, Views
from ec_connector.protocol import (
    Absent,
    Announce,
    Announced,
    Drop,
    Fail,
    Missing,
    Noted,
    Pinned,
    PinView,
    Reason,
    Retract,
    Source,
    ToAgent,
    Want,
    WantedItem,
)
from tests.unit.ec_connector.ec_fakes import PEER, FakeLink, ref


class World:
    def __init__(self, ranks: int = 1, *, loads: bool = True) -> None:
        self.links = [FakeLink() for _ in range(ranks)]
        self.gate = Gate(self.links, loads=loads)

    def heard(self, rank: int = 0) -> list[object]:
        """What the agent of `rank` was told since the last call."""
        sent = [msgspec.msgpack.decode(payload, type=ToAgent) for payload in self.links[rank].sent]
        self.links[rank].sent.clear()
        return list(sent)

    def admits(self, *identifiers: str, request_id: str = "r") -> bool:
        return self.gate.admits(request_id, [WantedItem(identifier, 4) for identifier in identifiers])


class TestAdmission:
    def test_nothing_needed_passes_at_once(self) -> None:
        world = World()
        assert world.admits()
        assert world.heard() == []

    def test_items_are_asked_for_once_and_together(self) -> None:
        world = World()
        assert not world.admits("a", "b")
        assert not world.admits("a", "b")
        assert world.heard() == [Want("r", (WantedItem("a", 4), WantedItem("b", 4)))]

    def test_what_is_answered_at_once_is_admitted_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An agent in this process has often answered before it was done being asked."""
        world = World()
        monkeypatch.setattr(world.links[0], "send", lambda _: world.links[0].say(Pinned("r", "a", Source.SLAB, 0.0)))
        assert world.admits("a")

    def test_all_ranks_must_pin(self) -> None:
        world = World(ranks=2)
        world.admits("a")
        world.links[0].say(Pinned("r", "a", Source.REMOTE, 0.5))
        assert not world.admits("a")
        assert not world.gate.is_local("a")
        world.links[1].say(Pinned("r", "a", Source.SLAB, 0.0))
        assert world.admits("a")
        assert world.gate.is_local("a")
        report = world.gate.report("r", "a")
        assert (report.source, report.transfer_s) == (Source.REMOTE, 0.5)

    def test_an_item_to_encode_passes_and_is_not_local(self) -> None:
        world = World()
        world.admits("a")
        world.links[0].say(Absent("r", "a"))
        assert world.admits("a")
        assert not world.gate.is_local("a")
        world.gate.encoded("r", "a")
        assert world.gate.report("r", "a").source is Source.ENCODED

    def test_a_later_chunk_asks_for_what_an_earlier_one_did_not_need(self) -> None:
        world = World()
        world.admits("a")
        world.heard()
        assert not world.admits("a", "b")
        assert world.heard() == [Want("r", (WantedItem("b", 4),))]

    def test_a_pure_producer_never_loads(self) -> None:
        world = World(loads=False)
        world.admits("a")
        world.links[0].say(Pinned("r", "a", Source.SLAB, 0.0))
        assert world.admits("a")
        assert not world.gate.is_local("a")


class TestFailure:
    def test_the_reason_is_noted_before_the_request_fails(self) -> None:
        world = World(ranks=2)
        world.admits("a")
        world.heard()
        world.heard(1)
        world.links[1].say(Missing("r", "a", Reason.LOST))
        assert world.gate.take_unavailable() == set()
        assert world.heard() == [Fail("r", Reason.LOST, ("a",))]
        assert world.heard(1) == []
        assert not world.admits("a")
        world.links[0].say(Noted("r"))
        assert world.gate.take_unavailable() == {"r"}
        assert world.gate.take_unavailable() == set()

    def test_only_the_first_reason_counts(self) -> None:
        world = World()
        world.admits("a", "b")
        world.heard()
        world.links[0].say(Missing("r", "a", Reason.LOST), Missing("r", "b", Reason.TIMEOUT))
        world.gate.take_unavailable()
        assert world.heard() == [Fail("r", Reason.LOST, ("a",))]

    def test_news_of_an_ended_request_are_ignored(self) -> None:
        world = World()
        world.admits("a")
        world.gate.finish("r", [])
        world.links[0].say(Pinned("r", "a", Source.SLAB, 0.0), Missing("r", "a", Reason.LOST), Noted("r"))
        assert world.gate.take_unavailable() == set()
        assert not world.gate.is_local("a")


class TestEnd:
    def test_an_item_is_local_as_long_as_one_request_pins_it(self) -> None:
        world = World()
        for request_id in ("r1", "r2"):
            world.admits("a", request_id=request_id)
            world.links[0].say(Pinned(request_id, "a", Source.SLAB, 0.0))
            world.admits("a", request_id=request_id)
        world.gate.finish("r1", [])
        assert world.gate.is_local("a")
        world.gate.finish("r2", [])
        assert not world.gate.is_local("a")

    @pytest.mark.parametrize(("asked", "released"), [((), ((PEER, "lease-a"),)), (("a",), ())])
    def test_leases_that_nobody_was_asked_about_are_handed_back(
        self, asked: Sequence[str], released: tuple[tuple[str, str], ...]
    ) -> None:
        world = World()
        world.admits(*asked)
        world.heard()
        world.gate.finish("r", [ref("a"), ref("b", lease="")])
        assert world.heard() == [Drop("r", released)]


class TestViews:
    def test_a_view_is_pinned_before_the_request_lets_go(self) -> None:
        world = World()
        world.admits("a")
        world.links[0].say(Pinned("r", "a", Source.SLAB, 0.0))
        world.admits("a")
        world.heard()
        views = Views(world.gate)
        views.load("a")
        world.gate.finish("r", [])
        assert world.heard() == [PinView(1, "a"), Drop("r")]
        assert views.take() == ([(1, "a")], [])

    def test_an_eviction_names_the_load_it_ends(self) -> None:
        views = Views(World().gate)
        views.load("a")
        views.take()
        views.evict("a")
        views.evict("never loaded")
        views.load("a")
        assert views.take() == ([(2, "a")], [1])

    def test_a_reload_retires_the_older_view(self) -> None:
        views = Views(World().gate)
        views.load("a")
        views.load("a")
        assert views.take() == ([(1, "a"), (2, "a")], [1])


class TestAnnouncing:
    def test_the_answer_in_time_is_used(self) -> None:
        world = World()
        world.links[0].say(Announced(1, PEER, "epoch", {"a": ref("a")}))
        assert world.gate.announce(["a"], {}, wait_s=1.0) == {"a": ref("a")}
        assert world.heard() == [Announce(1, ("a",), {}, revocable=True)]

    def test_what_a_pure_producer_announces_is_not_revocable(self) -> None:
        world = World(loads=False)
        world.gate.announce(["a"], {}, wait_s=0.0)
        assert world.heard() == [Announce(1, ("a",), {})]

    def test_an_answer_that_comes_too_late_is_retracted(self) -> None:
        world = World()
        assert world.gate.announce(["a"], {}, wait_s=0.0) is None
        world.heard()
        world.links[0].say(Announced(1, PEER, "epoch", {"a": ref("a"), "b": ref("b", lease="")}))
        world.gate.take_unavailable()
        assert world.heard() == [Retract(("lease-a",))]

    def test_an_agent_that_never_answers_stops_the_start(self) -> None:
        with pytest.raises(TimeoutError, match="rank 0"):
            World().gate.await_agents()

    def test_the_publisher_is_known_after_the_start(self) -> None:
        world = World()
        world.links[0].say(Announced(0, PEER, "epoch", {}))
        world.gate.await_agents()
        assert (world.gate.publisher.peer, world.gate.publisher.epoch) == (PEER, "epoch")
