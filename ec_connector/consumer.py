"""The consumer's side of a transfer: what requests wait for, and the pins they hold.

A state machine over the pool and the reads from peers; the time is a parameter. Requests
are served in order of arrival: one that cannot get room for all its items holds back those behind it that
need room too, so that none waits while holding what another waits for.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ec_connector.fetches import Fetch, Fetches
from ec_connector.pool import Extent, Pool, Spec, State
from ec_connector.protocol import (
    Absent,
    Drop,
    Missing,
    Pinned,
    PinView,
    Reason,
    Source,
    ToScheduler,
    Want,
    WantedItem,
)
from serving.protocol import EncodingRef


class _Request(msgspec.Struct):
    """One request's items: still `wanted`, or pinned. `blocked_since` is set while it waits for room."""

    wanted: dict[str, WantedItem]
    pins: dict[str, Extent]
    blocked_since: float | None = None
    tried: int = -1


class Consumer:
    """Pins items for requests and views.

    Args:
        pool: The slab's extents.
        fetches: Reads from peers.
        refuses: Whether a reference is ruled out before anyone is asked.
        busy_wait_s: How long a request may wait for room.
    """

    def __init__(
        self, pool: Pool, fetches: Fetches, *, refuses: Callable[[EncodingRef], bool], busy_wait_s: float
    ) -> None:
        self._pool = pool
        self._fetches = fetches
        self._refuses = refuses
        self._busy_wait_s = busy_wait_s
        self._requests: dict[str, _Request] = {}
        self._views: dict[int, Extent] = {}
        self._outbox: list[ToScheduler] = []
        self.hits = 0
        self.failures: dict[Reason, int] = {}

    @property
    def open_pins(self) -> int:
        """Pins held for requests and views."""
        return sum(len(request.pins) for request in self._requests.values()) + len(self._views)

    def want(self, message: Want) -> None:
        """Take on items for a request; `poll` works on them."""
        request = self._requests.setdefault(message.request_id, _Request({}, {}))
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
        for peer, lease in message.leases:
            self._fetches.release(peer, lease)

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
        deadlines = [
            r.blocked_since + self._busy_wait_s for r in self._requests.values() if r.blocked_since is not None
        ]
        return min(deadlines, default=None)

    def _advance(self, now: float, request_id: str, request: _Request, *, may_reserve: bool) -> bool:
        """Resolve what can be resolved. Returns whether the request waits for room."""
        to_read: list[tuple[WantedItem, EncodingRef]] = []
        for item in list(request.wanted.values()):
            extent = self._pool.find(item.identifier)
            if extent is not None:
                if extent.state is State.READY:
                    self._pin(request_id, request, item, extent, Source.SLAB, 0.0)
            elif item.optional:
                del request.wanted[item.identifier]
                self._outbox.append(Absent(request_id, item.identifier))
            elif item.ref is None:
                self._fail(request_id, request, item.identifier, Reason.CACHE_MISS)
            elif reason := self._objection(item, item.ref):
                self._fail(request_id, request, item.identifier, reason)
            else:
                to_read.append((item, item.ref))
        if not to_read or not request.wanted:
            request.blocked_since = None
            return False
        return self._reserve(now, request_id, request, to_read, may_reserve=may_reserve)

    def _reserve(
        self,
        now: float,
        request_id: str,
        request: _Request,
        to_read: list[tuple[WantedItem, EncodingRef]],
        *,
        may_reserve: bool,
    ) -> bool:
        """Room for all items to be read, then their reads, or neither."""
        if may_reserve and request.tried != self._pool.freed:
            request.tried = self._pool.freed
            extents = self._pool.reserve([Spec(r.identifier, r.size_bytes, r.shape, r.dtype) for _, r in to_read])
            if extents is not None:
                request.blocked_since = None
                for (_, ref), extent in zip(to_read, extents, strict=True):
                    self._fetches.start(now, ref, extent)
                return False
        if request.blocked_since is None:
            request.blocked_since = now
        if now >= request.blocked_since + self._busy_wait_s:
            request.blocked_since = None
            self._fail(request_id, request, to_read[0][0].identifier, Reason.BUSY)
            return False
        return True

    def _objection(self, item: WantedItem, ref: EncodingRef) -> Reason | None:
        if not self._pool.fits_empty(ref.size_bytes):
            return Reason.TOO_LARGE
        if ref.shape[0] != item.rows or self._refuses(ref):
            return Reason.MISMATCH
        return None

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
                self._pin(request_id, request, item, fetch.extent, Source.REMOTE, fetch.transfer_s, fetch.lease)
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
