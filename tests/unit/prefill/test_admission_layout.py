"""The rules under the table about the prompt, ranges and masks. Each names its item."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prefill.layout import rebuild_is_embed
from serving.errors import (
    InvalidFeature,
    InvalidRequest,
)
from serving.protocol import Feature, Metadata, Placeholder
from tests.unit.prefill.builders import (
    FINE,
    FIXED,
    GRID,
    IMAGE_TOKEN,
    MROPE,
    OPEN,
    QWEN2,
    ROWS,
    TEXT,
    Request,
    image,
    model,
    prompt_for,
    reference,
    refuse,
    tensors_for,
)

pytestmark = pytest.mark.admission


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
