"""vLLM's `EngineClient` over the pipeline: what its HTTP front talks to where there is no engine.

Errors leave `run` as `TriptychError`s. `generate`, which vLLM's handlers call, also tells them to the gate, so
that they become the response's status on every route, streaming or not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from serving.answering import RenderedItems, one_for_each_answer
from serving.client_refs import client_refs
from serving.engine_controls import NoEngineControls
from serving.engine_input import features_of
from serving.errors import (
    DuplicateRequest,
    EngineFault,
    InvalidRequest,
    StageUnavailable,
    TriptychError,
    Unsupported,
)
from serving.fanout import fan_out
from serving.gate import current_exchange
from serving.gated import gated
from serving.naming import ItemNames, Renamed
from serving.outputs import Answer
from serving.protocol import DecodeChunk
from serving.render import ModelFront
from serving.stages import PipelineRequest, Report

logger = logging.getLogger(__name__)

TASKS = ("generate",)
TOKEN_IN_ROUTE = "/inference/v1/generate"


class Generator(Protocol):
    """`serving.pipeline.Pipeline`, or a test's stand-in."""

    def generate(self, request: PipelineRequest) -> AsyncGenerator[Report | DecodeChunk, None]: ...


class PipelineClient(NoEngineControls):
    """Generates through the pipeline of one model.

    Args:
        front: The model's front-end objects.
        pipeline: Runs rendered requests.
        names: Knows the items that clients named.
        request_timeout_s: Deadline of one request over all stages; None means unlimited.
        check_stages: Raises a `TriptychError` when the model cannot be served now; `/health` asks it.
    """

    def __init__(
        self,
        front: ModelFront,
        pipeline: Generator,
        names: ItemNames,
        *,
        request_timeout_s: float | None,
        check_stages: Callable[[], Awaitable[None]],
    ) -> None:
        self.vllm_config = front.vllm_config
        self.model_config = front.vllm_config.model_config
        self.renderer = front.renderer
        self.input_processor = front.input_processor
        self._front = front
        self._pipeline = pipeline
        self._names = names
        self._timeout_s = request_timeout_s
        self._check_stages = check_stages
        self._active: dict[str, asyncio.Event] = {}

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one prompt for vLLM's front.

        Not itself a coroutine: the generation is announced to the gate when vLLM creates it, before it runs any
        of a request's prompts. `session_id` and `kv_hints` are hints to engines that route by themselves.
        """
        exchange = current_exchange()
        outputs = self.run(
            prompt,
            sampling_params,
            request_id,
            lora_request=lora_request,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            trace_headers=trace_headers,
            client_named=exchange is not None and exchange.path.endswith(TOKEN_IN_ROUTE),
        )
        return gated(outputs, None if exchange is None else exchange.begin())

    async def run(
        self,
        prompt: EngineInput,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        client_named: bool = False,
    ) -> AsyncGenerator[Report | RequestOutput, None]:
        """Yield one `Report`, then outputs of the kind that `sampling_params` asks for.

        Args:
            client_named: Whether the prompt's item identifiers are the client's own, as in token-in requests.

        Raises:
            TriptychError: As the tree in `serving/errors.py` says. Nothing else but cancellation.
        """
        if lora_request is not None:
            raise Unsupported("LoRA adapters are not served by this pipeline", param="model")
        if data_parallel_rank is not None:
            raise Unsupported("requests cannot choose a replica", param="data_parallel_rank")
        if not isinstance(prompt, dict) or "type" not in prompt:
            raise Unsupported("only rendered prompts are served", param="prompt")
        if request_id in self._active:
            raise DuplicateRequest(f"a request with the id {request_id!r} is running", param="request_id")
        requests, renamed = await self._prepare(prompt, sampling_params, request_id, client_named=client_named)
        requests = [
            msgspec.structs.replace(
                request,
                priority=priority,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
                trace_headers=trace_headers,
            )
            for request in requests
        ]
        answer = Answer(request_id, prompt["prompt_token_ids"], sampling_params.output_kind, len(requests))
        del prompt  # its pixels would stay for as long as the answer is written
        stop = self._active[request_id] = asyncio.Event()
        try:
            async with aclosing(self._stream(requests, answer, stop)) as outputs:
                async for output in outputs:
                    yield renamed.report(output) if isinstance(output, Report) else output
        except TriptychError as error:
            told = renamed.error(error)
            if told is error:
                raise
            raise told from error
        except Exception as error:
            logger.exception("request %s failed in the pipeline", request_id)
            raise EngineFault("the pipeline failed the request") from error
        finally:
            del self._active[request_id]

    async def _prepare(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, *, client_named: bool
    ) -> tuple[list[PipelineRequest], Renamed]:
        """The pipeline's requests for a rendered prompt, one for each answer, and the way to the client's names."""
        refs, extra_args = client_refs(sampling_params.extra_args)
        params = sampling_params.clone()
        params.extra_args = extra_args
        params.max_tokens = self._validated_max_tokens(prompt, params, request_id)
        cache_salt = prompt.get("cache_salt")
        features = features_of(prompt, self._front.metadata_fields)
        renamed = await self._names.rename(features, cache_salt, client_named=client_named, refs=refs)
        template = PipelineRequest(
            request_id=request_id,
            token_ids=tuple(prompt["prompt_token_ids"]),
            features=renamed.features,
            sampling=b"",
            refs=renamed.refs(refs),
            cache_salt=cache_salt,
            timeout_s=self._timeout_s,
            rendered=not client_named,
            # What a client named itself it has sent itself: no cache of ours keeps it.
            recall=None if client_named else RenderedItems(prompt, self._front.metadata_fields),
        )
        return one_for_each_answer(template, params), renamed

    async def _stream(
        self, requests: list[PipelineRequest], answer: Answer, stop: asyncio.Event
    ) -> AsyncGenerator[Report | RequestOutput, None]:
        """The outputs. Takes the requests out of the list, so that nobody but the pipeline holds them."""
        reported = False
        count = len(requests)
        streams = fan_out(lambda index: self._pipeline.generate(requests.pop(0)), count, stop)
        async with aclosing(streams) as chunks:
            async for index, chunk in chunks:
                if isinstance(chunk, Report):
                    answer.begin(chunk)
                    if not reported:
                        yield chunk
                        reported = True
                elif (output := answer.add(index, chunk)) is not None:
                    yield output
        if not answer.is_finished:
            if not stop.is_set():
                raise EngineFault("a stage ended the stream before the answer was complete")
            yield answer.abort()

    def _validated_max_tokens(self, prompt: Any, params: SamplingParams, request_id: str) -> int | None:
        """What every engine would check of the request, before any stage is asked; and the token limit that results.

        Raises:
            InvalidRequest: vLLM refuses the parameters or the prompt's length. Permanent.
        """
        try:
            checked = self.input_processor.process_inputs(request_id, prompt, params, supported_tasks=TASKS)
        except VLLMValidationError as error:
            raise InvalidRequest(error.args[0], param=error.parameter) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise InvalidRequest(str(error)) from error
        max_tokens: int | None = checked.sampling_params.max_tokens
        return max_tokens

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests of this process where they stand; their callers get what there is, with reason `abort`."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._active:
                self._active[name].set()

    async def check_health(self) -> None:
        await self._check_stages()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return TASKS

    async def reset_mm_cache(self) -> None:
        """Empty this process's cache of processed media. The stages' caches hold encodings and stay."""
        await self.renderer.clear_mm_cache_async()

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        """Always False: stages fail and recover behind the pipeline, which answers each request for itself."""
        return False

    @property
    def dead_error(self) -> BaseException:
        return StageUnavailable("a stage has no live replica")
