"""The spans of a request: one tree, with its outcome, leading on into the stages."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from serving.errors import EngineFault, Overloaded
from serving.exporting import spans_to
from serving.tracing import RequestTrace
from tests.collector import collecting
from tests.unit.serving.pipeline_fakes import Stages, image, request

CALLER = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Collected:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == f"triptych.{name}"]


@pytest.fixture
def collected() -> Collected:
    return Collected()


async def test_a_request_is_one_tree_below_its_caller(collected: Collected) -> None:
    stages = Stages(tracer=collected.tracer)
    await stages.run(request(image("a", 2), image("b", 8), trace_headers=CALLER))
    (root,) = collected.named("request")
    assert root.parent is not None
    assert (root.parent.trace_id, root.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert root.attributes is not None
    assert (root.attributes["gen_ai.request.id"], root.attributes["triptych.outcome"]) == ("r", "completed")
    children = [span for name in ("encode", "prefill", "decode") for span in collected.named(name)]
    assert len(children) == 4
    assert {span.parent.span_id for span in children if span.parent} == {root.context.span_id}
    assert {span.attributes["provenance"] for span in collected.named("encode") if span.attributes} == {"encoded"}


async def test_each_stage_is_told_its_span(collected: Collected) -> None:
    stages = Stages(tracer=collected.tracer)
    await stages.run(request(image("a", 2)))
    sent = [stages.encoder.requests[0], stages.prefiller.requests[0], stages.decoder.requests[0]]
    for name, message in zip(("encode", "prefill", "decode"), sent, strict=True):
        (span,) = collected.named(name)
        assert message.trace_headers is not None
        assert f"{span.context.trace_id:032x}-{span.context.span_id:016x}" in message.trace_headers["traceparent"]


async def test_losses_and_failures_show(collected: Collected) -> None:
    stages = Stages(tracer=collected.tracer)
    stages.decoder.chunks, stages.decoder.losses = 4, [2]
    await stages.run(request(can_resume=True))
    (root,) = collected.named("request")
    assert [event.name for event in root.events] == ["first_token", "retry"]
    assert [span.status.is_ok for span in collected.named("decode")] == [False, True]
    stages.decoder.failures = [EngineFault("broken")]
    with pytest.raises(EngineFault):
        await stages.run(request())
    assert collected.named("request")[1].status.description == "engine_fault"


async def test_a_request_that_is_turned_away_or_left_ends_its_span(collected: Collected) -> None:
    stages = Stages(tracer=collected.tracer)
    async with stages.limits.slot(has_media=False), stages.limits.slot(has_media=False):
        with pytest.raises(Overloaded):
            await stages.run(request())
    outputs = stages.pipeline.generate(request())
    await anext(outputs)
    await outputs.aclose()
    outcomes = [span.attributes["triptych.outcome"] for span in collected.named("request") if span.attributes]
    assert outcomes == ["overloaded", "cancelled"]


def test_without_a_collector_nothing_is_made_or_sent() -> None:
    trace = RequestTrace(spans_to(None, "grpc").get_tracer("test"), None, "r", "model")
    with trace.stage("encode") as span:
        assert span.headers is None
    trace.end("completed")


def test_spans_reach_the_collector() -> None:
    with collecting() as collector:
        provider = spans_to(collector.url, "http/protobuf")
        assert isinstance(provider, TracerProvider)
        RequestTrace(provider.get_tracer("test"), None, "r", "model").end("completed")
        provider.shutdown()
        assert collector.names() == ["triptych.request"]
