"""From one rendered prompt to the pipeline's requests: one for each of its answers."""

from __future__ import annotations

import secrets
import weakref
from typing import Any

import msgspec
from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.sampling_params import RequestOutputKind, SamplingParams

from serving.engine_input import MetadataFields, encode_item, encode_sampling, remembers_answer
from serving.protocol import Feature, Tensors
from serving.stages import PipelineRequest

__all__ = ["RenderedItems", "one_for_each_answer"]


class RenderedItems:
    """The items of a rendered prompt, as long as somebody else keeps them: the renderer's cache, which is bounded.

    Args:
        prompt: As vLLM's renderer made it; its hashes name contents.
        metadata_fields: As `features_of` takes it.
    """

    def __init__(self, prompt: Any, metadata_fields: MetadataFields) -> None:
        self._metadata_fields = metadata_fields
        self._items: dict[str, weakref.ref[MultiModalKwargsItem]] = {
            name: weakref.ref(item)
            for modality, names in prompt.get("mm_hashes", {}).items()
            for name, item in zip(names, prompt["mm_kwargs"][modality], strict=True)
            if item is not None
        }

    def __call__(self, feature: Feature) -> Tensors | None:
        """The tensors of one of the prompt's features, encoded anew; None when they are gone."""
        found = self._items.get(feature.identifier)
        item = None if found is None else found()
        return None if item is None else encode_item(item, self._metadata_fields(feature.modality))


def one_for_each_answer(template: PipelineRequest, params: SamplingParams) -> list[PipelineRequest]:
    """A request for each of the `n` answers, with the seeds that vLLM's own `ParentRequest` sets.

    Ids get a random part: two ingress processes may be given the same one by their clients.
    """
    count, seed = params.n, params.seed
    params.n = 1
    if count > 1 or params.output_kind is RequestOutputKind.CUMULATIVE:
        params.output_kind = RequestOutputKind.DELTA
    unique = secrets.token_hex(4)
    requests = []
    for index in range(count):
        if seed is not None:
            params.seed = seed + index
        prefix = f"{index}_" if count > 1 else ""
        requests.append(
            msgspec.structs.replace(
                template,
                request_id=f"{prefix}{template.request_id}-{unique}",
                sampling=encode_sampling(params),
                can_resume=count == 1 and not remembers_answer(params),
            )
        )
    return requests
