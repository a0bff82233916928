"""Arbitrary well-typed requests: refused by a named error, or admitted with a layout that an engine survives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from prefill.admission import Admission, Decision, FeatureRequirement
from prefill.requirement import Need
from serving.errors import InvalidRequest
from serving.protocol import (
    EncodingRef,
    Feature,
    Metadata,
    Placeholder,
    PrefillRequest,
    ResolvedItem,
    TensorInfo,
    Tensors,
    decode,
    encode,
)
from tests.unit.prefill.builders import (
    FIXED,
    GRID,
    IMAGE_TOKEN,
    MROPE,
    OPEN,
    PATCH_DIM,
    QWEN3_MODEL,
    QWEN25_MODEL,
    ROWS,
    TEXT,
    VIDEO_TOKEN,
    VISION_END,
    VISION_START,
    XDROPE,
    Request,
    reference,
)

pytestmark = pytest.mark.admission

MODELS = [MROPE, XDROPE, FIXED, OPEN, QWEN25_MODEL, QWEN3_MODEL]
JUNK: list[Any] = [None, True, 0, -1, 1, 7, 2**31, 2**53, 10**40, 0.5, float("nan"), float("inf"), "x", b"x", {}, []]
JUNK += [[junk] for junk in JUNK[:13]] + [[1, 6, 8, 1], [1, 6], [[1, 6, 8]], {"a": 1}, [1, None, 8], [True, 6, 8]]
NUMBERS = [0, 1, -1, 3, 4, ROWS, ROWS + 1, 63, 64, 65, 511, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40]
NAMES = ["a", "b", "c", "d", "e"]
GRIDS = [[1, 6, 8], [1, 8, 6], [3, 4, 4], [1, 4, 4]]


@st.composite
def one_of_or(draw: st.DrawFn, good: Any, others: list[Any], odds: int = 24) -> Any:
    """`good`, and once in `odds` one of the others."""
    return draw(st.sampled_from(others)) if draw(st.integers(0, odds - 1)) == 0 else good


@st.composite
def metadata_fields(draw: st.DrawFn, modality: str) -> dict[str, Any]:
    grid = draw(one_of_or([3, 4, 4] if modality == "video" else [1, 6, 8], GRIDS))
    fields: dict[str, Any] = {f"{modality}_grid_thw": draw(one_of_or(grid, JUNK))}
    if modality == "video":
        extra = draw(st.sampled_from([{}, {"second_per_grid_ts": 0.5}, {"timestamps": [0.5] * grid[0]}]))
        fields |= {name: draw(one_of_or(value, [*JUNK, 1e300])) for name, value in extra.items()}
    if draw(st.integers(0, 9)) == 0:
        fields[draw(st.sampled_from(["x", "image_grid_thw"]))] = draw(st.sampled_from(JUNK))
    return draw(one_of_or(fields, [{}]))


@st.composite
def payloads(draw: st.DrawFn, modality: str) -> Tensors | Metadata | None:
    kind = draw(st.sampled_from(["tensors", "tensors", "metadata", "metadata", "none"]))
    if kind == "none":
        return None
    fields = draw(metadata_fields(modality))
    if kind == "metadata":
        return Metadata(fields)
    shape = draw(one_of_or((48, PATCH_DIM), [(3, 56, 56), (16, PATCH_DIM), (0,), (-1, 10**40)]))
    name = draw(one_of_or("pixel_values" if modality == "image" else "pixel_values_videos", ["x", "image_embeds"]))
    dtype = draw(one_of_or("bfloat16", ["uint8", "int64", ""]))
    return Tensors((draw(st.sampled_from([b"1", b"1", b"2"])),), fields, {name: TensorInfo(shape, dtype)})


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[Feature], tuple[int, ...]]:
    """Features one after the other over a prompt that suits them, except where something was put wrong."""
    features: list[Feature] = []
    ids: list[int] = []
    for _ in range(draw(st.integers(0, 3))):
        modality = draw(st.sampled_from(["image", "image", "image", "image", "image", "video"]))
        frames, per_frame = draw(one_of_or((3, 4), [(1, ROWS), (2, 6)]))
        run = [IMAGE_TOKEN] * ROWS
        if modality == "video":
            framed = [TEXT, VISION_START, *[VIDEO_TOKEN] * per_frame, VISION_END] * frames
            run = draw(st.sampled_from([framed, [VIDEO_TOKEN] * ROWS]))
        ids += [TEXT] * draw(st.integers(0, 2))
        place = Placeholder(
            draw(one_of_or(len(ids), [len(ids) + 1, len(ids) - 1, *NUMBERS], 16)),
            draw(one_of_or(len(run), [len(run) + 1, len(run) - 1, *NUMBERS], 16)),
            draw(one_of_or(None, [(), (True,) * len(run), (True, False), (False,) * len(run)])),
        )
        ids += run
        named = draw(one_of_or(modality, ["audio", ""], 24)), draw(one_of_or(draw(st.sampled_from(NAMES)), [""], 24))
        features.append(Feature(*named, place, draw(payloads(modality))))
    ids += [draw(one_of_or(TEXT, [-1, 256, 2**70, IMAGE_TOKEN], 32))] * draw(st.integers(0, 3))
    if ids and draw(st.integers(0, 15)) == 0:
        ids[draw(st.integers(0, len(ids) - 1))] = draw(st.sampled_from([TEXT, IMAGE_TOKEN, VISION_END, 0, -1]))
    return draw(st.permutations(features)), tuple(ids)


@st.composite
def references(draw: st.DrawFn, identifier: str, metadata: Any) -> EncodingRef:
    fields = draw(one_of_or(metadata if isinstance(metadata, dict) else GRID, [GRID, {}]))
    try:
        good = reference(draw(one_of_or(identifier, NAMES)), metadata=fields)
    except (TypeError, ValueError, OverflowError):  # no server signs metadata that JSON cannot hold
        good = reference(identifier)
    rows = draw(one_of_or(ROWS, NUMBERS))
    if rows != ROWS and 0 <= rows < 2**63:
        good = reference(identifier, rows=rows)
    return draw(
        one_of_or(good, [msgspec.structs.replace(good, mac=""), msgspec.structs.replace(good, shape=(10**40, 1))])
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    features, token_ids = draw(laid_out())
    refs: dict[str, EncodingRef | None] = {}
    held: dict[str, ResolvedItem] = {}
    for feature in features:
        name, fields = feature.identifier, feature.payload.fields if isinstance(feature.payload, Metadata) else GRID
        if draw(st.booleans()):
            refs[name] = draw(one_of_or(draw(references(name, fields)), [None]))
        if draw(st.booleans()):
            kept = draw(one_of_or(fields, [None, {}, GRID]))
            ref = draw(references(name, fields)) if draw(st.booleans()) else None
            held[name] = ResolvedItem(name, kept, draw(st.booleans()), ref)
    if draw(st.integers(0, 15)) == 0:
        refs["stray"] = None
    return Request(
        features,
        draw(st.sampled_from(MODELS)),
        refs,
        token_ids,
        held=draw(one_of_or(held, [None], 4)),
        rendered=draw(st.booleans()),
    )


@given(requests())
@settings(max_examples=300, deadline=None)
def test_whatever_comes_is_refused_by_name_or_safe(request: Request) -> None:
    try:
        admission = request.check()
    except InvalidRequest as refusal:
        event(refusal.code)
        if refusal.param is None:
            pytest.fail("a refusal must name what it refuses")
        return
    event(", ".join(sorted({item.decision for item in admission.items})) or "text")
    assert_safe(request, admission)
    assert decode(PrefillRequest, prefill_request(request, admission)) is not None


def assert_safe(request: Request, admission: Admission) -> None:
    """What an engine takes for granted."""
    requirement, token_ids = request.requirement, request.token_ids or ()
    assert 0 < len(token_ids) < requirement.max_model_len
    assert len(admission.items) == len(request.features)
    covered: set[int] = set()
    for item, sent in zip(admission.items, request.features, strict=True):
        place = item.feature.placeholder
        assert (item.feature.identifier, item.feature.modality) == (sent.identifier, sent.modality)
        assert (place.offset, place.length) == (sent.placeholder.offset, sent.placeholder.length)
        tokens = set(range(place.offset, place.end))
        assert tokens
        assert not tokens & covered
        assert place.offset >= 0
        assert place.end <= len(token_ids)
        covered |= tokens
        assert 0 < item.rows == place.num_embeds <= requirement.max_rows_per_item
        assert place.is_embed is None or len(place.is_embed) == place.length
        assert_data(requirement, item.feature, item.decision)
        if item.ref is not None:
            assert item.ref.mac
            assert (item.ref.identifier, item.ref.shape[0]) == (sent.identifier, item.rows)


def assert_data(requirement: FeatureRequirement, feature: Feature, decision: Decision) -> None:
    if decision in (Decision.UNRESOLVED, Decision.HELD) or requirement.need(feature.modality) is Need.NOTHING:
        return  # waiting, kept by a prefill that admitted it, or not read
    assert feature.payload is not None  # position set-up reads it
    fields = feature.payload.fields if isinstance(feature.payload, Metadata) else {}
    if requirement.family is not None and isinstance(feature.payload, Metadata):
        grid = fields[f"{feature.modality}_grid_thw"]
        assert grid[0] * grid[1] * grid[2] // 4 == feature.placeholder.num_embeds


def prefill_request(request: Request, admission: Admission) -> bytes:
    """Admitted requests fit the wire."""
    return encode(
        PrefillRequest(
            "id", tuple(request.token_ids or ()), admission.features, admission.refs, b"", request.cache_salt
        )
    )
