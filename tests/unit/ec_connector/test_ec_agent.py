"""An agent alone in this process, and the scheduler's direct link to it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator

import msgspec
import pytest
import torch

from ec_connector.agent import Agent, DirectLink, link_to
from ec_connector.config import parse_config
from ec_connector.pool import Spec
from ec_connector.protocol import (
    Announce,
    Announced,
    Missing,
    Pinned,
    Reason,
    Source,
    ToScheduler,
    Want,
    WantedItem,
    encode,
)
from ec_connector.slab import Slab
from ec_connector.transport.local import LocalClient
from serving.protocol import EncodingRef

MIB = 1 << 20
SPEC = Spec("a", 64 * 64 * 2, (64, 64), "bfloat16")


@pytest.fixture
def agent() -> Iterator[Agent]:
    started = new_agent()
    yield started
    started.stop()


@pytest.fixture
def peer() -> Iterator[Agent]:
    """An agent to read from."""
    started = new_agent()
    yield started
    started.stop()


def new_agent() -> Agent:
    config = parse_config({"control_host": "127.0.0.1", "slab_bytes": 4 * MIB, "busy_wait_s": 0.05})
    slab = Slab(config.slab_bytes, torch.device("cpu"))
    agent = Agent(config, slab, engine_id=uuid.uuid4().hex, rank=0, ranks=1, compatibility="model", dtype="bfloat16")
    agent.start()
    return agent


@pytest.fixture
def link(agent: Agent) -> DirectLink:
    link = link_to(agent.identity.engine_id, 0, b"")
    assert isinstance(link, DirectLink)
    return link


def answers(link: DirectLink, wait_s: float = 0.0) -> list[ToScheduler]:
    return [msgspec.msgpack.decode(payload, type=ToScheduler) for payload in link.receive(wait_s)]


def announced(peer: Agent, identifier: str) -> EncodingRef:
    """A reference to an item that `peer` has just saved."""
    extent = peer.call(lambda core, _: core.reserve(msgspec.structs.replace(SPEC, identifier=identifier)))
    assert extent is not None
    digest = peer._slab.write(extent.offset, torch.ones(64, 64, dtype=torch.bfloat16))
    peer.tell(lambda core, _: core.saved(extent, None, digest))
    found = peer.tell(lambda core, now: core.announce(now, [identifier]))[identifier]
    assert found is not None
    return msgspec.convert({name: value for name, value in found.items() if name != "metadata"}, EncodingRef)


def save(agent: Agent) -> None:
    extent = agent.call(lambda core, _: core.reserve(SPEC))
    assert extent is not None
    agent.tell(lambda core, _: core.saved(extent, None, digest=1))


def test_what_needs_no_other_thread_is_answered_before_send_returns(agent: Agent, link: DirectLink) -> None:
    save(agent)
    link.send(encode(Want("r", (WantedItem("a", 64),))))
    (pinned,) = answers(link)
    assert isinstance(pinned, Pinned)
    link.send(encode(Announce(7, ("a",), {})))
    (announced,) = answers(link)
    assert isinstance(announced, Announced)
    assert announced.refs["a"].size_bytes == SPEC.size_bytes


def test_a_small_read_ends_before_send_returns(
    peer: Agent, agent: Agent, link: DirectLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the peer is greeted, which takes both agents' threads."""
    link.send(encode(Want("first", (WantedItem("a", 64, announced(peer, "a")),))))
    (greeted,) = answers(link, 5.0)
    assert isinstance(greeted, Pinned)
    assert answers(link) == []  # sends the DONE
    _settle(agent)
    monkeypatch.setattr("ec_connector.agent._PATIENCE_S", 5.0)  # this machine may be busy
    link.send(encode(Want("second", (WantedItem("b", 64, announced(peer, "b")),))))
    (pinned,) = answers(link)
    assert isinstance(pinned, Pinned)
    assert pinned.source is Source.REMOTE


def test_a_miss_is_told_at_once(link: DirectLink) -> None:
    link.send(encode(Want("r", (WantedItem("a", 64),))))
    (missing,) = answers(link)
    assert isinstance(missing, Missing)
    assert missing.reason is Reason.CACHE_MISS


def test_messages_sent_while_the_agent_is_at_work_are_answered_in_order(agent: Agent, link: DirectLink) -> None:
    save(agent)
    entered, may_leave = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        entered.set()
        may_leave.wait()

    busy = threading.Thread(target=agent.call, args=(hold,))
    busy.start()
    entered.wait()
    for number in range(3):
        link.send(encode(Announce(number, ("a",), {})))
    assert answers(link) == []
    may_leave.set()
    busy.join()
    taken: list[ToScheduler] = []
    while len(taken) < 3:
        more = answers(link, 5.0)
        assert more, f"only {taken}"
        taken += more
    assert [message.token for message in taken if isinstance(message, Announced)] == [0, 1, 2]


def test_room_that_comes_free_wakes_who_waits_for_it(agent: Agent, link: DirectLink) -> None:
    """An item that is being saved is waited for, and its end is told without another message."""
    extent = agent.call(lambda core, _: core.reserve(SPEC))
    assert extent is not None
    link.send(encode(Want("r", (WantedItem("a", 64),))))
    assert answers(link) == []
    agent.tell(lambda core, _: core.saved(extent, None, digest=1))
    (pinned,) = answers(link, 5.0)
    assert isinstance(pinned, Pinned)


def test_a_save_that_nobody_waits_for_wakes_no_thread(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A woken thread would take Python's lock from the engine."""
    agent.tell(lambda core, now: core.announce(now, []))
    _settle(agent)
    wakes: list[None] = []
    monkeypatch.setattr(agent._hub, "wake", lambda: wakes.append(None))
    save(agent)
    assert wakes == []


def test_the_first_lease_wakes_the_thread_that_will_end_it(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    save(agent)
    _settle(agent)
    wakes: list[None] = []
    wake = agent._hub.wake
    monkeypatch.setattr(agent._hub, "wake", lambda: (wakes.append(None), wake()))
    agent.tell(lambda core, now: core.announce(now, ["a"]))
    _settle(agent)
    agent.tell(lambda core, now: core.announce(now, ["a"]))  # ends later than the first
    assert len(wakes) == 1


def test_a_stopped_agent_is_linked_to_by_nobody(agent: Agent) -> None:
    agent.stop()
    with pytest.raises(OSError, match=r"refused|No such|not exist"):
        link_to(agent.identity.engine_id, 0, b"")


def test_an_agent_of_another_process_is_reached_over_its_socket(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ec_connector.agent._running", {})
    link = link_to(agent.identity.engine_id, 0, b"")
    assert isinstance(link, LocalClient)
    link.send(encode(Announce(1, (), {})))
    (payload,) = link.receive(5.0)
    assert isinstance(msgspec.msgpack.decode(payload, type=ToScheduler), Announced)
    link.close()


def _settle(agent: Agent) -> None:
    """Wait until the IO thread sleeps with the deadlines of now."""
    deadline = time.monotonic() + 5.0
    while agent.call(lambda core, now: core.wake_at(now)) != agent._sleeps_until:
        assert time.monotonic() < deadline
        time.sleep(0.001)  # nothing announces that a thread has gone to sleep
