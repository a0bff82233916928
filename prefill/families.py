"""What each model family's processor implies for an item: its rows, its tensors, its tokens.

vLLM trusts a caller's placeholder ranges and tensors; a range that does not fit its payload ends in an assertion
inside the engine. The rules below are those of vLLM's own processors, restated so that they can be applied before
an engine sees the request. A family is built from plain numbers of the model's config and holds no state.

Source: vLLM 0.32 `model_executor/models/{qwen2_vl,qwen2_5_vl,qwen3_vl,llava}.py`, `_get_prompt_updates` for the
rows, `_get_mm_fields_config` for the tensors, `get_mrope_input_positions` for what position set-up reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serving.protocol import TensorInfo

__all__ = ["BYTES", "FLOATS", "Family", "FieldError", "Llava", "QwenVL"]

FLOATS = frozenset({"float16", "bfloat16", "float32"})
BYTES = frozenset({"uint8"})
"""Raw pixels, which the engine normalizes on its device (vLLM's `mm_device_do_normalize`, on where a model can)."""
_MAX_GRID = 1 << 20
"""Patches along one axis. Far above any image; keeps products of hostile numbers small."""


_IMAGE_FIELDS = frozenset({"image_grid_thw"})


class FieldError(ValueError):
    """One item contradicts its family's rules. The message names the field, never its contents."""


class Family(Protocol):
    """The checks of one model family. Stateless; every method is pure and cheap.

    `modality` is one that vLLM says the model takes.
    """

    @property
    def name(self) -> str: ...

    def fields(self, modality: str) -> frozenset[str]:
        """Metadata without which the item's positions or rows are unknown."""
        ...

    def embed_token(self, modality: str) -> int | None:
        """The token id that stands for one row, or None when it is not known."""
        ...

    def allows_gaps(self, modality: str) -> bool:
        """Whether a range may hold tokens without embedding (timestamps, separators)."""
        ...

    def implied_rows(self, modality: str, fields: Mapping[str, Any] | None) -> int | None:
        """Rows of encoder output the item has, or None when `fields` (all present, or None) do not tell.

        Raises:
            FieldError: A field has the wrong type or an impossible value.
        """
        ...

    def time_span(self, modality: str, fields: Mapping[str, Any]) -> int:
        """Positions that the item's time axis takes beyond its tokens. `fields` passed `implied_rows`."""
        ...

    def check_tensors(self, modality: str, fields: Mapping[str, Any], info: Mapping[str, TensorInfo]) -> None:
        """Judge the tensors' names, shapes and dtypes against the metadata.

        Raises:
            FieldError: The vision tower could not run on them.
        """
        ...

    def check_tokens(self, modality: str, fields: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        """Judge the tokens of the item's range where position set-up reads them.

        Raises:
            FieldError: Position set-up would fail on them.
        """
        ...


@dataclass(frozen=True, slots=True)
class QwenVL:
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: `t * h * w / merge_size²` rows.

    Args:
        name: The model type, as in the model's config.
        merge_size: Patches merged along each spatial axis into one row.
        patch_dim: Numbers per patch, `channels * temporal_patch_size * patch_size²`.
        image_token_id: Stands for one row of an image.
        video_token_id: Stands for one row of a video.
        video_fields: What position set-up reads of a video.
        tokens_per_second: Positions per second of video (Qwen2.5-VL).
        frame_markers: Token ids that open and close each frame of a video (Qwen3-VL), or None where a video's
            range holds nothing but `video_token_id`.
        pixel_dtypes: Element types the vision tower takes.
        prunes_video: Whether the engine drops video rows (`video_pruning_rate`), so that the grid no longer tells them.
    """

    name: str
    merge_size: int
    patch_dim: int
    image_token_id: int
    video_token_id: int
    video_fields: frozenset[str] = frozenset({"video_grid_thw"})
    tokens_per_second: float = 1.0
    frame_markers: tuple[int, int] | None = None
    pixel_dtypes: frozenset[str] = FLOATS | BYTES
    prunes_video: bool = False

    def fields(self, modality: str) -> frozenset[str]:
        return _IMAGE_FIELDS if modality == "image" else self.video_fields

    def embed_token(self, modality: str) -> int | None:
        """Of a pruned video vLLM marks every token of the range, so none of them stands for a row."""
        if modality == "image":
            return self.image_token_id
        return None if self.prunes_video else self.video_token_id

    def allows_gaps(self, modality: str) -> bool:
        return modality == "video" and self.frame_markers is not None

    def implied_rows(self, modality: str, fields: Mapping[str, Any] | None) -> int | None:
        if fields is None:
            return None
        frames, height, width = self._grid(modality, fields)
        if modality == "video":
            self._check_times(frames, fields)
            if self.prunes_video:
                return None
        return frames * height * width // self.merge_size**2

    def time_span(self, modality: str, fields: Mapping[str, Any]) -> int:
        seconds = fields.get("second_per_grid_ts")
        if modality != "video" or seconds is None:
            return 0
        frames, _, _ = self._grid(modality, fields)
        return math.ceil((frames - 1) * _scalar(seconds) * self.tokens_per_second)

    def check_tensors(self, modality: str, fields: Mapping[str, Any], info: Mapping[str, TensorInfo]) -> None:
        pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
        patches = math.prod(self._grid(modality, fields))
        _check_names(info, {pixels}, {pixels, *self.fields(modality)})
        _check_pixels(pixels, info[pixels], (patches, self.patch_dim), self.pixel_dtypes)

    def check_tokens(self, modality: str, fields: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        """A Qwen3-VL video has `t` frames, each `vision_start`, its rows, `vision_end`, after its timestamp.

        Position set-up searches the prompt for these markers and dies where it finds too few.
        """
        if modality != "video" or self.frame_markers is None or self.prunes_video:
            return
        frames, height, width = self._grid(modality, fields)
        per_frame = height * width // self.merge_size**2
        opening, closing = self.frame_markers
        ids = list(token_ids)
        position = 0
        for _ in range(frames):
            start = ids.index(opening, position) if opening in ids[position:] else len(ids)
            position = start + per_frame + 2
            if ids[start + 1 : position] != [self.video_token_id] * per_frame + [closing]:
                raise FieldError(f"the range does not hold {frames} frames of {per_frame} video tokens")
        if position != len(ids):
            raise FieldError("the range does not end with its last frame")

    def _grid(self, modality: str, fields: Mapping[str, Any]) -> tuple[int, int, int]:
        """Frames, rows and columns of patches."""
        name = f"{modality}_grid_thw"
        grid = fields.get(name)
        if not isinstance(grid, list | tuple) or len(grid) != 3 or not all(_is_axis(axis) for axis in grid):
            raise FieldError(f"{name} must be three positive integers: frames, rows and columns of patches")
        frames, height, width = grid
        if height % self.merge_size or width % self.merge_size:
            raise FieldError(f"{name}: rows and columns must be multiples of {self.merge_size}")
        if modality == "image" and frames != 1:
            raise FieldError(f"{name}: an image has one frame")
        return frames, height, width

    def _check_times(self, frames: int, fields: Mapping[str, Any]) -> None:
        seconds = fields.get("second_per_grid_ts")
        if seconds is not None and not 0 < _scalar(seconds) < _MAX_GRID:
            raise FieldError("second_per_grid_ts must be a number of seconds")
        times = fields.get("timestamps")
        if times is None:
            return
        if not isinstance(times, list | tuple) or len(times) != frames or not all(_is_time(time) for time in times):
            raise FieldError("timestamps must hold one number of seconds for each frame")


@dataclass(frozen=True, slots=True)
class Llava:
    """LLaVA over a fixed-size vision tower: every image has the same rows and the same pixels.

    Args:
        rows: Rows of one image.
        image_token_id: Stands for one row.
        image_size: Pixels along each side.
        channels: Colour channels.
        pixel_dtypes: Element types the vision tower takes.
    """

    rows: int
    image_token_id: int
    image_size: int
    channels: int = 3
    pixel_dtypes: frozenset[str] = FLOATS | BYTES
    name: str = "llava"

    def fields(self, modality: str) -> frozenset[str]:
        return frozenset()

    def embed_token(self, modality: str) -> int | None:
        return self.image_token_id if modality == "image" else None

    def allows_gaps(self, modality: str) -> bool:
        return False

    def implied_rows(self, modality: str, fields: Mapping[str, Any] | None) -> int | None:
        return self.rows if modality == "image" else None

    def time_span(self, modality: str, fields: Mapping[str, Any]) -> int:
        return 0

    def check_tensors(self, modality: str, fields: Mapping[str, Any], info: Mapping[str, TensorInfo]) -> None:
        _check_names(info, {"pixel_values"}, {"pixel_values"})
        shape = (self.channels, self.image_size, self.image_size)
        _check_pixels("pixel_values", info["pixel_values"], shape, self.pixel_dtypes)

    def check_tokens(self, modality: str, fields: Mapping[str, Any], token_ids: Sequence[int]) -> None:
        return None


def _is_axis(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_GRID


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _scalar(value: Any) -> float:
    """A number, or the only number of a list; NaN when it is neither."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    return float(value) if _is_time(value) and value < _MAX_GRID else math.nan


def _check_names(info: Mapping[str, TensorInfo], needed: set[str], known: set[str]) -> None:
    if not needed <= info.keys():
        raise FieldError(f"tensors lack {', '.join(sorted(needed - info.keys()))}")
    if any(name.partition("[")[0] not in known for name in info):
        raise FieldError(f"tensors hold more than {', '.join(sorted(known))}")


def _check_pixels(name: str, tensor: TensorInfo, shape: tuple[int, ...], dtypes: frozenset[str]) -> None:
    if tensor.shape != shape:
        raise FieldError(f"{name} must have shape {shape}")
    if tensor.dtype not in dtypes:
        raise FieldError(f"{name} must be {' or '.join(sorted(dtypes))}")
