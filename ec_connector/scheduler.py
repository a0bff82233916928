"""The scheduler's side: which request may be scheduled, what its worker loads, and what is announced.

Runs inside vLLM's scheduler, which calls every method from one thread. It holds no embeddings and talks to no
peer: it asks the agents of its own engine and believes nothing to be local that not all of them have pinned.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

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
    ToScheduler,
    Want,
    WantedItem,
    announced_fields,
    encode,
)
from serving.protocol import EncodingRef

_ANNOUNCE_WAIT_S = 0.005
_START_WAIT_S = 60.0


class Link(Protocol):
    """The way to one rank's agent."""

    def send(self, payload: bytes) -> None: ...
    def receive(self, timeout_s: float = 0.0) -> list[bytes]: ...
    def close(self) -> None: ...


class StepMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What the worker does in one step.

    `loads` are (load id, identifier) to be put into vLLM's encoder cache as views; `evicted` are load ids whose
    views vLLM has dropped; `publish` are items to be saved if vLLM holds them and the slab does not.
    """

    def __init__(self, loads: list[tuple[int, str]], evicted: list[int], publish: list[str]) -> None:
        self.loads = loads
        self.evicted = evicted
        self.publish = publish


class _Tracked(msgspec.Struct):
    """One request: the items it needs in this step, and what the agents said of those it asked for."""

    needed: tuple[str, ...] = ()
    asked: set[str] = msgspec.field(default_factory=set)
    pinned: dict[str, set[int]] = msgspec.field(default_factory=dict)
    absent: set[str] = msgspec.field(default_factory=set)
    source: dict[str, Source] = msgspec.field(default_factory=dict)
    transfer_s: dict[str, float] = msgspec.field(default_factory=dict)
    doomed: bool = False


class ECScheduler:
    """Gate, loads and announcements of one engine.

    Args:
        links: One per rank, in order of rank.
        resolver: vLLM's knowledge of which fields are placeholder metadata.
        is_producer: Whether finished requests are announced.
        is_consumer: Whether items may come from the slab.
        widths: Width of encoder outputs by modality, as vLLM measured it; used by producers.
        dtype: Element type of encoder outputs.
        itemsize: Bytes per element.
    """

    def __init__(
        self,
        links: Sequence[Link],
        resolver: PlaceholderMetadataResolver,
        *,
        is_producer: bool,
        is_consumer: bool,
        widths: Mapping[str, int],
        dtype: str,
        itemsize: int,
    ) -> None:
        self._links = links
        self._resolver = resolver
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._widths = widths
        self._dtype = dtype
        self._itemsize = itemsize
        self._requests: dict[str, _Tracked] = {}
        self._local: dict[str, int] = {}  # identifier -> requests for which all ranks pin it
        self._views: dict[str, int] = {}
        self._loads: list[tuple[int, str]] = []
        self._evicted: list[int] = []
        self._next_load = 0
        self._unavailable: set[str] = set()
        self._announced: dict[int, Announced] = {}
        self._awaited: int | None = None
        self._next_token = 0
        self._publisher = Announced(0, "", "", {})

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
                self._publisher = msgspec.msgpack.decode(answers[0], type=Announced)

    # --- the gate ---------------------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether every item beyond `num_computed_tokens` is pinned in all slabs or will be encoded here.

        False defers the request, or, once a reason is known, dooms it: it then shows up in
        `take_unavailable_requests` and no other request is affected.
        """
        self._drain()
        tracked = self._requests.setdefault(request.request_id, _Tracked())
        if tracked.doomed:
            return False
        needed = [f for f in request.mm_features if f.mm_position.offset + f.mm_position.length > num_computed_tokens]
        tracked.needed = tuple(feature.identifier for feature in needed)
        if not self._is_consumer:
            if untreatable := [f.identifier for f in needed if not self._has_tensors(f)]:
                self._doom(request.request_id, Reason.CACHE_MISS, untreatable)
            return not tracked.doomed
        items = [self._wanted(request, f) for f in needed if f.identifier not in tracked.asked]
        if items:
            tracked.asked.update(item.identifier for item in items)
            self._tell_all(Want(request.request_id, tuple({item.identifier: item for item in items}.values())))
        return all(self._is_settled(tracked, identifier) for identifier in tracked.needed)

    def take_unavailable_requests(self) -> set[str]:
        """Requests to be failed; for each of them the agent of rank 0 already holds the reason."""
        self._drain()
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def has_cache_item(self, identifier: str) -> bool:
        """Whether vLLM may load the item instead of encoding it."""
        return identifier in self._local

    # --- one step ---------------------------------------------------------------------------------------------

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM made room for the item: load it if it is local, and keep it there while vLLM holds the view."""
        identifier = request.mm_features[index].identifier
        if identifier not in self._local:
            return
        self._next_load += 1
        self._tell_all(PinView(self._next_load, identifier))
        self._loads.append((self._next_load, identifier))
        self._retire_view(identifier)
        self._views[identifier] = self._next_load

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """This step's work for the workers. Steps without tokens run no hook on the V1 runner: theirs is kept."""
        for identifier in output.free_encoder_mm_hashes:
            self._retire_view(identifier)
        publish: list[str] = []
        if self._is_producer:
            scheduled = [self._requests[r] for r in output.num_scheduled_tokens if r in self._requests]
            publish = list(dict.fromkeys(identifier for tracked in scheduled for identifier in tracked.needed))
        if output.total_num_scheduled_tokens == 0:
            return StepMetadata([], [], publish)
        metadata = StepMetadata(self._loads, self._evicted, publish)
        self._loads, self._evicted = [], []
        return metadata

    # --- the end of a request ---------------------------------------------------------------------------------

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Announce what the slab holds of a finished request, then let go of what the request held."""
        self._drain()
        tracked = self._requests.pop(request.request_id, _Tracked())
        params = None
        if request.mm_features and request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_REPETITION,
        ):
            params = self._transfer_params(request, tracked)
        for identifier, ranks in tracked.pinned.items():
            if len(ranks) == len(self._links):
                self._local[identifier] -= 1
                if not self._local[identifier]:
                    del self._local[identifier]
        if request.mm_features:
            refs = [self._ref_of(request, feature.identifier) for feature in request.mm_features]
            unasked = [
                (r.peer, r.lease) for r in refs if r is not None and r.lease and r.identifier not in tracked.asked
            ]
            self._tell_all(Drop(request.request_id, tuple(dict.fromkeys(unasked))))
        return params

    def close(self) -> None:
        for link in self._links:
            link.close()

    def _transfer_params(self, request: Request, tracked: _Tracked) -> dict[str, Any]:
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(request.mm_features, self._resolver)
        for identifier, item in items.items():
            item["source"] = self._source(tracked, identifier).value
            item["transfer_s"] = tracked.transfer_s.get(identifier, 0.0)
        if self._is_producer:
            refs = self._announce(items)
            for feature in request.mm_features:
                item = items[feature.identifier]
                ref = self._placeless(feature, item["source"]) if refs is None else refs.get(feature.identifier)
                item["ref"] = None if ref is None else announced_fields(ref)
        return items

    def _announce(self, items: dict[str, dict[str, Any]]) -> dict[str, EncodingRef] | None:
        """References from rank 0, which publishes for all, or None when it does not answer at once.

        An answer that comes too late is retracted on arrival.
        """
        self._next_token += 1
        self._awaited = self._next_token
        metadata = {identifier: item["metadata"] for identifier, item in items.items() if item["metadata"]}
        self._links[0].send(encode(Announce(self._next_token, tuple(items), metadata)))
        deadline = time.monotonic() + _ANNOUNCE_WAIT_S
        while self._awaited not in self._announced and (remaining := deadline - time.monotonic()) > 0:
            self._take(0, self._links[0].receive(remaining))
        answer = self._announced.pop(self._awaited, None)
        self._awaited = None
        return None if answer is None else answer.refs

    def _placeless(self, feature: MultiModalFeatureSpec, source: str) -> EncodingRef | None:
        """A reference that names only the peer: its reader asks for the place. None if the item was never needed."""
        width = self._widths.get(feature.modality)
        if width is None or source == Source.NONE:
            return None
        rows = feature.mm_position.get_num_embeds()
        return EncodingRef(
            identifier=feature.identifier,
            peer=self._publisher.peer,
            epoch=self._publisher.epoch,
            offset=None,
            generation=0,
            shape=(rows, width),
            dtype=self._dtype,
            size_bytes=rows * width * self._itemsize,
            digest=0,
        )

    def _source(self, tracked: _Tracked, identifier: str) -> Source:
        if identifier in tracked.absent or (not self._is_consumer):
            return Source.ENCODED
        return tracked.source.get(identifier, Source.NONE)

    # --- what the agents say ----------------------------------------------------------------------------------

    def _drain(self) -> None:
        for rank, link in enumerate(self._links):
            self._take(rank, link.receive())

    def _take(self, rank: int, payloads: Iterable[bytes]) -> None:
        for payload in payloads:
            message = msgspec.msgpack.decode(payload, type=ToScheduler)
            match message:
                case Pinned():
                    self._pinned(rank, message)
                case Absent():
                    if (tracked := self._requests.get(message.request_id)) is not None:
                        tracked.absent.add(message.identifier)
                case Missing():
                    self._doom(message.request_id, message.reason, [message.identifier])
                case Noted():
                    if message.request_id in self._requests:
                        self._unavailable.add(message.request_id)
                case Announced():
                    self._take_announcement(message)

    def _pinned(self, rank: int, message: Pinned) -> None:
        tracked = self._requests.get(message.request_id)
        if tracked is None:
            return  # ended meanwhile; its Drop is on the way
        ranks = tracked.pinned.setdefault(message.identifier, set())
        ranks.add(rank)
        tracked.source.setdefault(message.identifier, message.source)
        tracked.transfer_s[message.identifier] = max(
            message.transfer_s, tracked.transfer_s.get(message.identifier, 0.0)
        )
        if len(ranks) == len(self._links):
            self._local[message.identifier] = self._local.get(message.identifier, 0) + 1

    def _take_announcement(self, message: Announced) -> None:
        if message.token == self._awaited:
            self._announced[message.token] = message
        elif leases := tuple(ref.lease for ref in message.refs.values() if ref.lease):
            self._links[0].send(encode(Retract(leases)))

    def _doom(self, request_id: str, reason: Reason, identifiers: list[str]) -> None:
        """Leave the reason with rank 0's agent, where the stage server looks for it, before the request fails."""
        tracked = self._requests.get(request_id)
        if tracked is None or tracked.doomed:
            return
        tracked.doomed = True
        self._links[0].send(encode(Fail(request_id, reason, tuple(identifiers))))

    # --- small things -----------------------------------------------------------------------------------------

    def _is_settled(self, tracked: _Tracked, identifier: str) -> bool:
        return identifier in tracked.absent or len(tracked.pinned.get(identifier, ())) == len(self._links)

    def _wanted(self, request: Request, feature: MultiModalFeatureSpec) -> WantedItem:
        rows = feature.mm_position.get_num_embeds()
        if self._has_tensors(feature):
            return WantedItem(feature.identifier, rows, optional=True)
        return WantedItem(feature.identifier, rows, self._ref_of(request, feature.identifier))

    def _has_tensors(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether this engine could encode the item: some field is there that is more than metadata."""
        if feature.data is None:
            return False
        metadata = self._resolver.fields_for(feature.modality)
        return any(
            element.data is not None and key not in metadata and not element.field.keep_on_cpu
            for key, element in feature.data.items()
        )

    @staticmethod
    def _ref_of(request: Request, identifier: str) -> EncodingRef | None:
        """The reference that came with the request. Its signature was checked by the stage server."""
        entry = (request.ec_transfer_params or {}).get(identifier) or {}
        ref = entry.get("ref")
        return None if ref is None else msgspec.convert(ref, EncodingRef)

    def _retire_view(self, identifier: str) -> None:
        load_id = self._views.pop(identifier, None)
        if load_id is not None:
            self._evicted.append(load_id)

    def _tell_all(self, message: ToAgent) -> None:
        payload = encode(message)
        for link in self._links:
            link.send(payload)
