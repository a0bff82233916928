"""Which replica of a deployment gets a call, as Ray Serve request routers.

Encode calls go by the item's identifier, prefill calls by the request's first item or first tokens, so that a repeat
meets the replica whose caches hold it. Decode keeps nothing worth returning to and uses Serve's own router, by load.
At the ingress it is the client's choice: requests with one `x-session-id` header meet one replica, which knows the
names that the client has given its items. The key is the handle's `session_id`.
"""

from __future__ import annotations

from typing import Any

from ray.serve._private.common import RequestMetadata
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.request_router import PendingRequest, RunningReplica

_LOAD_FACTOR = 1.25
"""A replica may have this many times the mean load before its items overflow to the next on the ring. Consistent
hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam): above 1, moves stay few and no replica melts."""


class BoundedAffinityRouter(ConsistentHashRouter):  # type: ignore[misc]
    """Consistent hashing in which a replica with more than its share is tried last instead of first.

    A hot image is then encoded by a few replicas, each of which keeps it, instead of queueing at one.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranked: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        lengths: dict[Any, int] = {
            replica.replica_id: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for replica in candidate_replicas
        }
        allowed = bound(sum(lengths.values()), len(lengths))
        fits = [rank for rank in ranked if all(lengths.get(replica.replica_id, 0) < allowed for replica in rank)]
        return fits + [rank for rank in ranked if rank not in fits]

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Give `replica` to the very call that it was chosen for.

        Ray finds that call by its internal request id, which all calls made on behalf of one HTTP request share: of
        two encode calls sent at once, one would be answered twice and the other wait for ever. Each call has a
        metadata object of its own.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return


def bound(total: int, replicas: int) -> float:
    """Requests one replica may have when the next of `total + 1` arrives."""
    return _LOAD_FACTOR * (total + 1) / max(replicas, 1)
