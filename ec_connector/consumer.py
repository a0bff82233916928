"""What requests wait for, and the pins they hold.

A state machine over the pool and the reads from peers; the time is a parameter. Requests are served in order of
arrival: one that cannot get room for all its items holds back those behind it that need room too, so that none
waits while holding what another waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ec_connector.fetches import Fetch, Fetches
from ec_connector.pool import Extent, Pool, Spec, State
from ec_connector.protocol import Absent, Drop, Missing, Pinned, PinView, Reason, Source, ToScheduler, Want, WantedItem
from serving.protocol import EncodingRef


class _Request(msgspec.Struct):
    """One request's items: `wanted` still, pinned, or with room promised for what its engine encodes.

    `blocked_since` is set while it waits for room; `tried` is the pool's `freed` at the last attempt.
    """

    wanted: dict[str, WantedItem]
    pins: dict[str, Extent]
    promised: dict[str, Extent]
    blocked_since: float | None = None
    tried: int = -1


class Rules(msgspec.Struct, frozen=True):
    """Args:
    objects_to: What rules a reference out before its peer is asked, if anything does.
    revoke_one: Drops one pin that this engine can do without; False when there is none.
    busy_wait_s: How long a request may wait for room.
    dtype: Element type of encoder outputs.
    itemsize: Bytes per element.
    """

    objects_to: Callable[[EncodingRef], Reason | None]
    revoke_one: Callable[[], bool]
    busy_wait_s: float
    dtype: str
    itemsize: int


class Consumer:
    """Gets items for requests and keeps them in place for requests and views."""

    def __init__(self, pool: Pool, fetches: Fetches, rules: Rules) -> None:
        self._pool = pool
        self._fetches = fetches
        self._rules = rules
        self._requests: dict[str, _Request] = {}
        self._views: dict[int, Extent] = {}
        self._outbox: list[ToScheduler] = []
        self.hits = 0
        self.failures: dict[Reason, int] = {}

    @property
    def open_pins(self) -> int:
        """Pins held for requests and views."""
        return sum(len(request.pins) for request in self._requests.values()) + len(self._views)

    @property
    def waiting(self) -> bool:
        """Whether a request waits for an item."""
        return any(request.wanted for request in self._requests.values())

    @property
    def unread_bytes(self) -> int:
        """Bytes of the items that requests wait for from peers. Two requests for one item count it twice."""
        wanted = (item for request in self._requests.values() for item in request.wanted.values())
        return sum(item.ref.size_bytes for item in wanted if item.ref is not None)

    def want(self, message: Want) -> None:
        """Take on items for a request; `poll` works on them."""
        request = self._requests.setdefault(message.request_id, _Request({}, {}, {}))
        for item in message.items:
            if item.identifier not in request.pins:
                request.wanted[item.identifier] = item

    def drop(self, message: Drop) -> None:
        """The request ended: let go of everything it held or was given."""
        request = self._requests.pop(message.request_id, None)
        if request is not None:
            self._forget_wanted(request)
            for extent in request.pins.values():
                self._pool.unpin(extent)
            for extent in request.promised.values():
                self._pool.abandon(extent)
        for peer, lease in message.leases:
            self._fetches.release(peer, lease)

    def claim(self, spec: Spec) -> Extent | None:
        """The room promised for an item that has now been encoded; given up if the item has another size."""
        for request in self._requests.values():
            extent = request.promised.pop(spec.identifier, None)
            if extent is None:
                continue
            if (extent.shape, extent.dtype, extent.size_bytes) == (spec.shape, spec.dtype, spec.size_bytes):
                return extent
            self._pool.abandon(extent)
        return None

    def reserve(self, specs: Sequence[Spec]) -> list[Extent] | None:
        """Room for all of `specs`, at the cost of pins that can be revoked, or None."""
        while (extents := self._pool.reserve(specs)) is None and self._rules.revoke_one():
            pass
        return extents

    def is_promised(self, identifier: str) -> bool:
        """Whether room is kept for an item that has not been encoded yet."""
        return any(identifier in request.promised for request in self._requests.values())

    def pin_view(self, message: PinView) -> None:
        """Keep the item in place for vLLM's view of it. The request that caused the view still pins it."""
        extent = self._pool.find(message.identifier)
        if extent is None or extent.state is not State.READY:
            raise RuntimeError(f"view {message.load_id} of an item that no request pins")
        self._pool.pin(extent)
        self._views[message.load_id] = extent

    def drop_views(self, load_ids: list[int] | None) -> None:
        """vLLM evicted these views (None: all of them)."""
        for load_id in list(self._views) if load_ids is None else load_ids:
            extent = self._views.pop(load_id, None)
            if extent is not None:
                self._pool.unpin(extent)

    def poll(self, now: float) -> list[ToScheduler]:
        """Advance every request as far as it goes; returns what the scheduler must hear."""
        self._take_ended(now)
        blocked = False
        for request_id, request in list(self._requests.items()):
            if request.wanted:
                blocked |= self._advance(now, request_id, request, may_reserve=not blocked)
                self._take_ended(now)  # on one machine a read ends where it starts
        outbox, self._outbox = self._outbox, []
        return outbox

    def next_deadline(self) -> float | None:
        """When `poll` has something to do at the latest; None when nothing is timed."""
        blocked = [r.blocked_since for r in self._requests.values() if r.blocked_since is not None]
        return min(blocked) + self._rules.busy_wait_s if blocked else None

    def _advance(self, now: float, request_id: str, request: _Request, *, may_reserve: bool) -> bool:
        """Resolve what can be resolved. Returns whether the request waits for room."""
        roomless: list[tuple[WantedItem, Spec]] = []
        for item in list(request.wanted.values()):
            if not request.wanted:
                break  # one of its items failed
            extent = self._pool.find(item.identifier)
            if extent is not None:
                if extent.state is State.READY:
                    self._pin(request_id, request, item, extent, Source.SLAB, 0.0)
                continue  # filling: what fills it will end
            spec = self._spec(item)
            if spec is not None:
                if reason := self._objection(item, spec):
                    self._fail(request_id, request, item.identifier, reason)
                roomless.append((item, spec))
            elif item.optional:
                self._encode(request_id, request, item)
            else:
                self._fail(request_id, request, item.identifier, Reason.CACHE_MISS)
        if not roomless or not request.wanted:
            request.blocked_since = None
            return False
        return self._reserve(now, request_id, request, roomless, may_reserve=may_reserve)

    def _reserve(
        self,
        now: float,
        request_id: str,
        request: _Request,
        roomless: list[tuple[WantedItem, Spec]],
        *,
        may_reserve: bool,
    ) -> bool:
        """Room for all items to be read or encoded, or for none. Returns whether the request waits for it."""
        if may_reserve and request.tried != self._pool.freed:
            request.tried = self._pool.freed
            extents = self.reserve([spec for _, spec in roomless])
            if extents is not None:
                request.blocked_since = None
                for (item, _), extent in zip(roomless, extents, strict=True):
                    self._fill(now, request_id, request, item, extent)
                return False
        if request.blocked_since is None:
            request.blocked_since = now
        if now < request.blocked_since + self._rules.busy_wait_s:
            return True
        request.blocked_since = None
        self._fail(request_id, request, roomless[0][0].identifier, Reason.BUSY)
        return False

    def _fill(self, now: float, request_id: str, request: _Request, item: WantedItem, extent: Extent) -> None:
        if item.ref is not None:
            self._fetches.start(now, item.ref, extent)
        else:
            request.promised[item.identifier] = extent
            self._encode(request_id, request, item)

    def _encode(self, request_id: str, request: _Request, item: WantedItem) -> None:
        del request.wanted[item.identifier]
        self._outbox.append(Absent(request_id, item.identifier))

    def _spec(self, item: WantedItem) -> Spec | None:
        """The room that the item needs in the slab; None if nothing will be put there for this request."""
        if item.ref is not None:
            return Spec(item.identifier, item.ref.size_bytes, item.ref.shape, item.ref.dtype)
        if item.room_width:
            shape = (item.rows, item.room_width)
            return Spec(item.identifier, shape[0] * shape[1] * self._rules.itemsize, shape, self._rules.dtype)
        return None

    def _objection(self, item: WantedItem, spec: Spec) -> Reason | None:
        if not self._pool.fits_empty(spec.size_bytes):
            return Reason.TOO_LARGE
        if spec.shape[0] != item.rows:
            return Reason.MISMATCH
        return None if item.ref is None else self._rules.objects_to(item.ref)

    def _take_ended(self, now: float) -> None:
        while ended := self._fetches.poll(now):
            for fetch, reason in ended:
                self._fetch_ended(fetch, reason)

    def _fetch_ended(self, fetch: Fetch, reason: Reason | None) -> None:
        """Pin what arrived for all who waited; on failure fail those who named the same peer.

        Others go on with what they have: another peer, tensors, or nothing.
        """
        identifier = fetch.ref.identifier
        for request_id, request in self._requests.items():
            item = request.wanted.get(identifier)
            if item is None:
                continue
            if reason is None:
                self._pin(request_id, request, item, fetch.extent, Source.REMOTE, fetch.transfer_s, fetch.ref.lease)
            elif item.ref is not None and item.ref.peer == fetch.ref.peer:
                self._fail(request_id, request, identifier, reason)

    def _pin(
        self,
        request_id: str,
        request: _Request,
        item: WantedItem,
        extent: Extent,
        source: Source,
        transfer_s: float,
        used_lease: str = "",
    ) -> None:
        if extent.shape[0] != item.rows:
            self._fail(request_id, request, item.identifier, Reason.MISMATCH)
            return
        del request.wanted[item.identifier]
        self._pool.pin(extent)
        request.pins[item.identifier] = extent
        self._outbox.append(Pinned(request_id, item.identifier, source, transfer_s))
        if source is Source.SLAB:
            self.hits += 1
        if item.ref is not None and item.ref.lease != used_lease:
            self._fetches.release(item.ref.peer, item.ref.lease)

    def _fail(self, request_id: str, request: _Request, identifier: str, reason: Reason) -> None:
        """The request cannot go on. Its pins stay until the scheduler drops it."""
        if not request.wanted:
            return
        self.failures[reason] = self.failures.get(reason, 0) + 1
        self._outbox.append(Missing(request_id, identifier, reason))
        self._forget_wanted(request)

    def _forget_wanted(self, request: _Request) -> None:
        """Let go of the leases of items whose read has not begun."""
        for item in request.wanted.values():
            if item.ref is not None and not self._fetches.uses(item.ref.lease):
                self._fetches.release(item.ref.peer, item.ref.lease)
        request.wanted.clear()
