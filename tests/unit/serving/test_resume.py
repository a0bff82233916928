"""Prefill's own first token, and answers that go on after a loss."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from serving.errors import EncodingUnavailable, EngineFault, HandoffExpired, Overloaded, StageUnavailable
from serving.protocol import DecodeChunk, Feature, Tensors
from serving.stages import Report
from tests.unit.serving.pipeline_fakes import GRID, Stages, image, request

FIRST = DecodeChunk("w0", (0,), finished=False)
WHOLE = DecodeChunk("w0", (0,), finished=True, finish_reason="stop", stop_reason=7)
PIXELS = Tensors(frames=(b"y" * 10_000,), metadata=GRID, info={})


def texts(chunks: Sequence[DecodeChunk]) -> list[str]:
    return [chunk.text for chunk in chunks]


async def test_decode_goes_on_from_prefills_token() -> None:
    stages = Stages()
    stages.prefiller.first, stages.decoder.chunks = FIRST, 3
    _, chunks = await stages.run(request(can_resume=True))
    assert texts(chunks) == ["w0", "w1", "w2"]
    (sent,) = stages.decoder.requests
    assert sent.token_ids == (*range(32), 0)
    assert (sent.num_answered, sent.tokens_only) == (1, False)
    assert stages.continued == []
    assert stages.decoder.rejected == []


async def test_prefills_token_comes_before_decode_is_asked() -> None:
    stages = Stages()
    stages.prefiller.first = FIRST
    outputs = stages.pipeline.generate(request(can_resume=True))
    assert isinstance(await anext(outputs), Report)
    assert await anext(outputs) == FIRST
    assert stages.decoder.requests == []
    await outputs.aclose()
    assert len(stages.decoder.rejected) == 1  # the client left before decode could read the blocks
    assert stages.limits.running == 0


async def test_an_answer_of_one_token_never_reaches_decode_and_its_blocks_are_returned() -> None:
    stages = Stages()
    stages.prefiller.first = WHOLE
    _, chunks = await stages.run(request(image("a", 2), can_resume=True))
    assert chunks == [WHOLE]
    assert stages.decoder.requests == []
    assert len(stages.decoder.rejected) == 1
    assert stages.prefiller.released == ["a"]


async def test_a_decode_stage_that_may_refuse_is_asked_before_the_answer_begins() -> None:
    stages = Stages()
    stages.prefiller.first, stages.decoder.is_pressed = FIRST, True
    stages.decoder.failures = [Overloaded("full")]
    with pytest.raises(Overloaded):
        await anext(stages.pipeline.generate(request(can_resume=True)))
    _, chunks = await stages.run(request(can_resume=True))
    assert texts(chunks) == ["w0", "w1"]
    assert stages.decoder.requests[1].num_answered == 0


async def test_a_request_that_cannot_resume_does_not_ask_for_the_token() -> None:
    stages = Stages()
    stages.prefiller.first = FIRST
    _, chunks = await stages.run(request())
    assert texts(chunks) == ["w0", "w1"]
    assert stages.decoder.requests[0].num_answered == 0


async def test_a_lost_answer_goes_on_where_it_stood() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses = 5, [2]
    _, chunks = await stages.run(request(can_resume=True))
    assert texts(chunks) == ["w0", "w1", "w2", "w3", "w4"]
    assert stages.continued == [((0, 1), "w0w1")]
    assert [r.token_ids for r in stages.prefiller.requests] == [tuple(range(32)), (*range(32), 0, 1)]
    assert not stages.prefiller.requests[1].wants_first
    again = stages.decoder.requests[1]
    assert (again.token_ids, again.num_answered, again.tokens_only) == ((*range(32), 0, 1), 2, True)
    assert len({r.request_id for r in stages.decoder.requests}) == 2


async def test_the_hand_off_of_an_early_token_may_expire() -> None:
    stages = Stages()
    stages.prefiller.first, stages.decoder.failures = FIRST, [HandoffExpired("late")]
    _, chunks = await stages.run(request(can_resume=True))
    assert texts(chunks) == ["w0", "w1"]
    assert stages.continued == [((0,), "w0")]
    assert [h.params["number"] for h in stages.decoder.rejected] == [1]


async def test_an_answer_ends_where_its_continuation_says() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses, stages.stops_at = 9, [2], 3
    _, chunks = await stages.run(request(can_resume=True))
    assert texts(chunks) == ["w0", "w1", "w2", "w3"]
    assert chunks[-1].finish_reason == "stop"
    assert stages.decoder.open_streams == 0


async def test_losses_are_counted_whatever_is_lost() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses = 9, [2, 2, 2, 2]
    stages.prefiller.failures = [StageUnavailable("gone")]
    with pytest.raises(StageUnavailable):
        await stages.run(request(can_resume=True))
    assert len(stages.prefiller.requests) == 3
    assert stages.limits.running == 0


async def test_what_cannot_resume_fails_after_its_first_chunk() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses = 5, [2]
    with pytest.raises(StageUnavailable) as lost:
        await stages.run(request(can_resume=False))
    assert lost.value.retryable
    assert len(stages.prefiller.requests) == 1


async def test_a_resumed_request_has_let_go_of_its_pixels_and_needs_none() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses = 4, [2]
    asked: list[Feature] = []
    report, chunks = await stages.run(request(image("a", 2), can_resume=True, recall=asked.append))
    assert texts(chunks) == ["w0", "w1", "w2", "w3"]
    assert len(report.items) == 1
    assert len(stages.encoder.requests) == 1
    assert asked == []


async def test_a_resumed_request_finds_its_pixels_again_when_every_stage_has_lost_the_item() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses = 4, [2]
    stages.decoder.on_loss = lambda: (stages.prefiller.slab.clear(), stages.encoder.held.clear())
    _, chunks = await stages.run(request(image("a", 2), can_resume=True, recall=lambda feature: PIXELS))
    assert texts(chunks) == ["w0", "w1", "w2", "w3"]
    assert stages.encoder.requests[-1].feature.payload == PIXELS


async def test_a_resumed_request_whose_pixels_are_gone_fails_retryably() -> None:
    stages = Stages()
    stages.decoder.chunks, stages.decoder.losses = 4, [2]
    stages.decoder.on_loss = lambda: (stages.prefiller.slab.clear(), stages.encoder.held.clear())
    with pytest.raises(EncodingUnavailable) as lost:
        await stages.run(request(image("a", 2), can_resume=True, recall=lambda feature: None))
    assert lost.value.retryable
    assert lost.value.hashes == ("a",)


async def test_a_failed_sibling_lets_go_of_what_was_encoded_and_found() -> None:
    stages = Stages()
    await stages.run(request(image("held", 2)))
    stages.encoder.failures = [EngineFault("broken")]
    with pytest.raises(EngineFault):
        await stages.run(request(image("held", 2), image("new", 8)))
    assert stages.prefiller.released == ["held"]
