"""A pipeline over fake stages, and requests for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from opentelemetry.trace import NoOpTracer, Tracer

from serving.limits import Limits
from serving.metrics import PipelineMetrics
from serving.pipeline import Pipeline
from serving.protocol import DecodeChunk, EncodingRef, Feature, Metadata, Placeholder, ResolvedItem, Tensors
from serving.stages import PipelineRequest, Report
from serving.tracing import RequestTrace
from tests.fakes import FakeContinuation, FakeDecoder, FakeEncoder, FakePrefiller

GRID = {"image_grid_thw": [1, 4, 4]}


def image(identifier: str, offset: int, *, payload: Tensors | Metadata | str | None = "tensors") -> Feature:
    tensors = Tensors(frames=(b"x" * 10_000,), metadata=GRID, info={})
    return Feature("image", identifier, Placeholder(offset, 4), tensors if payload == "tensors" else payload)  # type: ignore[arg-type]


def request(*features: Feature, **changes: object) -> PipelineRequest:
    base = PipelineRequest("r", tuple(range(32)), features, b"sampling")
    return msgspec.structs.replace(base, **changes)


@dataclass
class Admitted:
    features: tuple[Feature, ...]
    refs: dict[str, EncodingRef]
    unresolved: tuple[str, ...]


class Stages:
    def __init__(
        self,
        *,
        lease_s: float = 30.0,
        prefill_takes_s: float = 0.0,
        encode_takes_s: float = 0.0,
        refuse: Exception | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        tracer = tracer or NoOpTracer()
        self.now = 0.0
        self.encoder = FakeEncoder(on_encode=lambda: self._pass(encode_takes_s))
        self.prefiller = FakePrefiller(lease_s=lease_s, on_prefill=lambda: self._pass(prefill_takes_s))
        self.decoder = FakeDecoder()
        self.limits = Limits(max_running=2, max_waiting=0)
        self.continued: list[tuple[Sequence[int], str]] = []
        self.stops_at: int | None = None
        self._refuse = refuse
        self.pipeline = Pipeline(
            self.encoder,
            self.prefiller,
            self.decoder,
            check=self._check,
            continue_from=self._continue,
            limits=self.limits,
            metrics=PipelineMetrics("test"),
            trace=lambda request: RequestTrace(tracer, request.trace_headers, request.request_id, "test"),
            handoff_margin_s=5.0,
            clock=lambda: self.now,
        )

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def _continue(self, request: PipelineRequest, token_ids: Sequence[int], text: str) -> FakeContinuation:
        self.continued.append((token_ids, text))
        return FakeContinuation(self.stops_at)

    def _check(self, request: PipelineRequest, held: Mapping[str, ResolvedItem] | None) -> Admitted:
        if self._refuse is not None:
            raise self._refuse
        bare = [f.identifier for f in request.features if f.payload is None and f.identifier not in request.refs]
        own = {name: held[name].ref for name in bare if held is not None and name in held}
        refs = dict(request.refs) | {name: ref for name, ref in own.items() if ref is not None}
        return Admitted(request.features, refs, tuple(bare) if held is None else ())

    async def run(self, request: PipelineRequest) -> tuple[Report, Sequence[DecodeChunk]]:
        report: Report | None = None
        chunks = []
        async with aclosing(self.pipeline.generate(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Report):
                    assert report is None
                    assert not chunks
                    report = output
                else:
                    chunks.append(output)
        assert report is not None
        return report, chunks
