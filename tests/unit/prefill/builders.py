"""Models, items and references for admission tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from prefill.admission import Admission, FeatureRequirement, check
from prefill.families import FLOATS, Family, Llava, QwenVL
from serving.errors import TriptychError
from serving.protocol import EncodingRef, Feature, Metadata, Placeholder, ResolvedItem, TensorInfo, Tensors
from serving.references import ReferenceSigner

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END, TEXT = 12, 13, 9, 10, 100
PATCH_DIM = 48
ROWS = 12
GRID = {"image_grid_thw": [1, 6, 8]}
WIDTH = 16
SIGNER = ReferenceSigner(b"a secret of 24 bytes....", lifetime_s=86_400.0, peer_networks=["127.0.0.0/8"])
STRANGER = ReferenceSigner(b"another secret, unshared", lifetime_s=86_400.0, peer_networks=["127.0.0.0/8"])

QWEN2 = QwenVL("qwen2_vl", 2, PATCH_DIM, IMAGE_TOKEN, VIDEO_TOKEN)
QWEN25 = QwenVL(
    "qwen2_5_vl",
    2,
    PATCH_DIM,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    video_fields=frozenset({"video_grid_thw", "second_per_grid_ts"}),
    tokens_per_second=2.0,
)
QWEN3 = QwenVL(
    "qwen3_vl",
    2,
    PATCH_DIM,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    video_fields=frozenset({"video_grid_thw", "timestamps"}),
    frame_markers=(VISION_START, VISION_END),
)
LLAVA = Llava(rows=ROWS, image_token_id=IMAGE_TOKEN, image_size=56, pixel_dtypes=FLOATS)


def model(
    family: Family | None, *, mrope: bool, declared: Mapping[str, Sequence[str]], **more: Any
) -> FeatureRequirement:
    defaults: dict[str, Any] = {
        "model": "the model",
        "max_model_len": 512,
        "vocab_size": 256,
        "max_rows_per_item": 64,
    }
    fields = {modality: frozenset(names) for modality, names in declared.items()}
    return FeatureRequirement(uses_mrope=mrope, metadata_fields=fields, family=family, **(defaults | more))


MROPE = model(QWEN2, mrope=True, declared={"image": ["image_grid_thw"], "video": ["video_grid_thw"]})
XDROPE = model(None, mrope=True, declared={"image": []}, embed_tokens={"image": IMAGE_TOKEN})
"""vLLM 0.32 counts XD-RoPE under `uses_mrope`; here a model of which neither fields nor rows are known."""
FIXED = model(LLAVA, mrope=False, declared={"image": []})
OPEN = model(None, mrope=False, declared={"image": []}, embed_tokens={"image": IMAGE_TOKEN})
QWEN25_MODEL = model(QWEN25, mrope=True, declared={"image": ["image_grid_thw"], "video": ["video_grid_thw"]})
QWEN3_MODEL = model(
    QWEN3, mrope=True, declared={"image": ["image_grid_thw"], "video": ["video_grid_thw", "timestamps"]}
)


def metadata_for(requirement: FeatureRequirement) -> dict[str, Any]:
    """What a server derives from this model's 12-row image."""
    return dict(GRID) if requirement.uses_mrope else {}


def tensors_for(requirement: FeatureRequirement, *, seed: bytes = b"pixels") -> Tensors:
    pixels = (3, 56, 56) if requirement.family is LLAVA else (48, PATCH_DIM)
    info = {"pixel_values": TensorInfo(pixels, "bfloat16")}
    if requirement.uses_mrope:
        info["image_grid_thw"] = TensorInfo((3,), "int64")
    return Tensors(frames=(b"header", seed), metadata=metadata_for(requirement), info=info)


def image(
    identifier: str = "a", offset: int = 2, payload: Tensors | Metadata | None = None, length: int = ROWS
) -> Feature:
    return Feature("image", identifier, Placeholder(offset, length), payload)


def reference(
    identifier: str = "a",
    *,
    metadata: Mapping[str, Any] = GRID,
    rows: int = ROWS,
    peer: str = "tcp://127.0.0.1:4000",
    cache_salt: str | None = None,
    signer: ReferenceSigner = SIGNER,
) -> EncodingRef:
    unsigned = EncodingRef(identifier, peer, "epoch", 0, 1, (rows, WIDTH), "bfloat16", rows * WIDTH * 2, 7)
    return signer.sign(unsigned, metadata=dict(metadata), cache_salt=cache_salt)


def held_item(
    identifier: str = "a",
    *,
    metadata: dict[str, Any] | None = None,
    has_tensors: bool = False,
    ref: EncodingRef | None = None,
) -> ResolvedItem:
    return ResolvedItem(identifier, metadata, has_tensors, ref)


def prompt_for(features: Sequence[Feature], length: int = 64, token: int = IMAGE_TOKEN) -> tuple[int, ...]:
    ids = [TEXT] * length
    for feature in features:
        place = feature.placeholder
        ids[place.offset : place.end] = [token] * place.length
    return tuple(ids)


@dataclass
class Request:
    """A request with defaults for everything a test does not care about."""

    features: Sequence[Feature]
    requirement: FeatureRequirement = MROPE
    refs: Mapping[str, EncodingRef | None] = field(default_factory=dict)
    token_ids: Sequence[int] | None = None
    cache_salt: str | None = None
    held: Mapping[str, ResolvedItem] | None = field(default_factory=dict)
    rendered: bool = False
    epochs: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> Admission:
        token_ids = prompt_for(self.features) if self.token_ids is None else self.token_ids
        return check(
            self.requirement,
            token_ids,
            self.features,
            self.refs,
            cache_salt=self.cache_salt,
            verify=lambda ref: SIGNER.verify(ref, cache_salt=self.cache_salt),
            held=self.held,
            rendered=self.rendered,
            epochs=self.epochs,
        )


def refuse(request: Request, kind: type[TriptychError], param: str | None, *hashes: str) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        request.check()
    assert type(caught.value) is kind, caught.value
    assert caught.value.param == param
    assert caught.value.hashes == hashes
    return caught.value


FINE = image("fine", 2, tensors_for(MROPE, seed=b"fine"))
