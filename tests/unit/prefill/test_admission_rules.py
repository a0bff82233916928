"""The rules under the table: prompt, ranges, masks, fields, tensors, duplicates, budgets. Each names its item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefill.admission import Decision
from prefill.layout import rebuild_is_embed
from serving.errors import (
    FeatureDataRequired,
    InvalidFeature,
    InvalidRequest,
    ItemTooLarge,
    TriptychError,
    Unsupported,
)
from serving.protocol import Feature, Metadata, Placeholder, TensorInfo, Tensors
from tests.unit.prefill.builders import (
    FIXED,
    GRID,
    IMAGE_TOKEN,
    MROPE,
    OPEN,
    PATCH_DIM,
    QWEN2,
    QWEN25_MODEL,
    ROWS,
    TEXT,
    VIDEO_TOKEN,
    Request,
    held_item,
    image,
    model,
    prompt_for,
    reference,
    tensors_for,
)

pytestmark = pytest.mark.admission

FINE = image("fine", 2, tensors_for(MROPE, seed=b"fine"))


def refuse(request: Request, kind: type[TriptychError], param: str | None, *hashes: str) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        request.check()
    assert type(caught.value) is kind, caught.value
    assert caught.value.param == param
    assert caught.value.hashes == hashes
    return caught.value


def with_tensors(metadata: dict[str, Any] | None = None, **info: TensorInfo | None) -> Tensors:
    """MROPE's tensors with some parts replaced; None takes one out."""
    good = tensors_for(MROPE)
    merged = {name: tensor for name, tensor in (good.info | info).items() if tensor is not None}
    return Tensors(good.frames, good.metadata if metadata is None else metadata, merged)


# The prompt.


@pytest.mark.parametrize(
    "token_ids", [(), (TEXT,) * 512, (TEXT, -1), (TEXT, 256)], ids=["empty", "long", "low", "high"]
)
def test_prompt(token_ids: tuple[int, ...]) -> None:
    refuse(Request([], token_ids=token_ids), InvalidRequest, "token_ids")


@pytest.mark.parametrize("place", [0, 20, 63])
@pytest.mark.parametrize("token", [-1, 256])
def test_every_token_beside_the_items_is_looked_at(place: int, token: int) -> None:
    features = [image("b", 30, tensors_for(MROPE)), FINE]
    ids = list(prompt_for(features))
    ids[place] = token
    refuse(Request(features, MROPE, token_ids=tuple(ids)), InvalidRequest, "token_ids")
    refuse(Request(features, MROPE, token_ids=ids), InvalidRequest, "token_ids")


def test_tokens_of_a_range_that_were_compared_with_nothing_are_looked_at() -> None:
    outside = replace(OPEN, embed_tokens={})
    refuse(Request([image()], outside, token_ids=prompt_for([image()], token=256)), InvalidRequest, "token_ids")


def test_longest_prompt_leaves_room_for_one_token() -> None:
    assert Request([], token_ids=(TEXT,) * 511).check().items == ()


def test_text_only_model_takes_no_items() -> None:
    text_only = model(None, mrope=False, declared={})
    assert Request([], text_only, token_ids=(TEXT,)).check().items == ()
    refuse(Request([image()], text_only), InvalidFeature, "features.image[0]", "a")


# Ranges.


@pytest.mark.parametrize(
    "placeholder",
    [
        Placeholder(-1, ROWS),
        Placeholder(30, 0),
        Placeholder(30, -4),
        Placeholder(60, ROWS),
        Placeholder(64, 1),
        Placeholder(10**18, ROWS),
        Placeholder(2, ROWS),
        Placeholder(13, ROWS),
        Placeholder(0, 64),
        Placeholder(30, ROWS, is_embed=(True,) * (ROWS - 1)),
        Placeholder(30, ROWS, is_embed=()),
        Placeholder(30, ROWS, is_embed=(True,) * (ROWS - 1) + (False,)),
    ],
    ids=[
        "negative",
        "empty",
        "negative length",
        "past the end",
        "after the end",
        "huge",
        "same as another",
        "overlap by one",
        "around another",
        "short mask",
        "empty mask",
        "mask contradicts tokens",
    ],
)
@pytest.mark.parametrize("payload", ["tensors", "metadata"])
def test_range(placeholder: Placeholder, payload: str) -> None:
    tensors = tensors_for(MROPE)
    bad = Feature("image", "bad", placeholder, tensors if payload == "tensors" else Metadata(GRID))
    refs = {} if payload == "tensors" else {"bad": reference("bad")}
    token_ids = prompt_for([FINE, image("good place", 30)])
    with pytest.raises(InvalidFeature) as caught:
        Request([FINE, bad], MROPE, refs, token_ids).check()
    assert caught.value.param in ("features.image[1]", "features.image[0]")  # an overlap has two sides
    assert caught.value.hashes == (("bad",) if caught.value.param == "features.image[1]" else ("fine",))


@pytest.mark.parametrize(
    "placeholder",
    [
        Placeholder(-1, 2),
        Placeholder(-12, ROWS),
        Placeholder(30, 0),
        Placeholder(30, -4),
        Placeholder(64, 1),
        Placeholder(30, 4, is_embed=()),
        Placeholder(30, 4, is_embed=(True, True)),
        Placeholder(30, 4, is_embed=(True,) * 5),
    ],
)
@pytest.mark.parametrize("tokens", [{}, {"image": IMAGE_TOKEN}], ids=["token unknown", "token known"])
def test_range_of_a_model_of_which_nothing_is_known(placeholder: Placeholder, tokens: dict[str, int]) -> None:
    request = Request(
        [Feature("image", "a", placeholder)], replace(OPEN, embed_tokens=tokens), token_ids=(IMAGE_TOKEN,) * 64
    )
    refuse(request, InvalidFeature, "features.image[0]", "a")


def test_adjacent_ranges_in_any_order_are_fine() -> None:
    features = [image("b", 14, tensors_for(MROPE)), image("a", 2, tensors_for(MROPE)), image("c", 52, Metadata(GRID))]
    admission = Request(features, MROPE, {"c": reference("c")}).check()
    assert [item.feature.identifier for item in admission.items] == ["b", "a", "c"]


def test_rows_must_be_what_the_grid_makes_also_far_beyond_the_first_chunk() -> None:
    """A range one token too long ends an engine (vLLM issue 55546)."""
    roomy = replace(MROPE, max_model_len=100_000)
    for length, place in ((ROWS + 1, 90_000), (ROWS - 1, 90_000)):
        late = image("late", place, tensors_for(MROPE), length)
        request = Request([FINE, late], roomy, token_ids=prompt_for([FINE, late], 95_000))
        refuse(request, InvalidFeature, "features.image[1]", "late")


def test_rows_must_be_what_the_reference_names() -> None:
    for requirement in (FIXED, OPEN):
        request = Request([image()], requirement, {"a": reference("a", metadata={}, rows=ROWS + 1)})
        refuse(request, InvalidFeature, "features.image[0]", "a")


def test_row_width_must_be_the_models() -> None:
    ref = {"a": reference("a", metadata={})}
    assert Request([image()], replace(FIXED, row_width=16), ref).check().refs
    refuse(Request([image()], replace(FIXED, row_width=32), ref), InvalidFeature, "features.image[0]", "a")


def test_fixed_layout_is_known_without_any_data() -> None:
    refuse(Request([image(length=ROWS + 1)], FIXED), InvalidFeature, "features.image[0]", "a")


# Masks.


def test_mask_is_rebuilt_from_the_tokens() -> None:
    ids = (TEXT, 7, 5, 5, 7, 5, TEXT)
    assert rebuild_is_embed(ids, Placeholder(1, 5), 5) == (False, True, True, False, True)
    assert rebuild_is_embed(ids, Placeholder(2, 2), 5) is None
    assert rebuild_is_embed(list(ids), Placeholder(0, 1), 5) == (False,)


def test_gaps_are_kept_where_no_family_forbids_them() -> None:
    feature = image(length=5)
    ids = (TEXT, TEXT, 7, IMAGE_TOKEN, IMAGE_TOKEN, 7, IMAGE_TOKEN, TEXT)
    (item,) = Request([feature], OPEN, token_ids=ids).check().items
    assert item.rows == 3
    assert item.feature.placeholder.is_embed == (False, True, True, False, True)
    (again,) = Request([item.feature], OPEN, token_ids=ids).check().items
    assert again == item


def test_dense_mask_is_the_same_as_none() -> None:
    feature = msgspec.structs.replace(FINE, placeholder=Placeholder(2, ROWS, (True,) * ROWS))
    assert Request([feature]).check().items[0].feature.placeholder == Placeholder(2, ROWS)


def test_range_over_ordinary_text_is_refused() -> None:
    refuse(Request([FINE], MROPE, token_ids=(TEXT,) * 64), InvalidFeature, "features.image[0]", "fine")
    refuse(Request([image()], OPEN, token_ids=(TEXT,) * 64), InvalidFeature, "features.image[0]", "a")
    partly = prompt_for([image("x", 2, length=ROWS - 1)])
    refuse(Request([FINE], MROPE, token_ids=partly), InvalidFeature, "features.image[0]", "fine")


def test_gaps_are_refused_where_the_family_has_none_even_if_the_rows_agree() -> None:
    gapless = model(QWEN2, mrope=False, declared={"image": ["image_grid_thw"]})
    partly = prompt_for([image("x", 2, length=ROWS - 1)])
    refs = {"a": reference("a", rows=ROWS - 1)}
    refuse(Request([image()], gapless, refs, partly), InvalidFeature, "features.image[0]", "a")


def test_missing_mask_that_no_token_tells_is_refused_unless_the_layout_is_known() -> None:
    unknown = replace(OPEN, embed_tokens={})
    mixed = (TEXT, TEXT, *range(1, ROWS + 1), TEXT)
    refuse(Request([image()], unknown, token_ids=mixed), InvalidFeature, "features.image[0]", "a")
    assert Request([image()], unknown).check().items[0].rows == ROWS  # all tokens alike: nothing to tell

    dense = Placeholder(2, ROWS, (True,) * ROWS)
    (rendered,) = Request([image()], unknown, token_ids=mixed, rendered=True).check().items
    (referenced,) = Request([image()], unknown, {"a": reference("a")}, token_ids=mixed).check().items
    (stated,) = Request([rendered.feature], unknown, token_ids=mixed).check().items
    assert [i.feature.placeholder for i in (rendered, referenced, stated)] == [dense] * 3

    nothing = msgspec.structs.replace(image(), placeholder=Placeholder(2, ROWS, (False,) * ROWS))
    refuse(Request([nothing], unknown, token_ids=mixed), InvalidFeature, "features.image[0]", "a")


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
