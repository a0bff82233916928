"""The pipeline over fake stages: what is sent where, and what a failure costs."""

from __future__ import annotations

import pytest

from serving.errors import (
    ECReferenceRequired,
    EncodingUnavailable,
    FeatureDataRequired,
    HandoffExpired,
    InvalidFeature,
    MultiModalCacheMiss,
    Overloaded,
    StageUnavailable,
    TriptychError,
)
from serving.messages import encode_request
from serving.protocol import (
    ItemProvenance,
    Metadata,
    Tensors,
    encode,
)
from serving.stages import Report
from tests.fakes import ref_for
from tests.unit.serving.pipeline_fakes import GRID, Stages, image, request


async def test_text_skips_the_encoder_and_resolve() -> None:
    stages = Stages()
    report, chunks = await stages.run(request())
    assert [c.text for c in chunks] == ["w0", "w1"]
    assert (stages.encoder.requests, stages.prefiller.resolves, report.items) == ([], [], ())
    assert stages.decoder.rejected == []


async def test_each_distinct_item_is_encoded_once_and_pixels_stay_there() -> None:
    stages = Stages()
    report, _ = await stages.run(request(image("a", 2), image("b", 8), image("a", 20)))
    assert sorted(r.feature.identifier for r in stages.encoder.requests) == ["a", "b"]
    assert [i.provenance for i in report.items] == [ItemProvenance.ENCODED] * 3
    assert len(encode(stages.prefiller.requests[0])) < 8_192
    assert len(encode(stages.decoder.requests[0])) < 8_192
    assert all(f.payload == Metadata(GRID) for f in stages.decoder.requests[0].features)


async def test_a_repeated_item_is_asked_of_prefill_and_not_encoded() -> None:
    stages = Stages()
    await stages.run(request(image("a", 2)))
    report, _ = await stages.run(request(image("a", 2)))
    assert len(stages.encoder.requests) == 1
    assert report.items[0].provenance is ItemProvenance.PREFILL_SLAB


async def test_an_item_prefill_lost_is_asked_of_the_encoder_without_tensors() -> None:
    stages = Stages()
    await stages.run(request(image("a", 2)))
    stages.prefiller.slab.clear()
    report, _ = await stages.run(request(image("a", 2)))
    assert isinstance(stages.encoder.requests[1].feature.payload, Metadata)
    assert len(stages.encoder.requests) == 2
    assert report.items[0].provenance is ItemProvenance.ENCODER_SLAB


async def test_an_encoder_that_forgot_is_sent_the_tensors() -> None:
    stages = Stages()
    await stages.run(request(image("a", 2)))
    stages.prefiller.slab.clear()
    stages.encoder.held.clear()
    report, _ = await stages.run(request(image("a", 2)))
    assert isinstance(stages.encoder.requests[2].feature.payload, Tensors)
    assert report.items[0].provenance is ItemProvenance.ENCODED


@pytest.mark.parametrize("error", [EncodingUnavailable, MultiModalCacheMiss])
async def test_a_lost_encoding_is_made_once_more(error: type[EncodingUnavailable | MultiModalCacheMiss]) -> None:
    stages = Stages()
    stages.prefiller.failures = [error("gone", hashes=["a"])]
    _, chunks = await stages.run(request(image("a", 2)))
    assert len(stages.prefiller.requests) == 2
    assert chunks[-1].finished
    assert stages.prefiller.requests[0].request_id != stages.prefiller.requests[1].request_id


async def test_an_encoding_lost_again_and_again_is_reported() -> None:
    stages = Stages()
    stages.prefiller.failures = [EncodingUnavailable("gone", hashes=["a"])] * 3
    with pytest.raises(EncodingUnavailable):
        await stages.run(request(image("a", 2)))
    assert stages.limits.running == 0


async def test_a_cache_miss_without_tensors_is_not_retried() -> None:
    stages = Stages()
    stages.prefiller.failures = [MultiModalCacheMiss("gone", hashes=["a"])]
    with pytest.raises(MultiModalCacheMiss):
        await stages.run(request(image("a", 2, payload=None)))
    assert len(stages.prefiller.requests) == 1


async def test_a_refused_request_reaches_no_stage() -> None:
    stages = Stages(refuse=FeatureDataRequired("no", param="features.image[0]"))
    with pytest.raises(FeatureDataRequired):
        await stages.run(request(image("a", 2)))
    assert stages.encoder.requests == stages.prefiller.requests == []


async def test_a_client_reference_is_passed_on_and_not_resolved() -> None:
    stages = Stages()
    bare = image("a", 2, payload=Metadata(GRID))
    report, _ = await stages.run(request(bare, refs={"a": ref_for("a")}))
    assert stages.prefiller.resolves == []
    assert stages.prefiller.requests[0].refs == {"a": ref_for("a")}
    assert report.items[0].provenance is ItemProvenance.ENCODER_SLAB


async def test_a_hand_off_past_its_deadline_is_prefilled_again_and_the_first_returned() -> None:
    stages = Stages(lease_s=8.0, prefill_takes_s=4.0)  # 8 - 5 margin leaves 3 s, prefill alone takes 4
    with pytest.raises(HandoffExpired):
        await stages.run(request())
    assert len(stages.prefiller.requests) == 3
    assert [h.params["number"] for h in stages.decoder.rejected] == [1, 2, 3]
    assert stages.decoder.requests == []


async def test_decode_finding_it_expired_prefills_again() -> None:
    stages = Stages()
    stages.decoder.failures = [HandoffExpired("late")]
    _, chunks = await stages.run(request())
    assert chunks[-1].finished
    assert [h.params["number"] for h in stages.decoder.rejected] == [1]


@pytest.mark.parametrize("loss", [MultiModalCacheMiss, EncodingUnavailable])
async def test_encodings_that_decode_lacks_are_no_fault_of_the_clients(loss: type[TriptychError]) -> None:
    """A preempted request needs what only prefill's prefix cache stood for. Prefill runs again, and not for ever."""
    stages = Stages()
    stages.decoder.failures = [loss("gone", hashes=["a"])]
    _, chunks = await stages.run(request(image("a", 1)))
    assert chunks[-1].finished
    assert len(stages.prefiller.requests) == 2
    stages.decoder.failures = [loss("gone", hashes=["a"]) for _ in range(3)]
    with pytest.raises(EncodingUnavailable):
        await stages.run(request(image("a", 1)))
    assert len(stages.prefiller.requests) == 5


async def test_leaving_before_the_first_chunk_returns_the_hand_off() -> None:
    stages = Stages()
    outputs = stages.pipeline.generate(request())
    assert isinstance(await anext(outputs), Report)
    await outputs.aclose()
    assert stages.decoder.open_streams == 0
    assert stages.limits.running == 0
    assert stages.decoder.rejected == []  # the report comes with the first chunk: decode has read the blocks


async def test_a_decode_failure_returns_the_hand_off() -> None:
    stages = Stages()
    stages.decoder.failures = [InvalidFeature("bad")]
    with pytest.raises(InvalidFeature):
        await stages.run(request())
    assert len(stages.decoder.rejected) == 1


async def test_a_full_queue_refuses_at_once_and_text_has_its_own() -> None:
    stages = Stages()
    async with stages.limits.slot(has_media=True), stages.limits.slot(has_media=True):
        with pytest.raises(Overloaded) as refused:
            await stages.run(request(image("a", 2)))
        assert refused.value.retry_after_s
        await stages.run(request())


async def test_one_failed_item_fails_the_request() -> None:
    stages = Stages()
    stages.encoder.failures = [InvalidFeature("bad", param="features.image[0]")]
    with pytest.raises(InvalidFeature):
        await stages.run(request(image("a", 2), image("b", 8)))
    assert stages.prefiller.requests == []


@pytest.mark.parametrize(("offset", "expected", "moved"), [(0, (0, 1, 2, 3, 4), 0), (28, (27, 28, 29, 30, 31), 1)])
def test_an_items_own_prompt_stays_inside_the_whole_one(offset: int, expected: tuple[int, ...], moved: int) -> None:
    own = encode_request(request(), image("a", offset), timeout_s=None)
    assert own.token_ids == expected
    assert own.feature.placeholder.offset == moved


async def test_a_dead_encoder_is_asked_elsewhere_once() -> None:
    stages = Stages()
    stages.encoder.failures = [StageUnavailable("gone")]
    _, chunks = await stages.run(request(image("a", 2)))
    assert chunks[-1].finished
    stages.encoder.failures = [StageUnavailable("gone")] * 3
    with pytest.raises(StageUnavailable):
        await stages.run(request(image("b", 2)))


async def test_an_encoder_that_is_asked_again_gets_the_time_that_is_left() -> None:
    stages = Stages(encode_takes_s=4.0)
    stages.encoder.failures = [StageUnavailable("gone")]
    await stages.run(request(image("a", 2), timeout_s=10.0))
    assert [r.timeout_s for r in stages.encoder.requests] == [10.0, 6.0]


async def test_a_prefill_that_dies_while_it_resolves_is_asked_elsewhere_within_the_deadline() -> None:
    stages = Stages()
    stages.prefiller.slab["a"] = GRID
    stages.prefiller.resolve_failures = [StageUnavailable("gone")]
    report, _ = await stages.run(request(image("a", 2, payload=None), timeout_s=10.0))
    assert report.items[0].provenance is ItemProvenance.PREFILL_SLAB
    assert [r.timeout_s for r in stages.prefiller.resolves] == [10.0, 10.0]


async def test_a_dead_prefill_is_asked_elsewhere_with_fresh_references() -> None:
    stages = Stages()
    stages.prefiller.failures = [StageUnavailable("gone")]
    report, _ = await stages.run(request(image("a", 2)))
    assert [isinstance(r.feature.payload, Tensors) for r in stages.encoder.requests] == [True, False]
    assert [r.request_id for r in stages.prefiller.requests] == ["r-p1", "r-p2"]
    assert report.items[0].provenance is ItemProvenance.ENCODER_SLAB


async def test_a_reference_that_expired_on_the_way_is_no_fault_of_the_clients() -> None:
    stages = Stages()
    stages.prefiller.failures = [ECReferenceRequired("expired", hashes=["a"])]
    _, chunks = await stages.run(request(image("a", 2)))
    assert chunks[-1].finished
    stages.prefiller.failures = [ECReferenceRequired("expired", hashes=["b"])] * 3
    with pytest.raises(EncodingUnavailable):
        await stages.run(request(image("b", 2)))
    stages.prefiller.failures = [ECReferenceRequired("never had one", hashes=["c"])]
    with pytest.raises(ECReferenceRequired):
        await stages.run(request(image("c", 2, payload=Metadata(GRID)), refs={"c": ref_for("c")}))


async def test_a_dead_decode_prefills_again() -> None:
    stages = Stages()
    stages.decoder.failures = [StageUnavailable("gone")]
    _, chunks = await stages.run(request(image("a", 2)))
    assert chunks[-1].finished
    assert len({r.request_id for r in stages.prefiller.requests}) == 2


async def test_a_refused_prefill_lets_go_of_the_encodings() -> None:
    stages = Stages()
    stages.prefiller.failures = [InvalidFeature("bad")]
    with pytest.raises(InvalidFeature):
        await stages.run(request(image("a", 2), image("b", 8)))
    assert sorted(stages.encoder.released) == ["a", "b"]


async def test_a_copy_at_prefill_without_metadata_is_let_go_when_tensors_are_sent() -> None:
    stages = Stages()
    await stages.run(request(image("a", 2)))
    stages.prefiller.slab["a"] = None
    await stages.run(request(image("a", 2)))
    assert stages.prefiller.released == ["a"]
    assert stages.encoder.released == []
    assert len(stages.encoder.requests) == 2


async def test_a_copy_at_prefill_without_metadata_is_let_go_when_prefill_refuses() -> None:
    stages = Stages()
    stages.prefiller.slab["a"] = None
    bare = request(image("a", 2, payload=None))
    await stages.run(bare)
    assert stages.prefiller.released == []
    stages.prefiller.slab["a"] = None
    stages.prefiller.failures = [InvalidFeature("bad")]
    with pytest.raises(InvalidFeature):
        await stages.run(bare)
    assert stages.prefiller.released == ["a"]


async def test_a_hand_off_that_is_not_read_lets_go_of_prefills_encodings() -> None:
    stages = Stages()
    stages.decoder.failures = [InvalidFeature("bad")]
    with pytest.raises(InvalidFeature):
        await stages.run(request(image("a", 2)))
    assert stages.prefiller.released == ["a"]
    assert len(stages.decoder.rejected) == 1
