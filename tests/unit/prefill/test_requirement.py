"""Configuration may ask for more than the model needs, never for less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from prefill.admission import Decision
from prefill.requirement import Need
from serving.errors import ECReferenceRequired, FeatureDataRequired
from serving.protocol import Metadata
from tests.unit.prefill.builders import FIXED, GRID, MROPE, OPEN, Request, image, reference, tensors_for


def test_need_is_derived_from_the_model() -> None:
    assert MROPE.need("image") is Need.METADATA
    assert FIXED.need("image") is Need.NOTHING


@pytest.mark.parametrize("word", ["metadata", "tensors"])
def test_stricter_than_the_model(word: str) -> None:
    stricter = OPEN.stricter({"image": word})
    assert stricter.need("image") is Need[word.upper()]
    assert OPEN.need("image") is Need.NOTHING  # unchanged
    with pytest.raises(FeatureDataRequired):
        Request([image()], stricter, {"a": reference("a")}).check()
    assert Request([image(payload=tensors_for(OPEN))], stricter).check().items[0].decision is Decision.TENSORS


def test_metadata_beyond_what_the_model_needs() -> None:
    stricter = OPEN.stricter({"image": "metadata"})
    refs = {"a": reference("a")}
    admitted = Request([image(payload=Metadata(GRID))], stricter, refs).check()
    assert admitted.items[0].decision is Decision.METADATA_AND_REF
    with pytest.raises(ECReferenceRequired):
        Request([image(payload=Metadata(GRID))], stricter).check()
    # A model without metadata fields: the empty set is all there is to send.
    fixed = FIXED.stricter({"image": "metadata"})
    refs = {"a": reference("a", metadata={})}
    assert Request([image(payload=Metadata({}))], fixed, refs).check().refs == refs


def test_tensors_only() -> None:
    stricter = MROPE.stricter({"image": "tensors"})
    request = Request([image(payload=Metadata(GRID))], stricter, {"a": reference("a")})
    with pytest.raises(FeatureDataRequired, match="tensors only"):
        request.check()
    assert replace(request, requirement=MROPE).check().items


def test_laxer_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"admission\.stricter\.image: 'nothing' is laxer.*M-RoPE.*image_grid_thw"):
        MROPE.stricter({"image": "nothing"})
    with pytest.raises(ValueError, match="laxer than 'tensors'"):
        FIXED.stricter({"image": "tensors"}).stricter({"image": "metadata"})


@pytest.mark.parametrize("needs", [{"audio": "tensors"}, {"image": "everything"}, {"image": ""}])
def test_unknown_words_are_refused(needs: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"admission\.stricter"):
        FIXED.stricter(needs)


def test_as_strict_as_the_model_changes_nothing() -> None:
    assert MROPE.stricter({"image": "metadata"}).need("image") is Need.METADATA
    assert MROPE.stricter({}) == MROPE
