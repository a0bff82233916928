"""Which requests may be scheduled, and what vLLM's encoder cache holds views of.

The scheduler's half of the connector without vLLM's types. It holds no embeddings and talks to no peer: it asks
the agents of its own engine, one per rank, and believes nothing to be local that not all of them have pinned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from ec_connector.protocol import (
    Absent,
    Announce,
    Announced,
    Count,
    Counted,
    Drop,
    Fail,
    Missing,
    Noted,
    Pinned,
    PinView,
    Retract,
    Source,
    ToAgent,
    ToScheduler,
    Want,
    WantedItem,
    encode,
)
from serving.protocol import EncodingRef

_START_WAIT_S = 60.0
_COUNT_EVERY_S = 1.0


class Link(Protocol):
    """The way to one rank's agent; messages arrive in the order they were sent."""

    def send(self, payload: bytes) -> None: ...
    def receive(self, timeout_s: float = 0.0) -> list[bytes]: ...
    def close(self) -> None: ...


class Report(msgspec.Struct):
    """How one request came by one item."""

    source: Source = Source.NONE
    transfer_s: float = 0.0


class _Tracked(msgspec.Struct):
    """One request. `needed` are the items that its next step may touch, `asked` those the agents know of."""

    needed: tuple[str, ...] = ()
    asked: set[str] = msgspec.field(default_factory=set)
    pinned: dict[str, set[int]] = msgspec.field(default_factory=dict)
    absent: set[str] = msgspec.field(default_factory=set)
    reports: dict[str, Report] = msgspec.field(default_factory=dict)
    doomed: bool = False


class Gate:
    """Asks the agents for what requests need and keeps score of their answers.

    Args:
        links: One per rank that keeps a slab, in order of rank.
        loads: Whether items may be taken from the slab; a pure producer encodes whatever it is sent.
    """

    def __init__(self, links: Sequence[Link], *, loads: bool) -> None:
        self._links = links
        self._loads = loads
        self._requests: dict[str, _Tracked] = {}
        self._local: dict[str, int] = {}  # identifier -> requests for which all ranks pin it
        self._unavailable: set[str] = set()
        self._answers: dict[int, Announced] = {}
        self._awaited: int | None = None
        self._next_token = 0
        self._counts: dict[str, float] | None = None
        self._count_at = 0.0
        self.publisher = Announced(0, "", "", {})
        """Rank 0's address and epoch, after `await_agents`."""

    def await_agents(self) -> None:
        """Wait until every rank's agent has answered once.

        Raises:
            TimeoutError: One did not, so no request could ever be served.
        """
        for rank, link in enumerate(self._links):
            link.send(encode(Announce(0, (), {})))
            answers = link.receive(_START_WAIT_S)
            if not answers:
                raise TimeoutError(f"the EC agent of rank {rank} did not answer within {_START_WAIT_S} s")
            if rank == 0:
                self.publisher = msgspec.msgpack.decode(answers[0], type=Announced)

    def admits(self, request_id: str, needed: Sequence[WantedItem]) -> bool:
        """Whether every needed item is pinned in all slabs, or will be encoded by this engine.

        False defers the request, or, once a reason is known, dooms it: it then shows up in `take_unavailable`
        and no other request is affected.
        """
        self._drain()
        tracked = self._requests.setdefault(request_id, _Tracked())
        if tracked.doomed:
            return False
        tracked.needed = tuple(item.identifier for item in needed)
        unasked = {item.identifier: item for item in needed if item.identifier not in tracked.asked}
        if unasked:
            tracked.asked.update(unasked)
            self.tell(Want(request_id, tuple(unasked.values())))
            self._drain()  # an agent of this process has answered what it could
        return all(
            identifier in tracked.absent or len(tracked.pinned.get(identifier, ())) == len(self._links)
            for identifier in tracked.needed
        )

    def take_unavailable(self) -> set[str]:
        """Requests to be failed; for each of them the agent of rank 0 already holds the reason."""
        self._drain()
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def is_local(self, identifier: str) -> bool:
        """Whether vLLM may load the item instead of encoding it."""
        return self._loads and identifier in self._local

    def needed_by(self, request_ids: Iterable[str]) -> list[str]:
        """The items that the next step of these requests may touch, without repeats."""
        tracked = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        return list(dict.fromkeys(identifier for one in tracked for identifier in one.needed))

    def encoded(self, request_id: str, identifier: str) -> None:
        """The engine runs its encoder on the item for this request."""
        if request_id in self._requests:
            self._requests[request_id].reports[identifier] = Report(Source.ENCODED)

    def report(self, request_id: str, identifier: str) -> Report:
        """How the request came by the item, as far as it is known."""
        tracked = self._requests.get(request_id)
        return Report() if tracked is None else tracked.reports.get(identifier, Report())

    def announce(
        self, identifiers: Sequence[str], metadata: dict[str, dict[str, Any]], wait_s: float
    ) -> dict[str, EncodingRef] | None:
        """References from rank 0, which publishes for all, or None when it does not answer in time.

        An answer that comes too late is retracted on arrival. Where items are also loaded, what is announced is a
        spare copy for a reader that seldom needs it: its pins must not keep this engine's own requests waiting.
        """
        self._next_token += 1
        self._awaited = self._next_token
        announce = Announce(self._next_token, tuple(identifiers), metadata, revocable=self._loads)
        self._links[0].send(encode(announce))
        deadline = time.monotonic() + wait_s
        while self._awaited not in self._answers and (remaining := deadline - time.monotonic()) > 0:
            self._take(0, self._links[0].receive(remaining))
        answer = self._answers.pop(self._awaited, None)
        self._awaited = None
        return None if answer is None else answer.refs

    def ask_counts(self, now: float) -> None:
        """Ask rank 0's agent for its numbers, once a second at most."""
        if now >= self._count_at:
            self._count_at = now + _COUNT_EVERY_S
            self._links[0].send(encode(Count()))

    def take_counts(self) -> dict[str, float] | None:
        """The agent's numbers, if they came since the last call."""
        counts, self._counts = self._counts, None
        return counts

    def finish(self, request_id: str, refs: Iterable[EncodingRef]) -> None:
        """The request ended: its pins go, and so do the leases among `refs` that nobody was asked about."""
        tracked = self._requests.pop(request_id, _Tracked())
        self._unavailable.discard(request_id)
        for identifier, ranks in tracked.pinned.items():
            if len(ranks) == len(self._links):
                self._local[identifier] -= 1
                if not self._local[identifier]:
                    del self._local[identifier]
        unused = {(ref.peer, ref.lease) for ref in refs if ref.lease and ref.identifier not in tracked.asked}
        self.tell(Drop(request_id, tuple(sorted(unused))))

    def tell(self, message: ToAgent) -> None:
        """Send a message to all ranks."""
        payload = encode(message)
        for link in self._links:
            link.send(payload)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _drain(self) -> None:
        for rank, link in enumerate(self._links):
            self._take(rank, link.receive())

    def _take(self, rank: int, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            message = msgspec.msgpack.decode(payload, type=ToScheduler)
            if isinstance(message, Announced):
                self._take_announcement(message)
                continue
            if isinstance(message, Counted):
                self._counts = message.numbers
                continue
            tracked = self._requests.get(message.request_id)
            if tracked is None:
                continue  # ended meanwhile; its Drop is on the way
            match message:
                case Pinned():
                    self._pinned(rank, tracked, message)
                case Absent():
                    tracked.absent.add(message.identifier)
                case Missing():
                    self._doom(tracked, message)
                case Noted():
                    self._unavailable.add(message.request_id)

    def _pinned(self, rank: int, tracked: _Tracked, message: Pinned) -> None:
        ranks = tracked.pinned.setdefault(message.identifier, set())
        ranks.add(rank)
        slowest = tracked.reports.setdefault(message.identifier, Report(message.source))
        slowest.transfer_s = max(slowest.transfer_s, message.transfer_s)
        if message.source is Source.REMOTE:
            slowest.source = Source.REMOTE
        if len(ranks) == len(self._links):
            self._local[message.identifier] = self._local.get(message.identifier, 0) + 1

    def _doom(self, tracked: _Tracked, message: Missing) -> None:
        """Leave the reason with rank 0's agent, where the stage server looks for it, before the request fails."""
        if not tracked.doomed:
            tracked.doomed = True
            self._links[0].send(encode(Fail(message.request_id, message.reason, (message.identifier,))))

    def _take_announcement(self, message: Announced) -> None:
        if message.token == self._awaited:
            self._answers[message.token] = message
        elif leases := tuple(ref.lease for ref in message.refs.values() if ref.lease):
            self._links[0].send(encode(Retract(leases)))


class Views:
    """Which slab extents vLLM's encoder cache shows, by load.

    vLLM goes on using a view after every request has let go of it, until it evicts the identifier. Each load has
    an id of its own, so that an eviction which reaches the agent late cannot unpin a newer load of the same item.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._current: dict[str, int] = {}
        self._loads: list[tuple[int, str]] = []
        self._evicted: list[int] = []
        self._last_id = 0

    def load(self, identifier: str) -> None:
        """vLLM made room for a local item. The pin is asked for now, while the request's own still holds."""
        self._last_id += 1
        self._gate.tell(PinView(self._last_id, identifier))
        self._loads.append((self._last_id, identifier))
        self.evict(identifier)
        self._current[identifier] = self._last_id

    def evict(self, identifier: str) -> None:
        """vLLM dropped the identifier, or is about to replace its view."""
        load_id = self._current.pop(identifier, None)
        if load_id is not None:
            self._evicted.append(load_id)

    def take(self) -> tuple[list[tuple[int, str]], list[int]]:
        """(load id, identifier) to be shown, and load ids no longer shown, since the last call."""
        loads, evicted = self._loads, self._evicted
        self._loads, self._evicted = [], []
        return loads, evicted
