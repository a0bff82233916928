"""The decode stage: pulls prefill's KV blocks and generates tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from decode.coalescing import coalesced
from serving.engine import Engine, EngineSettings, transfer_params, wire_logprobs
from serving.engine_input import decode_sampling, to_engine_input
from serving.errors import HandoffExpired
from serving.protocol import DecodeChunk, DecodeRequest, KVHandoff, decode, encode
from serving.references import ReferenceSigner


class DecodeServer:
    """Continues a prefilled prompt. A hand-off is read once, and never after its deadline.

    Args:
        stream_interval_s: Chunks of one answer that come faster than this are joined.
    """

    def __init__(
        self,
        make_settings: Callable[[], EngineSettings],
        make_signer: Callable[[], ReferenceSigner],
        stream_interval_s: float,
    ) -> None:
        self._engine = Engine(make_settings())
        self._signer = make_signer()
        self._stream_interval_s = stream_interval_s

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def decode(self, data: bytes | DecodeRequest) -> AsyncGenerator[bytes, None]:
        """Stream the answer, at most a chunk an interval.

        Yields:
            The bytes of a `DecodeChunk`; the last has `finished` set.

        Raises:
            HandoffExpired: The hand-off's deadline passed on the way here. Nothing was read: prefill again.
            TriptychError: The engine failed the request.
        """
        request = decode(DecodeRequest, data)
        refs = {
            name: ref for name, ref in request.refs.items() if self._signer.verify(ref, cache_salt=request.cache_salt)
        }
        prompt = to_engine_input(request.token_ids, request.features, request.cache_salt)
        sampling = _decode_sampling(request, transfer_params(refs))
        if time.time() >= request.handoff_expires_at:
            raise HandoffExpired("prefill's lease ended before decode could read its KV blocks")
        stream = self._engine.run(
            prompt,
            sampling,
            request.request_id,
            priority=request.priority,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            trace_headers=request.trace_headers,
        )
        async with aclosing(coalesced(_chunks(stream), self._stream_interval_s)) as chunks:
            async for chunk in chunks:
                yield encode(chunk)

    async def reject(self, request_id: str, handoff: bytes | KVHandoff) -> None:
        """Let prefill free the blocks of a hand-off that will not be read."""
        await self._engine.reject(request_id, decode(KVHandoff, handoff).params)

    async def stats(self) -> dict[str, float]:
        return await self._engine.stats()

    def __del__(self) -> None:
        if hasattr(self, "_engine"):  # the constructor may have failed
            self._engine.close()


def _decode_sampling(request: DecodeRequest, ec_params: dict[str, Any]) -> SamplingParams:
    """The client's parameters without what prefill has already answered.

    `skip_reading_prefix_cache` follows from `prompt_logprobs` and survives clone; left set, decode would compute
    the whole prompt again. What has been answered already counts against the limits.
    """
    sampling = decode_sampling(request.sampling)
    if sampling.max_tokens is not None:
        sampling.max_tokens -= request.num_answered
    sampling.min_tokens = max(sampling.min_tokens - request.num_answered, 0)
    if request.tokens_only:
        sampling.stop = []
        sampling.detokenize = False
    sampling.prompt_logprobs = None
    sampling.skip_reading_prefix_cache = None
    sampling.n = 1
    extra = dict(sampling.extra_args or {}, kv_transfer_params=request.handoff.params)
    sampling.extra_args = extra | ({"ec_transfer_params": ec_params} if ec_params else {})
    return sampling


async def _chunks(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[DecodeChunk, None]:
    async with aclosing(outputs) as stream:
        async for output in stream:
            yield _chunk(output)


def _chunk(output: RequestOutput) -> DecodeChunk:
    completion = output.outputs[0]
    return DecodeChunk(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finished=output.finished,
        cumulative_logprob=completion.cumulative_logprob,
        logprobs=wire_logprobs(completion.logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        weight_version=completion.weight_versions[-1].version if completion.weight_versions else None,
    )
