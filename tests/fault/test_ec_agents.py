"""Two agents in two processes, and everything that can happen between them.

Each test asserts what the consumer's request is told, that all pins, fills and leases come back to zero, and that
the next request works.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from ec_connector.counters import COUNTERS, GAUGES
from ec_connector.protocol import (
    WIRE_VERSION,
    Hello,
    Missing,
    PeerReply,
    Pinned,
    Reason,
    Refused,
    Source,
    WantedItem,
    encode,
)
from ec_connector.transport.zmq import Hub, Received
from serving.protocol import EncodingRef
from tests.fault.ec_peer import MODEL, WIDTH, Consumer, Peer, content, put

pytestmark = [pytest.mark.ec, pytest.mark.fault, pytest.mark.filterwarnings("default")]

MIB = 1 << 20
SECRET = "5e" * 32
SETTINGS: dict[str, Any] = {
    "control_host": "127.0.0.1",
    "slab_bytes": 64 * MIB,
    "busy_wait_s": 0.5,
    "secret_hex": SECRET,
}
IMPATIENT = {"read_deadline_s": 2.0, "quarantine_s": 3.0, "pin_lease_s": 20.0}
LARGE = {"slab_bytes": 320 * MIB}
TCP_ONLY = {"UCX_TLS": "tcp"}
LANES: dict[str, tuple[dict[str, str], bool]] = {
    "one machine": ({}, True),
    "one machine, agent apart": ({}, False),
    "network": (TCP_ONLY, True),
}


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts consumers and peers that end with the test."""
    started: list[Consumer | Peer] = []

    def _start(kind: type[Consumer | Peer], *args: Any, **kwargs: Any) -> Consumer | Peer:
        started.append(kind(*args, **kwargs))
        return started[-1]

    yield _start
    for one in reversed(started):
        one.close()


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """How bytes travel: copied in place, or over TCP as on a network. UCX reads it when an agent is made.

    And how the scheduler asks for them: as one in the agent's process, or as one apart.
    """
    environment, is_direct = LANES[request.param]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Consumer, "is_direct", is_direct)
    return environment


def reason(answer: Pinned | Missing) -> Reason:
    assert isinstance(answer, Missing)
    return answer.reason


def works(consumer: Consumer, ref: EncodingRef, seed: int) -> None:
    """The item arrives whole, and nothing stays behind."""
    answer = consumer.fetch(ref)
    assert isinstance(answer, Pinned), answer
    assert answer.source is Source.REMOTE
    assert torch.equal(consumer.bytes_of(ref.identifier), content(seed, ref.size_bytes))
    consumer.drop()
    assert consumer.idle()


def test_a_read_unpins_at_the_producer(start: Callable[..., Any], lane: dict[str, str]) -> None:
    peer, consumer = start(Peer, SETTINGS, lane), start(Consumer, SETTINGS)
    for seed, size in enumerate((32 * MIB, 4 * MIB, 16 << 10), start=1):
        works(consumer, peer.put(f"item-{seed}", seed, size), seed)
    deadline = time.monotonic() + 5
    while peer.stats()["open_leases"] and time.monotonic() < deadline:
        time.sleep(0.02)  # counters change in the agent's thread, which tells nobody
    assert peer.stats()["open_leases"] == 0
    assert peer.stats()["leases_expired"] == 0


def test_the_lane_is_told_truly(start: Callable[..., Any], lane: dict[str, str]) -> None:
    peer, consumer = start(Peer, SETTINGS, lane), start(Consumer, SETTINGS)
    works(consumer, peer.put("a", 1, MIB), 1)
    expected = "tcp" if lane else "in_place"
    deadline = time.monotonic() + 10
    while not consumer.stats()[f"peers_{expected}"] and time.monotonic() < deadline:
        time.sleep(0.02)
    stats = consumer.stats()
    assert {name: stats[f"peers_{name}"] for name in ("in_place", "device", "rdma", "tcp")} == {
        name: int(name == expected) for name in ("in_place", "device", "rdma", "tcp")
    }
    assert stats["tcp_fallbacks"] == (expected == "tcp")
    assert stats["slowest_probe_bytes_per_s"] > 1e6
    assert stats.keys() == GAUGES | COUNTERS
    works(consumer, peer.put("b", 2, MIB), 2)


def test_an_item_announced_without_a_place_is_asked_for(start: Callable[..., Any]) -> None:
    peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS)
    ref = peer.put("a", 1, MIB)
    works(consumer, msgspec.structs.replace(ref, offset=None, digest=0), 1)
    gone = msgspec.structs.replace(ref, identifier="gone", offset=None)
    assert reason(consumer.fetch(gone)) is Reason.LOST


class TestDeath:
    def test_before_a_read(self, start: Callable[..., Any], lane: dict[str, str]) -> None:
        peer, consumer = start(Peer, SETTINGS, lane), start(Consumer, SETTINGS)
        other = start(Peer, SETTINGS, lane)
        ref = peer.put("a", 1, 4 * MIB)
        peer.signal(signal.SIGKILL)
        assert reason(consumer.fetch(ref)) is Reason.LOST
        consumer.drop()
        assert consumer.idle()
        works(consumer, other.put("a", 2, 4 * MIB), 2)

    def test_between_two_reads(self, start: Callable[..., Any], lane: dict[str, str]) -> None:
        peer, consumer = start(Peer, SETTINGS, lane), start(Consumer, SETTINGS)
        other = start(Peer, SETTINGS, lane)
        works(consumer, peer.put("a", 1, MIB), 1)
        ref = peer.put("b", 1, MIB)
        peer.signal(signal.SIGKILL)
        assert reason(consumer.fetch(ref)) is Reason.LOST
        consumer.drop()
        assert consumer.idle()
        works(consumer, other.put("b", 2, MIB), 2)

    def test_during_a_read(self, start: Callable[..., Any], lane: dict[str, str]) -> None:
        peer, consumer = start(Peer, SETTINGS | LARGE, lane), start(Consumer, SETTINGS | LARGE)
        other = start(Peer, SETTINGS, lane)
        works(consumer, peer.put("warm", 1, MIB), 1)
        ref = peer.put("a", 1, 256 * MIB)
        killer = threading.Timer(0.01, peer.signal, [signal.SIGKILL])
        killer.start()
        assert reason(consumer.fetch(ref)) is Reason.LOST
        killer.join()
        consumer.drop()
        assert consumer.idle()
        works(consumer, other.put("a", 2, 4 * MIB), 2)

    def test_and_a_restart_at_the_same_address(self, start: Callable[..., Any], lane: dict[str, str]) -> None:
        peer, consumer = start(Peer, SETTINGS, lane), start(Consumer, SETTINGS)
        works(consumer, peer.put("a", 1, MIB), 1)
        old = peer.put("b", 1, MIB)
        peer.signal(signal.SIGKILL)
        again = start(Peer, SETTINGS | {"control_port": peer.port}, lane)
        new = again.put("b", 2, MIB)
        assert reason(consumer.fetch(old)) in (Reason.MISMATCH, Reason.LOST)
        consumer.drop()
        assert reason(consumer.fetch(old)) is Reason.MISMATCH, "a reference from before the restart"
        consumer.drop()
        works(consumer, new, 2)

    def test_leaves_no_file_and_no_socket_ten_times(self, start: Callable[..., Any]) -> None:
        consumer = start(Consumer, SETTINGS)
        port = 0
        for seed in range(10):
            peer = start(Peer, SETTINGS | {"control_port": port}, {})
            port = peer.port
            works(consumer, peer.put(f"item-{seed}", seed, MIB), seed)
            held = peer.holdings()
            assert any("triptych-ec" in name for name in held.sockets), held
            peer.signal(signal.SIGKILL)
            assert held.remaining() == []
        assert consumer.stats()["reads"] == 10


class TestStall:
    def test_a_stopped_producer_is_read_on_the_same_machine(self, start: Callable[..., Any]) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS | IMPATIENT)
        for seed in range(2):  # the first read connects, which needs the peer
            works(consumer, peer.put(f"warm-{seed}", seed, 4 * MIB), seed)
        ref = peer.put("b", 1, 4 * MIB)
        peer.signal(signal.SIGSTOP)
        works(consumer, ref, 1)
        peer.signal(signal.SIGCONT)

    def test_a_stopped_producer_times_out_on_a_network(
        self, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("UCX_TLS", "tcp")
        peer, consumer = start(Peer, SETTINGS, TCP_ONLY), start(Consumer, SETTINGS | IMPATIENT)
        works(consumer, peer.put("a", 1, MIB), 1)
        ref = peer.put("b", 1, 4 * MIB)
        peer.signal(signal.SIGSTOP)
        assert reason(consumer.fetch(ref)) is Reason.TIMEOUT
        consumer.drop()
        assert consumer.stats()["quarantined"] == 1
        peer.signal(signal.SIGCONT)
        assert consumer.idle(), "the read ended, its extent must be free again"
        works(consumer, peer.put("c", 3, MIB), 3)

    def test_a_producer_that_stops_before_the_greeting_times_out(self, start: Callable[..., Any]) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS | IMPATIENT)
        ref = peer.put("a", 1, MIB)
        peer.signal(signal.SIGSTOP)
        assert reason(consumer.fetch(ref)) is Reason.TIMEOUT
        consumer.drop()
        peer.signal(signal.SIGCONT)
        works(consumer, peer.put("b", 2, MIB), 2)


class TestContent:
    @pytest.mark.parametrize(
        "wrong",
        [
            {"digest": 1},
            {"epoch": "of another start"},
            {"dtype": "float16"},
            {"shape": (MIB // 128, 2 * WIDTH)},
            {"shape": (0, WIDTH)},
            {"size_bytes": MIB // 2},
            {"offset": 64 * MIB},
            {"offset": -4096},
            {"offset": 1 << 62},
        ],
        ids=str,
    )
    def test_what_differs_from_the_announcement_fails_that_item(
        self, start: Callable[..., Any], wrong: dict[str, Any]
    ) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS)
        ref = peer.put("a", 1, MIB)
        assert reason(consumer.fetch(msgspec.structs.replace(ref, **wrong))) is Reason.MISMATCH
        consumer.drop()
        assert consumer.idle()
        assert peer.idle(), "the lease of an item that cannot be used must go at once"
        works(consumer, peer.put("a", 1, MIB), 1)

    def test_a_prompt_that_needs_other_rows_fails(self, start: Callable[..., Any]) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS)
        ref = peer.put("a", 1, MIB)
        answers = consumer.want(WantedItem("a", ref.shape[0] + 1, ref=ref))
        assert reason(answers["a"]) is Reason.MISMATCH
        consumer.drop()
        assert consumer.idle()
        assert peer.idle()
        works(consumer, peer.put("a", 1, MIB), 1)

    def test_a_place_that_was_reused_is_noticed(self, start: Callable[..., Any]) -> None:
        small = SETTINGS | {"slab_bytes": 2 * MIB}
        peer, consumer = start(Peer, small, {}), start(Consumer, SETTINGS)
        ref = peer.put("a", 1, 2 * MIB)
        assert peer.ask("release", ref.lease) == 1
        other = peer.put("b", 2, 2 * MIB)
        assert other.offset == ref.offset
        assert other.generation > ref.generation
        assert reason(consumer.fetch(ref)) is Reason.MISMATCH
        consumer.drop()
        assert consumer.idle()
        works(consumer, other, 2)

    def test_a_slab_full_of_pins_is_busy(self, start: Callable[..., Any]) -> None:
        peer = start(Peer, SETTINGS, {})
        consumer = start(Consumer, SETTINGS | {"slab_bytes": 2 * MIB})
        assert put(consumer.agent, consumer.slab, "own", content(9, 2 * MIB))
        assert isinstance(consumer.want(WantedItem("own", 2 * MIB // 128))["own"], Pinned)
        ref = peer.put("a", 1, MIB)
        assert reason(consumer.fetch(ref)) is Reason.BUSY
        consumer.drop()
        consumer.count -= 1
        consumer.drop()
        assert consumer.idle()
        works(consumer, peer.put("a", 1, MIB), 1)

    def test_two_items_or_none(self, start: Callable[..., Any]) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS | {"slab_bytes": 2 * MIB})
        refs = [peer.put(name, seed, MIB) for seed, name in enumerate("ab")]
        answers = consumer.want(*(WantedItem(ref.identifier, ref.shape[0], ref=ref) for ref in refs))
        assert all(isinstance(answer, Pinned) for answer in answers.values())
        consumer.drop()
        assert consumer.idle()


class TestStrangers:
    def test_another_model_is_refused(self, start: Callable[..., Any]) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS, "another model")
        assert reason(consumer.fetch(peer.put("a", 1, MIB))) is Reason.MISMATCH
        consumer.drop()
        assert consumer.idle()

    @pytest.mark.parametrize("payload", [encode(Hello(WIRE_VERSION + 1, MODEL)), b"\xff\xff"])
    def test_another_wire_version_is_refused(self, start: Callable[..., Any], payload: bytes) -> None:
        peer, consumer = start(Peer, SETTINGS, {}), start(Consumer, SETTINGS)
        hub = Hub(bytes.fromhex(SECRET))
        address = f"tcp://127.0.0.1:{peer.port}"
        hub.connect(address)
        hub.send(address, payload)
        [event] = _first(hub, 5.0)
        hub.close()
        assert isinstance(event, Received)
        assert isinstance(msgspec.msgpack.decode(event.payload, type=PeerReply), Refused)
        works(consumer, peer.put("a", 1, MIB), 1)

    @pytest.mark.parametrize("secret", ["", "a5" * 32])
    def test_without_the_secret_nobody_is_answered(self, start: Callable[..., Any], secret: str) -> None:
        peer = start(Peer, SETTINGS, {})
        stranger = start(Consumer, SETTINGS | IMPATIENT | {"secret_hex": secret})
        consumer = start(Consumer, SETTINGS)
        ref = peer.put("a", 1, MIB)
        assert reason(stranger.fetch(ref)) in (Reason.LOST, Reason.TIMEOUT)
        stranger.drop()
        assert stranger.idle()
        assert stranger.stats()["read_bytes"] == 0
        works(consumer, ref, 1)

    def test_an_address_outside_the_networks_is_not_asked(self, start: Callable[..., Any]) -> None:
        peer = start(Peer, SETTINGS, {})
        consumer = start(Consumer, SETTINGS | {"peer_networks": ["10.0.0.0/8"]})
        assert reason(consumer.fetch(peer.put("a", 1, MIB))) is Reason.MISMATCH


def test_leases_of_a_consumer_that_died_expire(start: Callable[..., Any]) -> None:
    short = SETTINGS | {"read_deadline_s": 0.2, "quarantine_s": 0.2, "pin_lease_s": 0.5}
    peer = start(Peer, short, {})
    peer.put("a", 1, MIB)
    assert peer.stats()["pinned"] == 1
    deadline = time.monotonic() + 5
    while peer.stats()["pinned"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert peer.stats()["leases_expired"] == 1


def _first(hub: Hub, wait_s: float) -> list[Any]:
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        if events := hub.poll(0.1):
            return list(events)
    return []
