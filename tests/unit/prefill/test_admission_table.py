"""Every cell of the contract's table, for every kind of model, sent alone and as second of two items."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prefill.admission import Decision, FeatureRequirement, check, decide
from prefill.requirement import Need
from serving.errors import (
    ECReferenceRequired,
    FeatureDataRequired,
    MetadataMismatch,
    TriptychError,
    UnusedReference,
)
from serving.protocol import EncodingRef, Metadata, Tensors
from tests.unit.prefill.builders import (
    FIXED,
    GRID,
    MROPE,
    OPEN,
    ROWS,
    STRANGER,
    XDROPE,
    Request,
    held_item,
    image,
    metadata_for,
    prompt_for,
    reference,
    tensors_for,
)

pytestmark = pytest.mark.admission

POSITION_MODELS = [MROPE, XDROPE]
OTHER_MODELS = [FIXED, OPEN]
CELLS = {  # what is there: (M-RoPE and XD-RoPE, other models)
    "tensors": (Decision.TENSORS, Decision.TENSORS),
    "tensors and ref": (Decision.TENSORS, Decision.TENSORS),
    "metadata and ref": (Decision.METADATA_AND_REF, Decision.METADATA_AND_REF),
    "metadata": (ECReferenceRequired, Decision.NOTHING),
    "ref": (FeatureDataRequired, Decision.REF_ONLY),
    "nothing": (FeatureDataRequired, Decision.NOTHING),
}


def parts(
    requirement: FeatureRequirement, there: str, identifier: str
) -> tuple[Tensors | Metadata | None, EncodingRef | None]:
    fields = metadata_for(requirement)
    payload = tensors_for(requirement) if "tensors" in there else Metadata(fields) if "metadata" in there else None
    return payload, reference(identifier, metadata=fields) if "ref" in there else None


@pytest.mark.parametrize("there", CELLS)
@pytest.mark.parametrize("requirement", POSITION_MODELS + OTHER_MODELS, ids=["mrope", "xdrope", "fixed", "open"])
@pytest.mark.parametrize("position", [0, 1], ids=["first", "second"])
def test_cell(requirement: FeatureRequirement, there: str, position: int) -> None:
    payload, ref = parts(requirement, there, "judged")
    fine = image("fine", 2, tensors_for(requirement, seed=b"fine"))
    judged = image("judged", 30, payload)
    features = [fine, judged] if position else [judged, fine]
    request = Request(features, requirement, {"judged": ref} if ref else {})
    expected = CELLS[there][0 if requirement.uses_mrope else 1]

    if isinstance(expected, Decision):
        admitted = request.check().items
        assert [item.decision for item in admitted][position] is expected
        assert [item.feature.identifier for item in admitted] == [f.identifier for f in features]
        assert (admitted[position].ref is not None) is (expected in (Decision.METADATA_AND_REF, Decision.REF_ONLY))
    else:
        with pytest.raises(TriptychError) as caught:
            request.check()
        assert type(caught.value) is expected
        assert caught.value.param == f"features.image[{position}]"
        assert caught.value.hashes == ("judged",)
        assert (caught.value.http_status, caught.value.retryable) == (400, False)


@pytest.mark.parametrize("need", list(Need))
@pytest.mark.parametrize("asked", [True, False])
def test_decide_never_lets_positions_go_unread(need: Need, asked: bool) -> None:
    """Over all combinations: a model that needs metadata gets it, and a reference never stands alone for it."""
    flags = [(bool(i & 1), bool(i & 2), bool(i & 4), bool(i & 8), bool(i & 16)) for i in range(32)]
    for tensors, metadata, ref, trusted, held_tensors in flags:
        verdict = decide(
            need,
            tensors=tensors,
            metadata=metadata,
            ref=ref,
            trusted=trusted and metadata,
            held_tensors=held_tensors,
            asked=asked,
        )
        if verdict is Decision.TENSORS:
            assert tensors
        if verdict is Decision.REF_ONLY:
            assert need is Need.NOTHING
            assert ref
        if verdict is Decision.METADATA_AND_REF:
            assert metadata
            assert ref
            assert need is not Need.TENSORS
        if verdict is Decision.NOTHING:
            assert asked
            assert need is Need.NOTHING or (need is Need.METADATA and metadata and trusted)
        assert not (asked and verdict is Decision.UNRESOLVED)
        assert asked or isinstance(verdict, Decision)


# What makes a reference none.


def broken(kind: str) -> EncodingRef:
    good = reference("a")
    match kind:
        case "mac":
            return msgspec.structs.replace(good, mac="0" * 64)
        case "altered":
            return msgspec.structs.replace(good, offset=4096)
        case "stranger":
            return reference("a", signer=STRANGER)
        case "expired":
            return msgspec.structs.replace(good, expires_at=1.0)
        case "tenant":
            return reference("a", cache_salt="another tenant")
        case "peer":
            return reference("a", peer="tcp://10.1.2.3:4000")
        case "name":
            return reference("b")
        case _:
            raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["mac", "altered", "stranger", "expired", "tenant", "peer", "name"])
def test_bad_reference_is_no_reference(kind: str) -> None:
    refs = {"a": broken(kind)}
    with pytest.raises(ECReferenceRequired):
        Request([image(payload=Metadata(GRID))], MROPE, refs).check()
    with pytest.raises(FeatureDataRequired):
        Request([image()], MROPE, refs).check()
    (item,) = Request([image()], FIXED, refs).check().items
    assert (item.decision, item.ref) == (Decision.NOTHING, None)


def test_reference_of_an_older_epoch_is_no_reference() -> None:
    ref = reference("a", metadata={})
    current = Request([image()], FIXED, {"a": ref}, epochs={ref.peer: "epoch"})
    restarted = replace(current, epochs={ref.peer: "a later epoch"})
    assert current.check().items[0].decision is Decision.REF_ONLY
    assert restarted.check().items[0].decision is Decision.NOTHING


def test_another_tenants_reference_is_none_whoever_verifies() -> None:
    ref = reference("a", metadata={}, cache_salt="another tenant")
    admission = check(
        FIXED, prompt_for([image()]), [image()], {"a": ref}, cache_salt=None, verify=lambda ref: True, held={}
    )
    assert admission.items[0].decision is Decision.NOTHING


@pytest.mark.parametrize("field", ["offset", "generation", "size_bytes", "digest"])
def test_reference_with_numbers_that_no_server_writes_is_no_reference(field: str) -> None:
    """JSON carries any integer; the signature covers 64-bit ones and cannot even be computed over more."""
    for number in (-1, 10**40):
        ref = msgspec.structs.replace(reference("a"), **{field: number})
        assert Request([image()], FIXED, {"a": ref}).check().items[0].decision is Decision.NOTHING
    wide = msgspec.structs.replace(reference("a"), shape=(ROWS, 10**40))
    assert Request([image()], FIXED, {"a": wide}).check().items[0].decision is Decision.NOTHING


def test_tenant_sees_its_own_reference() -> None:
    ref = reference("a", cache_salt="tenant")
    request = Request([image(payload=Metadata(GRID))], MROPE, {"a": ref}, cache_salt="tenant")
    assert request.check().refs == {"a": ref}


@pytest.mark.parametrize("requirement", [MROPE, OPEN], ids=["mrope", "open"])
def test_metadata_must_be_what_the_reference_was_issued_for(requirement: FeatureRequirement) -> None:
    """A transposed grid has the right rows; admitted, it would poison the prefix cache for everyone."""
    transposed = {"image_grid_thw": [1, 8, 6]}
    with pytest.raises(MetadataMismatch) as caught:
        Request([image(payload=Metadata(transposed))], requirement, {"a": reference("a")}).check()
    assert caught.value.param == "features.image[0]"
    assert caught.value.hashes == ("a",)


@pytest.mark.parametrize("entry", [None, reference("absent")], ids=["parameters", "reference"])
def test_unused_reference_is_refused(entry: EncodingRef | None) -> None:
    with pytest.raises(UnusedReference) as caught:
        Request([image(payload=tensors_for(MROPE))], MROPE, {"absent": entry}).check()
    assert caught.value.hashes == ("absent",)
    with pytest.raises(UnusedReference):
        Request([], MROPE, {"absent": entry}, token_ids=(1, 2)).check()


def test_parameters_without_reference_for_a_present_item_are_nothing() -> None:
    assert Request([image()], FIXED, {"a": None}).check().items[0].decision is Decision.NOTHING


def test_reference_beside_tensors_is_ignored_even_when_it_contradicts_them() -> None:
    request = Request([image(payload=tensors_for(MROPE))], MROPE, {"a": reference("a", metadata={}, rows=3)})
    (item,) = request.check().items
    assert (item.decision, item.ref) == (Decision.TENSORS, None)


# What prefill holds.


def test_before_prefill_was_asked_items_wait_instead_of_being_refused() -> None:
    features = [image("a"), image("b", 20, Metadata(GRID)), image("c", 40, tensors_for(MROPE))]
    admission = Request(features, MROPE, held=None).check()
    assert admission.unresolved == ("a", "b")
    assert admission.items[1].feature.payload == Metadata(GRID)
    assert Request([image()], FIXED, held=None).check().unresolved == ("a",)
    assert Request([image()], FIXED, {"a": reference("a", metadata={})}, held=None).check().unresolved == ()


def test_waiting_item_keeps_its_reference_for_the_second_look() -> None:
    ref = reference("a")
    first = Request([image()], MROPE, {"a": ref}, held=None).check()
    assert (first.unresolved, first.refs) == (("a",), {"a": ref})
    second = Request(first.features, MROPE, first.refs, held={"a": held_item(metadata=GRID)}).check()
    assert second.items[0].decision is Decision.METADATA_AND_REF


@pytest.mark.parametrize("requirement", POSITION_MODELS, ids=["mrope", "xdrope"])
def test_repeat_by_name_alone_is_served_from_what_prefill_kept(requirement: FeatureRequirement) -> None:
    own = reference("a")
    (item,) = Request([image()], requirement, held={"a": held_item(metadata=GRID, ref=own)}).check().items
    assert (item.decision, item.ref, item.feature.payload) == (Decision.METADATA_AND_REF, own, Metadata(GRID))


def test_kept_metadata_without_an_encoding_goes_to_the_guard_with_its_metadata() -> None:
    (item,) = Request([image()], MROPE, held={"a": held_item(metadata=GRID)}).check().items
    assert (item.decision, item.feature.payload) == (Decision.NOTHING, Metadata(GRID))


def test_kept_tensors_stand_in_for_sent_ones() -> None:
    (item,) = Request([image()], MROPE, held={"a": held_item(metadata=GRID, has_tensors=True)}).check().items
    assert (item.decision, item.feature.payload, item.ref) == (Decision.HELD, Metadata(GRID), None)


def test_own_slab_copy_is_preferred_to_kept_tensors_and_to_a_sent_reference() -> None:
    own = reference("a", peer="tcp://127.0.0.1:9999")
    held = {"a": held_item(metadata=GRID, has_tensors=True, ref=own)}
    (item,) = Request([image()], MROPE, {"a": reference("a")}, held=held).check().items
    assert (item.decision, item.ref) == (Decision.METADATA_AND_REF, own)


def test_a_bare_slab_copy_is_no_feature_data() -> None:
    """The encoder cache hits, and still the grid is missing."""
    held = {"a": held_item(ref=reference("a"))}
    with pytest.raises(FeatureDataRequired):
        Request([image()], MROPE, held=held).check()
    assert Request([image()], FIXED, held={"a": held_item(ref=reference("a", metadata={}))}).check().refs


def test_sent_metadata_must_be_what_prefill_holds() -> None:
    held = {"a": held_item(metadata={"image_grid_thw": [1, 8, 6]})}
    with pytest.raises(MetadataMismatch):
        Request([image(payload=Metadata(GRID))], MROPE, held=held).check()


def test_empty_metadata_contradicts_nothing() -> None:
    held = {"a": held_item(metadata=GRID, ref=reference("a"))}
    features = [image("a", 2, Metadata({})), image("a", 20, Metadata(GRID)), image("a", 40, Metadata({}))]
    items = Request(features, MROPE, held=held).check().items
    assert {item.decision for item in items} == {Decision.METADATA_AND_REF}
    assert all(item.feature.payload == Metadata(GRID) for item in items)
    sent = Request(features, MROPE, {"a": reference("a")}).check()
    assert all(item.feature.payload == Metadata(GRID) for item in sent.items)


def test_unconfirmed_metadata_does_not_go_on() -> None:
    (item,) = Request([image(payload=Metadata(GRID))], OPEN).check().items
    assert (item.decision, item.feature.payload) == (Decision.NOTHING, None)


def test_all_items_refused_alike_are_named_so_that_one_retry_mends_them() -> None:
    features = [image("a", 2, tensors_for(MROPE)), image("b", 20), image("c", 40)]
    with pytest.raises(FeatureDataRequired) as caught:
        Request(features, MROPE).check()
    assert caught.value.param == "features.image[1]"
    assert caught.value.hashes == ("b", "c")


@pytest.mark.parametrize("there", ["ref", "nothing"])
def test_empty_metadata_is_no_feature_data(there: str) -> None:
    refs = {"a": reference("a", metadata={})} if there == "ref" else {}
    for requirement in POSITION_MODELS:
        with pytest.raises(FeatureDataRequired):
            Request([image(payload=Metadata({}))], requirement, refs).check()
