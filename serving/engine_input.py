"""vLLM's engine inputs and sampling parameters as wire types, and back.

One place for both directions, used by the front (to the wire) and by the stage servers (from it). An item's
tensors travel as frames of vLLM's own msgpack encoding; its metadata travels as plain lists, so that
admission, digests and receiver caches can read it without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from vllm.config import ModelConfig
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.exceptions import VLLMClientError
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder, MsgpackEncoder

from serving.errors import InvalidFeature, InvalidRequest, MultiModalCacheMiss, Unsupported
from serving.protocol import Feature, Metadata, Placeholder, TensorInfo, Tensors
from serving.traits import ModelTraits

MetadataFields = Callable[[str], Collection[str]]
"""Names of the fields that size a modality's placeholder range: `PlaceholderMetadataResolver.fields_for`."""

MALFORMED = (
    msgspec.MsgspecError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What vLLM's decoder raises on bytes that it did not write; it validates nothing by itself."""

_NOT_HELD = re.compile(r"Cache miss for (\w+) at index (\d+) but data is not provided")
"""How vLLM says that an item came by its uuid alone and is not in its cache of processed media."""


def cache_miss(error: Exception) -> MultiModalCacheMiss | None:
    """vLLM's error over an item that this process does not hold, as one of ours; None for any other error."""
    found = _NOT_HELD.search(str(error))
    if found is None:
        return None
    return MultiModalCacheMiss(
        f"{found[1]} {found[2]} came by its uuid alone and is not held here: send its data. Where several ingress "
        "replicas serve, the x-session-id header keeps a client's requests at one of them",
        param="messages",
    )


def no_declared_fields(modality: str) -> Collection[str]:
    """For models whose metadata is exactly what they keep on the CPU."""
    return ()


def features_of(engine_input: EngineInput, metadata_fields: MetadataFields = no_declared_fields) -> tuple[Feature, ...]:
    """The multimodal items of a rendered prompt, in prompt order. Empty for a text prompt.

    Args:
        engine_input: What vLLM's renderer made of a prompt; of type `token` or `multimodal`.
        metadata_fields: Declared fields per modality; fields kept on the CPU are always metadata too.

    Raises:
        Unsupported: Embedding or encoder-decoder prompts, which no stage here can run.
    """
    kind = engine_input["type"]
    if kind == "token":
        return ()
    if kind != "multimodal" or "encoder_prompt_token_ids" in engine_input:
        raise Unsupported(f"prompts of type {kind!r} are not served by a disaggregated pipeline", param="prompt")
    hashes, items, ranges = engine_input["mm_hashes"], engine_input["mm_kwargs"], engine_input["mm_placeholders"]
    features = [
        Feature(
            modality=modality,
            identifier=hashes[modality][index],
            placeholder=_placeholder_of(where),
            payload=_payload_of(items[modality][index], metadata_fields(modality)),
        )
        for modality, of_modality in ranges.items()
        for index, where in enumerate(of_modality)
    ]
    return tuple(sorted(features, key=lambda feature: feature.placeholder.offset))


def to_engine_input(token_ids: Sequence[int], features: Sequence[Feature], cache_salt: str | None = None) -> Any:
    """The `EngineInput` that an engine runs: the inverse of `features_of`.

    Features without payload become `None` items, features with metadata only become items that hold nothing
    else; whether the engine survives either is for admission to judge beforehand.

    Raises:
        InvalidFeature: A payload does not decode. Permanent.
    """
    if not features:
        return tokens_input(list(token_ids), cache_salt=cache_salt)
    items: dict[str, list[MultiModalKwargsItem | None]] = {}
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[PlaceholderRange]] = {}
    for feature in features:
        items.setdefault(feature.modality, []).append(item_of(feature))
        hashes.setdefault(feature.modality, []).append(feature.identifier)
        ranges.setdefault(feature.modality, []).append(_range_of(feature.placeholder))
    return mm_input(list(token_ids), MultiModalKwargsItems(items), hashes, ranges, cache_salt=cache_salt)


def item_of(feature: Feature) -> MultiModalKwargsItem | None:
    """The item that an engine is given for `feature`.

    Raises:
        InvalidFeature: Its payload does not decode. Permanent.
    """
    match feature.payload:
        case Tensors() as tensors:
            return decode_item(tensors)
        case Metadata(fields=fields):
            return metadata_item(fields)
        case _:
            return None


def encode_item(item: MultiModalKwargsItem, declared: Collection[str] = ()) -> Tensors:
    """One item's tensors as frames, with its metadata and every tensor's shape and dtype beside them."""
    frames = MsgpackEncoder().encode(item)
    return Tensors(
        frames=tuple(bytes(frame) for frame in frames),
        metadata=metadata_fields_of(item, declared),
        info={name: info for key, elem in item.items() for name, info in _infos(key, elem.data)},
    )


def decode_item(tensors: Tensors) -> MultiModalKwargsItem:
    """The item that `encode_item` was given. Tensors own their memory: one copy of the frames.

    Raises:
        InvalidFeature: The frames are not such an encoding. Permanent.
    """
    decoder = _DataOnlyDecoder(MultiModalKwargsItem)
    try:
        item = decoder.decode([bytearray(frame) for frame in tensors.frames])
    except MALFORMED as error:
        raise InvalidFeature(f"feature tensors do not decode: {type(error).__name__}") from error
    if not isinstance(item, MultiModalKwargsItem):
        raise InvalidFeature("feature tensors do not decode: not an item")
    return item


def metadata_fields_of(item: MultiModalKwargsItem, declared: Collection[str] = ()) -> dict[str, Any]:
    """What position set-up needs of `item`, as plain lists that keep the tensors' shapes (a scalar stays one).

    Raises:
        InvalidFeature: A field holds other than real numbers. Permanent.
    """
    return {
        key: _plain(elem.data)
        for key, elem in item.items()
        if elem.data is not None and (elem.field.keep_on_cpu or key in declared)
    }


def metadata_item(fields: Mapping[str, Any]) -> MultiModalKwargsItem:
    """An item that holds metadata and nothing to encode.

    Numbers become int64, float64 or bool tensors: wide enough for every value that a processor wrote, so that
    lists read back from the item are the ones it was made from. The field type only matters to batching for the
    vision tower, which an item without pixels never reaches.

    Raises:
        InvalidFeature: A field is not a number or a rectangular list of numbers. Permanent.
    """
    return MultiModalKwargsItem(
        {
            key: MultiModalFieldElem(data=_tensor(key, value), field=MultiModalBatchedField(keep_on_cpu=True))
            for key, value in fields.items()
        }
    )


def encode_sampling(params: SamplingParams) -> bytes:
    """`params` as bytes; what vLLM sends to its own engine processes.

    Raises:
        InvalidRequest: They hold something that is not plain data (`extra_args` of a direct caller). Permanent.
    """
    try:
        return msgspec.msgpack.encode(params)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"sampling parameters: {error}", param="sampling_params") from error


def decode_sampling(data: bytes) -> SamplingParams:
    """The parameters that `encode_sampling` was given, validated by vLLM's own constructor.

    Raises:
        InvalidRequest: Not such bytes, or values that vLLM refuses. Permanent.
    """
    try:
        return msgspec.msgpack.decode(data, type=SamplingParams)
    except (msgspec.MsgspecError, VLLMClientError, TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling parameters: {error}", param="sampling_params") from error


def remembers_answer(sampling: SamplingParams) -> bool:
    """Whether a step's sampling depends on more than the tokens before it, or its output on the steps before it.

    Such an answer cannot be continued by an engine that takes its beginning for a part of the prompt.
    """
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or sampling.logprob_token_ids
        or sampling.prompt_logprob_token_ids is not None
        or sampling.structured_outputs is not None
        or sampling.bad_words
        or sampling.thinking_token_budget is not None
        or sampling.repetition_detection is not None
        or sampling.trace_decode_token_ids
    )


def traits_of(model_config: ModelConfig) -> ModelTraits:
    """What admission must know of a model. Creates its processor once: takes up to seconds."""
    resolver = PlaceholderMetadataResolver(model_config)
    limits = MULTIMODAL_REGISTRY.create_processor(model_config).info.allowed_mm_limits
    return ModelTraits(
        uses_mrope=model_config.uses_mrope,
        hf_config=model_config.hf_config.to_dict(),
        metadata_fields={modality: frozenset(resolver.fields_for(modality)) for modality in limits},
        limits=dict(limits),
        max_model_len=model_config.max_model_len,
        vocab_size=model_config.get_vocab_size(),
        normalizes_on_device=bool(model_config.multimodal_config.mm_device_do_normalize),
        prunes_video=bool(model_config.multimodal_config.video_pruning_rate),
    )


class _DataOnlyDecoder(MsgpackDecoder):  # type: ignore[misc]
    """vLLM's decoder without its pickle extensions, whatever VLLM_ALLOW_INSECURE_SERIALIZATION says."""

    def ext_hook(self, code: int, data: memoryview) -> Any:
        if code != CUSTOM_TYPE_RAW_VIEW:
            raise NotImplementedError("only raw tensor data is accepted")
        return data


def _payload_of(item: MultiModalKwargsItem | None, declared: Collection[str]) -> Tensors | Metadata | None:
    """Tensors when the item holds more than metadata. An item of metadata only came from a token-in client."""
    if not item:
        return None
    if all(elem.field.keep_on_cpu or key in declared for key, elem in item.items()):
        return Metadata(metadata_fields_of(item, declared))
    return encode_item(item, declared)


def _placeholder_of(where: PlaceholderRange) -> Placeholder:
    mask = None if where.is_embed is None else tuple(where.is_embed.tolist())
    return Placeholder(where.offset, where.length, mask)


def _range_of(placeholder: Placeholder) -> PlaceholderRange:
    mask = None if placeholder.is_embed is None else torch.tensor(placeholder.is_embed, dtype=torch.bool)
    return PlaceholderRange(offset=placeholder.offset, length=placeholder.length, is_embed=mask)


def _infos(name: str, data: Any) -> Iterator[tuple[str, TensorInfo]]:
    """Name and description of every tensor in `data`; those of a list are called `name[0]`, `name[1]` ..."""
    if isinstance(data, torch.Tensor):
        yield name, TensorInfo(tuple(data.shape), str(data.dtype).removeprefix("torch."))
    elif isinstance(data, list | tuple):
        for index, inner in enumerate(data):
            yield from _infos(f"{name}[{index}]", inner)


def _plain(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        if data.is_complex():
            raise InvalidFeature("metadata must be real numbers", param="features.kwargs_data")
        return data.tolist()
    if isinstance(data, list | tuple):
        return [_plain(inner) for inner in data]
    return data


def _tensor(key: str, value: Any) -> torch.Tensor:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidFeature("metadata must be rectangular lists of numbers", param=key) from error
    if array.dtype not in (np.int64, np.float64, np.bool_):
        raise InvalidFeature("metadata must be numbers or rectangular lists of numbers", param=key)
    return torch.tensor(array)
