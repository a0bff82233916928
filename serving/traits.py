"""What the admission policy must know of a model, in plain values: read where vLLM is, judged where it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelTraits(msgspec.Struct, frozen=True):
    """One model as vLLM describes it.

    Args:
        uses_mrope: Whether position set-up reads feature data; see `ModelConfig.uses_mrope`.
        hf_config: The checkpoint's `config.json`, with defaults filled in.
        metadata_fields: Per modality the model takes, the fields that vLLM declares as metadata.
        limits: Items per prompt, per modality.
        max_model_len: Prompt and answer together, in tokens.
        vocab_size: Token ids are below this.
        normalizes_on_device: Whether pixels reach the vision tower as bytes, to be normalized there.
        prunes_video: Whether video tokens are dropped after encoding, which makes their rows unpredictable.
    """

    uses_mrope: bool
    hf_config: Mapping[str, Any]
    metadata_fields: Mapping[str, frozenset[str]]
    limits: Mapping[str, int]
    max_model_len: int
    vocab_size: int
    normalizes_on_device: bool = False
    prunes_video: bool = False
