"""The built-in models' configurations, and every file of a checkpoint but its tokenizer and weights.

Sizes are chosen for tests: about a million parameters each (2 to 3 MB in bfloat16), 4-layer language models
with the head size 32 that vLLM's CPU attention supports, and room for 8,192 positions.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from models import tokenizers
from models.lessons import LLAVA_TOKENS, Family

_HIDDEN: Final = 128
_MAX_POSITIONS: Final = 8192
_WEIGHT_SCALE: Final = 0.05  # the usual 0.02 suits widths in the thousands
_LANGUAGE_MODEL: Final[Mapping[str, Any]] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": _MAX_POSITIONS,
    "tie_word_embeddings": False,
    "initializer_range": _WEIGHT_SCALE,
}
_PIXEL_STATISTICS: Final[Mapping[str, Any]] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "rescale_factor": 1 / 255,
    "resample": 3,
}
_PATCH: Final = 14
_LLAVA_SIDE: Final = _PATCH * math.isqrt(LLAVA_TOKENS)


@dataclass(frozen=True)
class Architecture:
    """How to make one built-in model and the processor files beside it."""

    family: Family
    build: Callable[[PreTrainedTokenizerFast], PreTrainedModel]
    processor_files: Callable[[], dict[str, dict[str, Any]]]
    rename_weight: Callable[[str], str] = str
    """From transformers' name of a weight to the name in the file vLLM reads."""


def save(model: PreTrainedModel, architecture: Architecture, out: Path) -> None:
    """Write config and bfloat16 weights to `out`. The model keeps its dtype; its weights stay rounded."""
    dtype = model.dtype
    model.to(torch.bfloat16).save_pretrained(out)
    model.to(dtype)
    weights_file = out / "model.safetensors"
    weights = {architecture.rename_weight(name): tensor for name, tensor in load_file(weights_file).items()}
    save_file(weights, weights_file, metadata={"format": "pt"})
    for name, content in architecture.processor_files().items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def _special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {name: int(tokenizer.convert_tokens_to_ids(token)) for name, token in names.items()}


def _language_model(tokenizer: PreTrainedTokenizerFast, **extra: Any) -> dict[str, Any]:
    return {
        **_LANGUAGE_MODEL,
        "vocab_size": tokenizers.padded_size(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **extra,
    }


def _build_qwen2_vl(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Qwen2-VL with a small rotary base.

    The width takes the slowest of the 16 frequencies. At the usual base the columns of a picture lie a
    thousandth of a radian apart, too little for heads of 32: this one keeps them above a tenth.
    """
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 7, 7], "rope_theta": 20.0}
    config = Qwen2VLConfig(
        text_config=_language_model(tokenizer, rope_parameters=rope),
        vision_config={
            "depth": 2,
            "embed_dim": 96,
            "hidden_size": _HIDDEN,
            "num_heads": 3,
            "mlp_ratio": 2,
            "patch_size": _PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "initializer_range": _WEIGHT_SCALE,
        },
        vision_token_id=tokenizer.convert_tokens_to_ids("<|vision_pad|>"),
        tie_word_embeddings=False,
        **_special_ids(tokenizer),
    )
    return Qwen2VLForConditionalGeneration(config)


def _build_qwen3_vl(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Qwen3-VL with learned vision positions held at zero.

    They would tell each patch its place in the picture, and the language model could then answer without
    M-RoPE: a wrong grid would no longer show in the words.
    """
    rope = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 100.0}
    config = Qwen3VLConfig(
        text_config=_language_model(tokenizer, rope_parameters=rope),
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "num_heads": 3,
            "intermediate_size": 192,
            "out_hidden_size": _HIDDEN,
            "patch_size": _PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "initializer_range": _WEIGHT_SCALE,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        tie_word_embeddings=False,
        **_special_ids(tokenizer),
    )
    model = Qwen3VLForConditionalGeneration(config)
    positions = model.model.visual.pos_embed.weight
    torch.nn.init.zeros_(positions)
    positions.requires_grad_(False)
    return model


def _build_llava(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = LlavaConfig(
        text_config=_language_model(tokenizer, model_type="llama"),
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "image_size": _LLAVA_SIDE,
            "patch_size": _PATCH,
            "projection_dim": 96,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=LLAVA_TOKENS,
        tie_word_embeddings=False,
    )
    return LlavaForConditionalGeneration(config)


def _qwen_processor_files(generation: int, max_tokens: int = 64) -> dict[str, dict[str, Any]]:
    """Image and video processor files; a picture becomes 1 to `max_tokens` placeholder tokens."""
    factor = 2 * _PATCH
    common = {
        **_PIXEL_STATISTICS,
        "merge_size": 2,
        "patch_size": _PATCH,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": factor**2, "longest_edge": max_tokens * factor**2},
        "processor_class": f"Qwen{generation}VLProcessor",
    }
    # vLLM hands Qwen2-VL the frames it sampled itself, without the metadata that sampling needs
    video = {"fps": 2, "min_frames": 4, "max_frames": 16, "do_sample_frames": generation == 3}
    return {
        "preprocessor_config.json": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": {
            **common,
            **video,
            "video_processor_type": f"Qwen{generation}VLVideoProcessor",
        },
    }


def _llava_processor_files() -> dict[str, dict[str, Any]]:
    return {
        "preprocessor_config.json": {
            **_PIXEL_STATISTICS,
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": _LLAVA_SIDE, "width": _LLAVA_SIDE},
            "do_center_crop": True,
            "size": {"shortest_edge": _LLAVA_SIDE},
            "processor_class": "LlavaProcessor",
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": _PATCH,
            "vision_feature_select_strategy": "default",
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
        },
    }


def _rename_llava(name: str) -> str:
    """vLLM expects the tower one level deeper than transformers 5 saves it, and skips what it does not know."""
    nested = "vision_tower.vision_model."
    if "vision_tower." in name and nested not in name:
        return name.replace("vision_tower.", nested)
    return name


ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "tiny-qwen2-vl": Architecture(
        family="qwen",
        build=_build_qwen2_vl,
        processor_files=lambda: _qwen_processor_files(generation=2),
    ),
    "tiny-qwen3-vl": Architecture(
        family="qwen",
        build=_build_qwen3_vl,
        processor_files=lambda: _qwen_processor_files(generation=3),
    ),
    "tiny-llava": Architecture(
        family="llava",
        build=_build_llava,
        processor_files=_llava_processor_files,
        rename_weight=_rename_llava,
    ),
}
