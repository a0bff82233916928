"""Tells the gate how a generation goes, while vLLM's handlers take its outputs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http import HTTPStatus

import msgspec
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput

from serving.errors import TriptychError
from serving.gate import Generation, Note
from serving.stages import Report
from serving.timing import stage_times


class Refused(GenerationError):  # type: ignore[misc]
    """An error of ours as vLLM's handlers take it without logging a traceback. The gate writes the response."""

    def __init__(self, error: TriptychError) -> None:
        super().__init__(error.message)
        self.status_code = HTTPStatus(error.http_status)


async def gated(
    outputs: AsyncGenerator[Report | RequestOutput, None], generation: Generation | None
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs alone; the gate learns when the first is there, or what went wrong.

    Raises:
        Refused: In place of every `TriptychError`.
    """
    rendered_at = time.monotonic()
    report: Report | None = None
    try:
        async with aclosing(outputs) as stream:
            async for output in stream:
                if isinstance(output, Report):
                    report = output
                    continue
                if generation is not None and report is not None:
                    generation.opened(note_of(report, generation.received_at, rendered_at))
                yield output
    except TriptychError as error:
        if generation is not None:
            generation.failed(error)
        raise Refused(error) from error


def note_of(report: Report, arrived_at: float, rendered_at: float) -> Note:
    """What a response's headers say of a generation whose first output is there."""
    times = stage_times(report, arrived_at=arrived_at, rendered_at=rendered_at, first_at=time.monotonic())
    stages = [(stage, ms) for stage, ms in msgspec.structs.asdict(times).items() if ms is not None]
    return Note(stages, [(item.identifier, item.modality, item.provenance) for item in report.items])
