"""The families' rules against vLLM's own processors: what they make of real pictures must pass, and no more.

Uses vLLM's processors and the built-in checkpoints; starts no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from models.registry import resolve
from prefill.admission import Admission, FeatureRequirement, check
from prefill.derive import family_of
from serving.errors import InvalidFeature
from serving.protocol import Feature, Placeholder

pytestmark = [
    pytest.mark.engine,
    pytest.mark.admission,
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
    ),  # torch, on import
]

QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>a<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "b<|vision_start|><|video_pad|><|vision_end|>"


@dataclass(frozen=True)
class Rendered:
    requirement: FeatureRequirement
    token_ids: tuple[int, ...]
    features: tuple[Feature, ...]

    def check(self, features: tuple[Feature, ...]) -> Admission:
        return check(self.requirement, self.token_ids, features, {}, cache_salt=None, verify=lambda ref: False)


@pytest.fixture(scope="module", params=["tiny-qwen2-vl", "tiny-qwen3-vl", "tiny-llava"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import ProcessorInputs
    from vllm.multimodal.processing.context import TimingContext

    from serving.engine_input import features_of

    config = ModelConfig(model=str(resolve(f"builtin:{request.param}")), max_model_len=1024)
    processor = MULTIMODAL_REGISTRY.create_processor(config)
    info = processor.info
    fields = {m: frozenset(info.data_parser.placeholder_metadata_fields(m)) for m in info.supported_mm_limits}
    multimodal = config.get_multimodal_config()
    family = family_of(config.hf_config.to_dict(), normalizes_on_device=multimodal.mm_device_do_normalize)
    requirement = FeatureRequirement(
        model=request.param,
        uses_mrope=config.uses_mrope,
        metadata_fields=fields,
        max_model_len=1024,
        vocab_size=config.get_vocab_size(),
        max_rows_per_item=512,
        family=family,
    )
    text, data = media(request.param, info)
    prompt = info.get_tokenizer().encode(text, add_special_tokens=False)
    options = {"do_sample_frames": False} if "video" in data else {}
    inputs = ProcessorInputs(prompt, info.parse_mm_data(data), hf_processor_mm_kwargs=options)
    output: Any = processor.apply(inputs, TimingContext(enabled=False))
    features = features_of(output, lambda modality: fields.get(modality, frozenset()))
    return Rendered(requirement, tuple(output["prompt_token_ids"]), features)


def media(name: str, info: Any) -> tuple[str, dict[str, Any]]:
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 255, (84, 112, 3), dtype=np.uint8))
    data: dict[str, Any] = {"image": [picture, picture.resize((84, 84))]}
    if name == "tiny-llava":
        token = info.get_hf_processor().image_token
        return f"{token}a{token}", data
    frames = random.integers(0, 255, (6, 56, 56, 3), dtype=np.uint8)
    described = {"fps": 2.0, "duration": 3.0, "total_num_frames": 6, "frames_indices": [*range(6)]}
    data["video"] = [(frames, described)] if name == "tiny-qwen3-vl" else [frames]
    return QWEN_TEXT + QWEN_VIDEO, data


def without_mask(feature: Feature) -> Feature:
    place = feature.placeholder
    return msgspec.structs.replace(feature, placeholder=Placeholder(place.offset, place.length))


def test_what_the_processor_makes_is_admitted_with_its_own_rows_and_masks(rendered: Rendered) -> None:
    assert len(rendered.features) == (2 if rendered.requirement.model == "tiny-llava" else 3)
    for features in (rendered.features, tuple(map(without_mask, rendered.features))):
        admission = rendered.check(features)
        assert [item.feature.placeholder for item in admission.items] == [f.placeholder for f in rendered.features]
        assert [item.rows for item in admission.items] == [f.placeholder.num_embeds for f in rendered.features]
        assert all(item.unchecked == () for item in admission.items)


@pytest.mark.parametrize("change", [-1, 1])
def test_one_token_more_or_less_is_refused(rendered: Rendered, change: int) -> None:
    for index, feature in enumerate(rendered.features):
        place = feature.placeholder
        moved = msgspec.structs.replace(feature, placeholder=Placeholder(place.offset, place.length + change))
        features = (*rendered.features[:index], moved, *rendered.features[index + 1 :])
        with pytest.raises(InvalidFeature):
            rendered.check(features)
