"""A model's family and requirement from what vLLM says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefill.families import BYTES, FLOATS, Family, Llava, QwenVL
from prefill.requirement import FeatureRequirement
from serving.traits import ModelTraits

__all__ = ["family_of", "requirement_of"]


def requirement_of(
    traits: ModelTraits, *, model: str, max_rows_per_item: int, max_rows_per_request: int | None = None
) -> FeatureRequirement:
    """The admission policy of a model.

    Args:
        traits: What vLLM says of it.
        model: Name for messages.
        max_rows_per_item: Rows that the smallest encoder cache of its stages holds.
        max_rows_per_request: Rows that prefill's slab can hold at once; None for no limit.
    """
    return FeatureRequirement(
        model=model,
        uses_mrope=traits.uses_mrope,
        metadata_fields=traits.metadata_fields,
        max_model_len=traits.max_model_len,
        vocab_size=traits.vocab_size,
        max_rows_per_item=max_rows_per_item,
        family=family_of(
            traits.hf_config, normalizes_on_device=traits.normalizes_on_device, prunes_video=traits.prunes_video
        ),
        limits=traits.limits,
        max_rows_per_request=max_rows_per_request,
    )


def family_of(
    config: Mapping[str, Any], *, normalizes_on_device: bool | None = None, prunes_video: bool = False
) -> Family | None:
    """The family of a model, from its `config.json` as a mapping (`hf_config.to_dict()`).

    Args:
        config: The model's configuration.
        normalizes_on_device: vLLM's resolved `multimodal_config.mm_device_do_normalize`: then pixels are bytes,
            and normalized ones would be normalized twice. None when not known, which lets either pass.
        prunes_video: Whether `video_pruning_rate` is set.

    Returns:
        None when no family here fits; admission then says which checks were not possible.

    Raises:
        KeyError: The config names a known model type but lacks one of its numbers.
    """
    dtypes = FLOATS | BYTES if normalizes_on_device is None else BYTES if normalizes_on_device else FLOATS
    match config["model_type"]:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe":
            return _qwen_of(config, dtypes, prunes_video)
        case "llava":
            return _llava_of(config, dtypes)
        case _:
            return None


def _qwen_of(config: Mapping[str, Any], dtypes: frozenset[str], prunes_video: bool) -> QwenVL:
    kind, vision = config["model_type"], config["vision_config"]
    channels = vision["in_chans"] if "in_chans" in vision else vision.get("in_channels", 3)
    beside_grid = {"qwen2_5_vl": {"second_per_grid_ts"}, "qwen3_vl": {"timestamps"}, "qwen3_vl_moe": {"timestamps"}}
    framed = kind.startswith("qwen3")
    return QwenVL(
        name=kind,
        merge_size=vision["spatial_merge_size"],
        patch_dim=channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2,
        image_token_id=config["image_token_id"],
        video_token_id=config["video_token_id"],
        video_fields=frozenset({"video_grid_thw"} | beside_grid.get(kind, set())),
        tokens_per_second=float(vision.get("tokens_per_second", 1.0)),
        frame_markers=(config["vision_start_token_id"], config["vision_end_token_id"]) if framed else None,
        pixel_dtypes=dtypes,
        prunes_video=prunes_video,
    )


def _llava_of(config: Mapping[str, Any], dtypes: frozenset[str]) -> Llava | None:
    """CLIP puts one class row before its patches, SigLIP none; the `default` strategy drops the first row.

    Pixtral towers follow the image's shape and interleave break tokens: no fixed layout, hence no family here.
    """
    vision = config["vision_config"]
    class_rows = {"clip_vision_model": 1, "siglip_vision_model": 0}.get(vision["model_type"])
    dropped_rows = {"default": 1, "full": 0}.get(config["vision_feature_select_strategy"])
    if class_rows is None or dropped_rows is None:
        return None
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    token = config["image_token_index"] if "image_token_index" in config else config["image_token_id"]
    return Llava(
        rows=patches + class_rows - dropped_rows,
        image_token_id=token,
        image_size=vision["image_size"],
        channels=vision.get("num_channels", 3),
        pixel_dtypes=dtypes,
    )
