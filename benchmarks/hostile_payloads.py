"""What can be wrong inside an item's payload, as vLLM encodes it: fields, shapes, element types, grids, values."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item
from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem

Change = Callable[[random.Random, MultiModalKwargsItem], None]

_GRID = "image_grid_thw"
_PIXELS = "pixel_values"
_TYPES = (torch.float32, torch.float64, torch.int64, torch.int8, torch.bool, torch.bfloat16, torch.complex64)


def _payload(change: Change) -> Callable[[random.Random, str], str]:
    def encoded(rng: random.Random, data: str) -> str:
        item = decode_mm_kwargs_item(data)
        change(rng, item)
        told: str = encode_mm_kwargs_item(item)
        return told

    return encoded


def _tensor(item: MultiModalKwargsItem, name: str) -> torch.Tensor:
    data = item[name].data
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{name} is no tensor in the valid request")
    return data


def _replace(item: MultiModalKwargsItem, name: str, data: torch.Tensor | None) -> None:
    item[name] = MultiModalFieldElem(data=data, field=item[name].field)


def _transposed(rng: random.Random, item: MultiModalKwargsItem) -> None:
    """The same number of rows in other places: what only the tensors' or a reference's own record tells."""
    t, h, w = _tensor(item, _GRID).tolist()
    other = [t, w, h] if h != w else [t, h * 2, w // 2]
    _replace(item, _GRID, torch.tensor(other))


def _wrong_grid(rng: random.Random, item: MultiModalKwargsItem) -> None:
    grid = _tensor(item, _GRID)
    others = [grid + 1, grid * 2, -grid, grid * 0, grid * 2**40, grid[:2], grid.reshape(1, 1, 3), grid.float() / 3]
    _replace(item, _GRID, rng.choice(others))


def _wrong_type(rng: random.Random, item: MultiModalKwargsItem) -> None:
    name = rng.choice(sorted(item))
    tensor = _tensor(item, name)
    allowed = [dtype for dtype in _TYPES if dtype != tensor.dtype]
    _replace(item, name, tensor.to(rng.choice(allowed if name == _PIXELS else [torch.float32, torch.complex64])))


def _wrong_shape(rng: random.Random, item: MultiModalKwargsItem) -> None:
    pixels = _tensor(item, _PIXELS)
    others = [pixels[:-1], pixels[:, :-1], pixels[0], pixels[None], pixels[:0], pixels.T, torch.cat([pixels, pixels])]
    _replace(item, _PIXELS, rng.choice(others).contiguous())


def _nan(rng: random.Random, item: MultiModalKwargsItem) -> None:
    pixels = _tensor(item, _PIXELS)
    _replace(item, _PIXELS, torch.full(pixels.shape, rng.choice([float("nan"), float("inf"), -1e38])))


def _missing(rng: random.Random, item: MultiModalKwargsItem) -> None:
    name = rng.choice(sorted(item))
    if rng.random() < 0.5:
        del item[name]
    else:
        _replace(item, name, None)


def _stray(rng: random.Random, item: MultiModalKwargsItem) -> None:
    elem = item[rng.choice(sorted(item))]
    name = rng.choice(["image_embeds", "video_grid_thw", "second_per_grid_ts", "self", "", "__class__", "deepstack"])
    item[name] = MultiModalFieldElem(data=elem.data, field=elem.field)


PAYLOADS: Mapping[str, Callable[[random.Random, str], str]] = {
    "grid transposed": _payload(_transposed),
    "grid wrong": _payload(_wrong_grid),
    "element type": _payload(_wrong_type),
    "shape": _payload(_wrong_shape),
    "not a number": _payload(_nan),
    "field missing": _payload(_missing),
    "field unknown": _payload(_stray),
}
"""Each makes of a valid payload's base64 one that must be refused."""
