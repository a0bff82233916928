"""What each family derives from a model's configuration, and what it refuses of an item."""

from __future__ import annotations

from typing import Any

import pytest

from prefill.derive import family_of
from prefill.families import BYTES, FLOATS, FieldError, Llava, QwenVL
from serving.protocol import TensorInfo
from tests.unit.prefill.builders import (
    IMAGE_TOKEN,
    PATCH_DIM,
    QWEN2,
    QWEN3,
    QWEN25,
    TEXT,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
)

QWEN_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def qwen_config(model_type: str, **vision: Any) -> dict[str, Any]:
    numbers = {"patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
    return {"model_type": model_type, "vision_config": numbers | vision, **QWEN_TOKENS}


def llava_config(tower: str, strategy: str) -> dict[str, Any]:
    vision = {"model_type": tower, "image_size": 336, "patch_size": 14}
    return {
        "model_type": "llava",
        "vision_config": vision,
        "vision_feature_select_strategy": strategy,
        "image_token_index": IMAGE_TOKEN,
    }


def test_qwen_families_differ_where_their_processors_do() -> None:
    two = family_of(qwen_config("qwen2_vl"))
    half = family_of(qwen_config("qwen2_5_vl", tokens_per_second=2))
    three = family_of(qwen_config("qwen3_vl", patch_size=16))
    assert isinstance(two, QwenVL)
    assert isinstance(half, QwenVL)
    assert isinstance(three, QwenVL)
    assert (two.patch_dim, three.patch_dim) == (1176, 1536)
    assert [f.frame_markers for f in (two, half, three)] == [None, None, (VISION_START, VISION_END)]
    assert (two.tokens_per_second, half.tokens_per_second) == (1.0, 2.0)
    assert half.fields("video") == {"video_grid_thw", "second_per_grid_ts"}
    assert three.fields("video") == {"video_grid_thw", "timestamps"}
    assert [f.fields("image") for f in (two, half, three)] == [{"image_grid_thw"}] * 3


@pytest.mark.parametrize(
    ("tower", "strategy", "rows"),
    [
        ("clip_vision_model", "default", 576),
        ("clip_vision_model", "full", 577),
        ("siglip_vision_model", "full", 576),
        ("siglip_vision_model", "default", 575),
    ],
)
def test_llava_rows(tower: str, strategy: str, rows: int) -> None:
    family = family_of(llava_config(tower, strategy))
    assert isinstance(family, Llava)
    assert family.implied_rows("image", None) == rows


@pytest.mark.parametrize(
    "config", [{"model_type": "other"}, llava_config("pixtral", "full"), llava_config("clip_vision_model", "class")]
)
def test_unknown_layouts_have_no_family(config: dict[str, Any]) -> None:
    assert family_of(config) is None


def test_known_model_without_its_numbers_stops_start_up() -> None:
    with pytest.raises(KeyError):
        family_of({"model_type": "qwen2_vl", "vision_config": {}, **QWEN_TOKENS})


@pytest.mark.parametrize(("on_device", "dtypes"), [(True, BYTES), (False, FLOATS), (None, FLOATS | BYTES)])
def test_pixels_are_bytes_where_the_engine_normalizes(on_device: bool | None, dtypes: frozenset[str]) -> None:
    """Normalized pixels would be normalized twice: wrong words, no error."""
    family = family_of(qwen_config("qwen2_vl"), normalizes_on_device=on_device)
    assert family is not None
    for dtype in sorted(FLOATS | BYTES):
        info = {"pixel_values": TensorInfo((4, 1176), dtype)}
        if dtype in dtypes:
            family.check_tensors("image", {"image_grid_thw": [1, 2, 2]}, info)
        else:
            with pytest.raises(FieldError):
                family.check_tensors("image", {"image_grid_thw": [1, 2, 2]}, info)


def test_rows_are_patches_over_merged_squares() -> None:
    assert QWEN2.implied_rows("image", {"image_grid_thw": [1, 6, 8]}) == 12
    assert QWEN2.implied_rows("video", {"video_grid_thw": [3, 4, 4]}) == 12
    assert QWEN2.implied_rows("image", None) is None
    three = QwenVL("x", 3, PATCH_DIM, 1, 2)
    assert three.implied_rows("image", {"image_grid_thw": [1, 6, 9]}) == 6


def test_pruned_video_tells_no_rows_and_no_tokens() -> None:
    pruning = family_of(qwen_config("qwen3_vl"), prunes_video=True)
    assert pruning is not None
    fields = {"video_grid_thw": [3, 4, 4], "timestamps": [0.0, 1.0, 2.0]}
    assert pruning.implied_rows("video", fields) is None
    assert pruning.embed_token("video") is None
    assert pruning.implied_rows("image", {"image_grid_thw": [1, 4, 4]}) == 4
    pruning.check_tokens("video", fields, [TEXT])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1", None, [], [1.0, 2.0], True, 1e300])
def test_seconds_per_frame(seconds: Any) -> None:
    fields = {"video_grid_thw": [3, 4, 4], "second_per_grid_ts": seconds}
    if seconds is None:
        assert QWEN25.implied_rows("video", fields) == 12  # left out: admission asks for it by name
        return
    with pytest.raises(FieldError):
        QWEN25.implied_rows("video", fields)


def test_seconds_stretch_positions() -> None:
    fields = {"video_grid_thw": [4, 4, 4], "second_per_grid_ts": [1.5]}
    assert QWEN25.implied_rows("video", fields) == 16
    assert QWEN25.time_span("video", fields) == 9
    assert QWEN2.time_span("video", {"video_grid_thw": [4, 4, 4]}) == 0


@pytest.mark.parametrize("times", [[0.0], [0.0, 1.0, -1.0], [0.0, 1.0, "2"], "012", 3, [0.0, 1.0, float("nan")]])
def test_timestamps(times: Any) -> None:
    with pytest.raises(FieldError):
        QWEN3.implied_rows("video", {"video_grid_thw": [3, 4, 4], "timestamps": times})


FRAME = [TEXT, TEXT, VISION_START, *[VIDEO_TOKEN] * 4, VISION_END]
VIDEO = {"video_grid_thw": [3, 4, 4], "timestamps": [0.2, 1.2, 2.2]}


def test_frames_of_a_video_stand_between_their_markers() -> None:
    QWEN3.check_tokens("video", VIDEO, FRAME * 3)
    QWEN3.check_tokens("image", {"image_grid_thw": [1, 4, 4]}, [IMAGE_TOKEN] * 4)


@pytest.mark.parametrize(
    "token_ids",
    [
        FRAME * 2,
        FRAME * 4,
        [*FRAME * 3, TEXT],
        [*FRAME * 2, *FRAME[:-1]],
        [*FRAME * 2, *FRAME[:-2], VISION_END, VIDEO_TOKEN],
        [*FRAME * 2, *FRAME[:-1], TEXT],
        [VIDEO_TOKEN] * 24,
        [VIDEO_TOKEN] * 12,
        [VISION_START, *[VIDEO_TOKEN] * 12, VISION_END],
        [*FRAME * 2, TEXT, TEXT, *[VIDEO_TOKEN] * 4, VISION_END],
        [],
    ],
    ids=[
        "two",
        "four",
        "tail",
        "unclosed",
        "moved",
        "closed by text",
        "bare",
        "bare rows",
        "one frame",
        "unopened",
        "empty",
    ],
)
def test_a_video_whose_frames_are_not_there_is_refused(token_ids: list[int]) -> None:
    """Position set-up searches for each marker and raises inside the engine when there are too few."""
    with pytest.raises(FieldError):
        QWEN3.check_tokens("video", VIDEO, token_ids)
