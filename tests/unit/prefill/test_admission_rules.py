"""The rules under the table about fields, tensors, duplicates and budgets. Each names its item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prefill.admission import Decision
from serving.errors import (
    FeatureDataRequired,
    InvalidFeature,
    InvalidRequest,
    ItemTooLarge,
    Unsupported,
)
from serving.protocol import Feature, Metadata, Placeholder, TensorInfo, Tensors
from tests.unit.prefill.builders import (
    FINE,
    FIXED,
    GRID,
    MROPE,
    OPEN,
    PATCH_DIM,
    QWEN25_MODEL,
    ROWS,
    VIDEO_TOKEN,
    Request,
    held_item,
    image,
    model,
    prompt_for,
    reference,
    refuse,
    tensors_for,
)

pytestmark = pytest.mark.admission


def with_tensors(metadata: dict[str, Any] | None = None, **info: TensorInfo | None) -> Tensors:
    """MROPE's tensors with some parts replaced; None takes one out."""
    good = tensors_for(MROPE)
    merged = {name: tensor for name, tensor in (good.info | info).items() if tensor is not None}
    return Tensors(good.frames, good.metadata if metadata is None else metadata, merged)


# Metadata.


@pytest.mark.parametrize(
    "grid",
    [
        None,
        [],
        [1, 6],
        [1, 6, 8, 1],
        [[1, 6, 8]],
        "168",
        ["1", "6", "8"],
        [1.0, 6.0, 8.0],
        [True, 6, 8],
        [1, 0, 8],
        [1, -6, -8],
        [-1, -6, 8],
        [1, 3, 16],
        [4, 3, 4],
        [2, 6, 4],
        [1, 6, 10],
        [1, 2**62, 8],
        [1, 10**30, 8],
        [1, float("nan"), 8],
        {"t": 1},
        b"168",
    ],
    ids=str,
)
def test_grid(grid: Any) -> None:
    fields = {"image_grid_thw": grid}
    tensors = with_tensors(fields)
    refuse(Request([FINE, image("bad", 30, tensors)]), InvalidFeature, "features.image[1]", "bad")
    refuse(Request([FINE, image("bad", 30, Metadata(fields))]), InvalidFeature, "features.image[1]", "bad")


def test_missing_field_is_missing_feature_data() -> None:
    partial = Metadata({"second_per_grid_ts": 1.0})
    video = Feature("video", "v", Placeholder(2, ROWS), partial)
    ids = prompt_for([video], token=VIDEO_TOKEN)
    refuse(Request([video], QWEN25_MODEL, token_ids=ids), FeatureDataRequired, "features.video[0]", "v")
    bare = Tensors((b"x",), {}, {"pixel_values": TensorInfo((48, PATCH_DIM), "bfloat16")})
    refuse(Request([image(payload=bare)]), FeatureDataRequired, "features.image[0]", "a")


def test_field_that_vllm_does_not_declare_but_positions_need_is_required() -> None:
    """Without it vLLM takes one second per frame, and a Qwen2.5-VL video is silently misplaced."""
    video = Feature("video", "v", Placeholder(2, ROWS), Metadata({"video_grid_thw": [1, 6, 8]}))
    ids = prompt_for([video], token=VIDEO_TOKEN)
    refuse(Request([video], QWEN25_MODEL, token_ids=ids), FeatureDataRequired, "features.video[0]", "v")


def test_unknown_field_is_refused() -> None:
    fields = {**GRID, "second_per_grid_ts": 1.0}
    refs = {"a": reference("a", metadata=fields)}
    refuse(Request([image(payload=Metadata(fields))], MROPE, refs), InvalidFeature, "features.image[0]", "a")
    refuse(Request([image(payload=Metadata({"x": 1}))], FIXED), InvalidFeature, "features.image[0]", "a")


@pytest.mark.parametrize(
    "value",
    ["text", None, {"a": 1}, [[[[[1]]]]], [1] * 70_000, [float("inf")], 2**60, [["1"]]],
    ids=lambda v: str(v)[:20],
)
def test_fields_without_a_family_are_still_numbers(value: Any) -> None:
    request = Request([image(payload=Metadata({"anything": value}))], OPEN)
    refuse(request, InvalidFeature, "features.image[0]", "a")


def test_numbers_that_cannot_travel_are_refused_beside_tensors_too() -> None:
    """Of tensors' own metadata only the declared fields must be numbers, but every integer must fit the wire."""
    for value in (2**64, [[-(2**63) - 1]]):
        tensors = Tensors((b"x",), {"undeclared": value}, {})
        refuse(Request([image(payload=tensors)], OPEN), InvalidFeature, "features.image[0]", "a")


# Tensors.


@pytest.mark.parametrize(
    "tensors",
    [
        with_tensors(pixel_values=TensorInfo((47, PATCH_DIM), "bfloat16")),
        with_tensors(pixel_values=TensorInfo((48, PATCH_DIM + 1), "bfloat16")),
        with_tensors(pixel_values=TensorInfo((48 * PATCH_DIM,), "bfloat16")),
        with_tensors(pixel_values=TensorInfo((48, PATCH_DIM), "int64")),
        with_tensors(pixel_values=TensorInfo((48, PATCH_DIM), "complex64")),
        with_tensors(pixel_values=None),
        with_tensors(other=TensorInfo((1,), "bfloat16")),
    ],
    ids=["patches", "patch", "flat", "integers", "complex", "no pixels", "more tensors"],
)
def test_tensors(tensors: Tensors) -> None:
    refuse(Request([FINE, image("bad", 30, tensors)]), InvalidFeature, "features.image[1]", "bad")


def test_fixed_layout_pixels() -> None:
    tensors = Tensors((b"x",), {}, {"pixel_values": TensorInfo((3, 56, 70), "bfloat16")})
    refuse(Request([image(payload=tensors)], FIXED), InvalidFeature, "features.image[0]", "a")


def test_precomputed_embeddings_are_not_taken() -> None:
    tensors = with_tensors(pixel_values=None, image_embeds=TensorInfo((ROWS, 16), "bfloat16"))
    for requirement in (MROPE, OPEN):
        refuse(Request([image(payload=tensors)], requirement), Unsupported, "features.image[0]", "a")


def test_what_could_not_be_checked_is_said_and_can_be_refused() -> None:
    request = Request([image(payload=tensors_for(OPEN)), image("r", 30)], OPEN, {"r": reference("r")})
    assert [item.unchecked for item in request.check().items] == [("rows", "tensors"), ()]
    assert Request([FINE], MROPE).check().items[0].unchecked == ()
    strict = replace(request, requirement=replace(OPEN, refuse_unchecked=True))
    refuse(strict, Unsupported, "features.image[0]", "a")
    assert replace(strict, rendered=True).check().items


# Duplicates and identity.


def test_one_identifier_twice_shares_what_was_sent_once() -> None:
    tensors = tensors_for(MROPE)
    items = Request([image("a", 2), image("a", 20, tensors)]).check().items
    assert [(item.decision, item.feature.payload) for item in items] == [(Decision.TENSORS, tensors)] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (tensors_for(MROPE), tensors_for(MROPE, seed=b"other")),
        (tensors_for(MROPE), Metadata({"image_grid_thw": [1, 8, 6]})),
        (Metadata(GRID), Metadata({"image_grid_thw": [1, 8, 6]})),
    ],
    ids=["tensors", "tensors and metadata", "metadata"],
)
def test_one_identifier_with_two_contents_is_refused(first: Any, second: Any) -> None:
    request = Request([image("a", 2, first), image("a", 20, second)], MROPE, {"a": reference("a")})
    refuse(request, InvalidFeature, "features.image[1]", "a")


@pytest.mark.parametrize("first", ["tensors", "metadata"])
def test_metadata_lends_tensors_no_field_that_they_lack(first: str) -> None:
    """The engine would be handed the tensors, and would miss the grid."""
    bare = Tensors((b"x",), {}, {"pixel_values": TensorInfo((48, PATCH_DIM), "bfloat16")})
    payloads = [bare, Metadata(GRID)] if first == "tensors" else [Metadata(GRID), bare]
    request = Request([image("a", 2, payloads[0]), image("a", 20, payloads[1])])
    refuse(request, InvalidFeature, "features.image[1]", "a")


def test_one_identifier_in_two_modalities_is_refused() -> None:
    video = Feature("video", "fine", Placeholder(30, ROWS), Metadata({"video_grid_thw": [1, 6, 8]}))
    refuse(Request([FINE, video]), InvalidFeature, "features.video[0]", "fine")
    lenient = model(None, mrope=False, declared={"image": [], "video": []})
    bare = [image("a", 2), Feature("video", "a", Placeholder(30, ROWS))]
    refuse(Request(bare, lenient), InvalidFeature, "features.video[0]", "a")


def test_tensors_that_contradict_what_prefill_holds_are_refused() -> None:
    held = {"a": held_item(metadata={"image_grid_thw": [1, 8, 6]})}
    refuse(Request([image(payload=tensors_for(MROPE))], held=held), InvalidFeature, "features.image[0]", "a")


@pytest.mark.parametrize("identifier", ["", "x" * 1025], ids=["empty", "long"])
def test_identifier(identifier: str) -> None:
    refuse(Request([image(identifier)], FIXED), InvalidFeature, "features.image[0]", identifier)


# Budgets.


def test_item_larger_than_the_encoder_cache() -> None:
    small = replace(MROPE, max_rows_per_item=ROWS - 1)
    refuse(Request([FINE], small), ItemTooLarge, "features.image[0]", "fine")
    referenced = Request([image(payload=Metadata(GRID))], small, {"a": reference("a")})
    refuse(referenced, ItemTooLarge, "features.image[0]", "a")
    assert Request([FINE], replace(MROPE, max_rows_per_item=ROWS)).check().items


def test_items_together_larger_than_the_slab() -> None:
    """They would wait for ever for space that cannot be. An item that stands twice takes its rows once."""
    narrow = replace(FIXED, max_rows_per_request=ROWS)
    assert Request([image("a", 2), image("a", 20)], narrow).check().items
    refuse(Request([image("a", 2), image("b", 20)], narrow), ItemTooLarge, "features", "a", "b")


def test_items_per_prompt() -> None:
    one = replace(FIXED, limits={"image": 1})
    assert Request([image()], one).check().items
    refuse(Request([image("a", 2), image("b", 20)], one), InvalidRequest, "features.image")
    refuse(Request([image()], replace(FIXED, limits={"image": 0})), InvalidRequest, "features.image")


@pytest.mark.parametrize(("seconds", "fine"), [(1.0, True), (300.0, True), (400.0, False), (1e300, False)])
def test_video_cannot_reach_past_the_position_tables(seconds: float, fine: bool) -> None:
    """Three frames, two positions a second: the tables hold four times the longest prompt of 512."""
    fields = {"video_grid_thw": [3, 4, 4], "second_per_grid_ts": seconds}
    video = Feature("video", "v", Placeholder(2, ROWS), Metadata(fields))
    refs = {"v": reference("v", metadata=fields)}
    request = Request([video], QWEN25_MODEL, refs, prompt_for([video], token=VIDEO_TOKEN))
    if fine:
        assert request.check().items[0].decision is Decision.METADATA_AND_REF
    else:
        refuse(request, InvalidFeature, "features.video[0]", "v")


def test_messages_quote_nothing_of_the_request() -> None:
    secret = Metadata({"image_grid_thw": ["my secret"]})
    error = refuse(Request([image(payload=secret)]), InvalidFeature, "features.image[0]", "a")
    assert "secret" not in str(error)
