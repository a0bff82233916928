"""The scheduler's side: vLLM's hooks in terms of the gate.

Runs inside vLLM's scheduler, which calls every method from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from ec_connector.gate import Gate, Views
from ec_connector.protocol import Source, WantedItem, announced_fields, ref_from
from serving.protocol import EncodingRef

_ANNOUNCE_WAIT_S = 0.005
_COMPLETE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class StepMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What the worker does in one step.

    `loads` are (load id, identifier) to be put into vLLM's encoder cache as views; `evicted` are load ids whose
    views vLLM has dropped; `publish` are items to be saved if vLLM holds them and the slab does not.
    """

    def __init__(self, loads: list[tuple[int, str]], evicted: list[int], publish: list[str]) -> None:
        self.loads = loads
        self.evicted = evicted
        self.publish = publish


class Outputs(msgspec.Struct, frozen=True):
    """What encoder outputs look like: width by modality where vLLM measured it, element type, bytes per element."""

    widths: Mapping[str, int]
    dtype: str
    itemsize: int

    def shape(self, feature: MultiModalFeatureSpec) -> tuple[int, int] | None:
        """(rows, width) of the item's encoding; None where the width is not known."""
        width = self.widths.get(feature.modality)
        return None if width is None else (feature.mm_position.get_num_embeds(), width)


class ECScheduler:
    """vLLM's scheduler hooks.

    Args:
        gate: What decides.
        resolver: vLLM's knowledge of which fields are placeholder metadata.
        outputs: What encoder outputs look like.
        is_producer: Whether finished requests are announced.
        is_consumer: Whether items may come from the slab.
    """

    def __init__(
        self,
        gate: Gate,
        resolver: PlaceholderMetadataResolver,
        outputs: Outputs,
        *,
        is_producer: bool,
        is_consumer: bool,
    ) -> None:
        self._gate = gate
        self._views = Views(gate)
        self._resolver = resolver
        self._outputs = outputs
        self._is_producer = is_producer
        self._is_consumer = is_consumer
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether every item beyond `num_computed_tokens` is pinned in the slab or will be encoded here."""
        self._features[request.request_id] = request.mm_features
        needed = [f for f in request.mm_features if f.mm_position.offset + f.mm_position.length > num_computed_tokens]
        return self._gate.admits(request.request_id, [self._wanted(request, feature) for feature in needed])

    def take_unavailable_requests(self) -> set[str]:
        return self._gate.take_unavailable()

    def has_cache_item(self, identifier: str) -> bool:
        return self._gate.is_local(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """vLLM made room for the item, to be loaded or encoded."""
        identifier = request.mm_features[index].identifier
        if self._gate.is_local(identifier):
            self._views.load(identifier)

    def build_connector_meta(self, output: SchedulerOutput) -> StepMetadata:
        """This step's work for the workers. A step without tokens runs no hook on the V1 runner: its work is kept."""
        self._gate.ask_counts(time.monotonic())
        for identifier in output.free_encoder_mm_hashes:
            self._views.evict(identifier)
        for request_id, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                self._gate.encoded(request_id, self._features[request_id][index].identifier)
        publish = self._gate.needed_by(output.num_scheduled_tokens) if self._is_producer else []
        loads, evicted = self._views.take() if output.total_num_scheduled_tokens else ([], [])
        return StepMetadata(loads, evicted, publish)

    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Announce what the slab holds of a completed request, then let go of what the request held."""
        if not request.mm_features:
            return None
        params = self._transfer_params(request) if request.status in _COMPLETE else None
        refs = (ref_from(request.ec_transfer_params, feature.identifier) for feature in request.mm_features)
        self._gate.finish(request.request_id, [ref for ref in refs if ref is not None])
        self._features.pop(request.request_id, None)
        return params

    def take_counts(self) -> dict[str, float] | None:
        return self._gate.take_counts()

    def close(self) -> None:
        self._gate.close()

    def _transfer_params(self, request: Request) -> dict[str, Any]:
        items: dict[str, dict[str, Any]] = collect_ec_item_metadata(request.mm_features, self._resolver)
        for identifier, item in items.items():
            report = self._gate.report(request.request_id, identifier)
            item["source"] = report.source.value
            item["transfer_s"] = report.transfer_s
        if self._is_producer:
            metadata = {identifier: item["metadata"] for identifier, item in items.items() if item["metadata"]}
            refs = self._gate.announce(list(items), metadata, _ANNOUNCE_WAIT_S)
            for feature in request.mm_features:
                item = items[feature.identifier]
                ref = self._placeless(feature, item["source"]) if refs is None else refs.get(feature.identifier)
                item["ref"] = None if ref is None else announced_fields(ref)
        return items

    def _placeless(self, feature: MultiModalFeatureSpec, source: str) -> EncodingRef | None:
        """A reference that names only the peer: its reader asks for the place. None if the item was never needed."""
        shape = self._outputs.shape(feature)
        if shape is None or (source == Source.NONE and self._is_consumer):
            return None
        return EncodingRef(
            identifier=feature.identifier,
            peer=self._gate.publisher.peer,
            epoch=self._gate.publisher.epoch,
            offset=None,
            generation=0,
            shape=shape,
            dtype=self._outputs.dtype,
            size_bytes=shape[0] * shape[1] * self._outputs.itemsize,
            digest=0,
        )

    def _wanted(self, request: Request, feature: MultiModalFeatureSpec) -> WantedItem:
        """What to ask the agents for. An item with tensors is optional, and any reference beside them is ignored.

        A pure producer has room made for what it encodes: the output is of no use if the slab cannot take it.
        """
        rows = feature.mm_position.get_num_embeds()
        if not self._has_tensors(feature):
            return WantedItem(feature.identifier, rows, ref=ref_from(request.ec_transfer_params, feature.identifier))
        shape = None if self._is_consumer else self._outputs.shape(feature)
        width = 0 if shape is None else shape[1]
        return WantedItem(feature.identifier, rows, optional=True, room_width=width)

    def _has_tensors(self, feature: MultiModalFeatureSpec) -> bool:
        """Whether this engine could encode the item: some field is there that is more than metadata."""
        if feature.data is None:
            return False
        metadata = self._resolver.fields_for(feature.modality)
        return any(
            element.data is not None and key not in metadata and not element.field.keep_on_cpu
            for key, element in feature.data.items()
        )
