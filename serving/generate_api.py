"""`POST /generate` and the deployment handle's `generate`: prompts in, text with costs and provenance out.

Thin: rendering is `serving/generate_prompts.py`'s, everything from there on the engine client's, which vLLM's own
routes share.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.inputs import EngineInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.tracing import extract_trace_headers

from serving.client_refs import EC_PARAMS
from serving.engine_client import PipelineClient
from serving.errors import EngineFault, InvalidRequest, TriptychError
from serving.gate import Generation, current_exchange
from serving.gated import note_of
from serving.generate_prompts import PromptRenderer
from serving.generate_types import (
    ErrorBody,
    GenerateDelta,
    GenerateRequest,
    GenerateResponse,
    Item,
    LogprobEntry,
    Logprobs,
    Stages,
    Usage,
)
from serving.outputs import PositionLogprobs, vllm_logprobs
from serving.stages import Report
from serving.timing import stage_times


class GenerateService:
    """Answers `/generate` requests of one model.

    Args:
        model: The served name.
        prompts: Renders requests.
        client: Runs rendered prompts.
    """

    def __init__(self, model: str, prompts: PromptRenderer, client: PipelineClient) -> None:
        self._model = model
        self._prompts = prompts
        self._client = client

    async def complete(
        self,
        request: GenerateRequest,
        generation: Generation | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> GenerateResponse:
        """The whole answer. As `stream` otherwise."""
        async with aclosing(self.stream(request, generation, trace_headers)) as events:
            answer = [event async for event in events]
        last = answer[-1]
        if not isinstance(last, GenerateResponse):
            raise EngineFault("the stream ended before the answer was complete")
        return last.model_copy(
            update={
                "text": "".join(event.text for event in answer),
                "token_ids": [token for event in answer for token in event.token_ids],
                "logprobs": _joined([event.logprobs for event in answer]),
            }
        )

    async def stream(
        self,
        request: GenerateRequest,
        generation: Generation | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[GenerateDelta | GenerateResponse, None]:
        """The answer as it comes: deltas, then one `GenerateResponse` that also carries what is known at the end.

        Args:
            request: What to answer.
            generation: Told when the first output is there, in time for the response's headers.
            trace_headers: The caller's trace context.

        Raises:
            TriptychError: As the tree in `serving/errors.py` says; before the first event for all that admission
                and prefill can find wrong.
        """
        arrived_at = time.monotonic() if generation is None else generation.received_at
        prompt = await self._prompts.render(request)
        rendered_at = time.monotonic()
        request_id = f"gen-{request.request_id or secrets.token_hex(12)}"
        outputs = self._client.run(
            prompt,
            self._sampling(request, prompt),
            request_id,
            priority=request.priority,
            trace_headers=trace_headers,
            client_named=request.token_ids is not None,
        )
        progress = _Progress(
            {"id": request_id, "model": self._model},
            len(prompt["prompt_token_ids"]),
            arrived_at,
            rendered_at,
            tells_refs=request.return_references,
        )
        del prompt  # its pixels would stay for as long as the answer is written
        async with aclosing(outputs) as stream:
            async for output in stream:
                if isinstance(output, Report):
                    progress.begin(output)
                    if generation is not None:
                        generation.opened(note_of(output, arrived_at, rendered_at))
                elif output.finished:
                    yield progress.last(output)
                else:
                    yield progress.delta(output)

    def _sampling(self, request: GenerateRequest, prompt: EngineInput) -> SamplingParams:
        room = self._client.model_config.max_model_len - len(prompt["prompt_token_ids"])
        params = request.sampling_params.clone()
        if params.max_tokens is not None and params.max_tokens > room:
            raise InvalidRequest(
                f"max_tokens is {params.max_tokens}; the context has room for {max(room, 0)} after the prompt",
                param="sampling_params.max_tokens",
            )
        params.output_kind = RequestOutputKind.DELTA
        if request.ec_transfer_params is not None:
            params.extra_args = {**(params.extra_args or {}), EC_PARAMS: request.ec_transfer_params}
        return params


class _Progress:
    """What the events of one answer need to know of each other."""

    def __init__(
        self, names: dict[str, str], prompt_tokens: int, arrived_at: float, rendered_at: float, *, tells_refs: bool
    ) -> None:
        self._names = names
        self._prompt_tokens = prompt_tokens
        self._tells_refs = tells_refs
        self._arrived_at = arrived_at
        self._rendered_at = rendered_at
        self._first_at = rendered_at
        self._report: Report | None = None
        self._completion_tokens = 0

    def begin(self, report: Report) -> None:
        self._report = report
        self._first_at = time.monotonic()

    def delta(self, output: RequestOutput) -> GenerateDelta:
        return GenerateDelta(**self._names, **self._share(output))

    def last(self, output: RequestOutput) -> GenerateResponse:
        share, report = self._share(output), self._report
        assert report is not None  # the client yields it first
        times = stage_times(
            report,
            arrived_at=self._arrived_at,
            rendered_at=self._rendered_at,
            first_at=self._first_at,
            ended_at=time.monotonic(),
        )
        return GenerateResponse(
            **self._names,
            **share,
            finish_reason=output.outputs[0].finish_reason,
            stop_reason=output.outputs[0].stop_reason,
            prompt_logprobs=_entries(vllm_logprobs(report.prompt_logprobs)),
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
                total_tokens=self._prompt_tokens + self._completion_tokens,
                cached_tokens=report.num_cached_tokens,
            ),
            stages=Stages.model_validate(msgspec.structs.asdict(times)),
            items=[
                Item(identifier=item.identifier, modality=item.modality, provenance=item.provenance)
                for item in report.items
            ],
            ec_transfer_params={name: {"ref": msgspec.to_builtins(ref)} for name, ref in report.refs.items()}
            if self._tells_refs
            else None,
        )

    def _share(self, output: RequestOutput) -> dict[str, Any]:
        completion = output.outputs[0]
        self._completion_tokens += len(completion.token_ids)
        return {
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "logprobs": _entries(completion.logprobs),
        }


def _entries(positions: PositionLogprobs | None) -> Logprobs | None:
    if positions is None:
        return None
    return [
        None
        if position is None
        else [
            # JSON has no infinity; -9999 is what vLLM's own routes write for it.
            LogprobEntry(token_id=token, logprob=max(p.logprob, -9999.0), rank=p.rank, decoded=p.decoded_token)
            for token, p in position.items()
        ]
        for position in positions
    ]


def _joined(parts: Sequence[Logprobs | None]) -> Logprobs | None:
    present = [part for part in parts if part is not None]
    return [position for part in present for position in part] if present else None


def generate_router(service: GenerateService) -> APIRouter:
    """The route over `service`, for one model's application."""
    router = APIRouter()

    @router.post(
        "/generate",
        response_model=None,  # nothing is returned, and nothing validated, when the client has left
        summary="Generate from a prompt with images, a conversation, or rendered tokens",
        responses={
            200: {
                "model": GenerateResponse,
                "content": {"text/event-stream": {}},
                "description": "The answer, or its events with `stream`.",
            },
            **{status: {"model": ErrorBody} for status in (400, 404, 409, 500, 503, 504)},
        },
    )
    @with_cancellation  # type: ignore[untyped-decorator]
    async def generate(request: GenerateRequest, raw_request: Request) -> Response:
        exchange = current_exchange()
        generation = None if exchange is None else exchange.begin()
        trace_headers = extract_trace_headers(raw_request.headers)
        if request.stream:
            events = _server_sent(service.stream(request, generation, trace_headers), generation)
            return StreamingResponse(events, media_type="text/event-stream")
        answer = await service.complete(request, generation, trace_headers)
        return Response(answer.model_dump_json(), media_type="application/json")

    return router


async def _server_sent(
    events: AsyncGenerator[GenerateDelta | GenerateResponse, None], generation: Generation | None
) -> AsyncGenerator[bytes, None]:
    """The events as they go over the wire. The gate makes of an error what is still possible."""
    try:
        async with aclosing(events) as stream:
            async for event in stream:
                yield b"data: " + event.model_dump_json().encode() + b"\n\n"
    except TriptychError as error:
        if generation is None:
            raise
        generation.failed(error)
    yield b"data: [DONE]\n\n"
