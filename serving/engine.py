"""The engine that every stage runs: one builder, one way to run a request, one translation of its failures.

The three servers differ only in the transfer roles named here and in their one method.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import EngineInput
from vllm.logprobs import PromptLogprobs, SampleLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerFactory

from configs.schema import ClusterConfig, ModelConfig, StageConfig
from serving import resource_tracker
from serving.errors import (
    EncoderBusy,
    EncodingUnavailable,
    EngineFault,
    InvalidRequest,
    ItemTooLarge,
    MultiModalCacheMiss,
    StageUnavailable,
    TriptychError,
)
from serving.ports import ReservedPorts
from serving.protocol import EncodingRef, Logprobs, TokenLogprob
from serving.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

_CONNECTOR_MODULE = "ec_connector.connector"
_CONNECTOR = "TriptychECConnector"
_WORKER_EXTENSION = "ec_connector.worker.WorkerExtension"
_BUSY_RETRY_AFTER_S = 1.0
_SOCKETS = Path(os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir()))
"""Where vLLM would put its sockets; each engine gets a folder of its own there."""


class Role(StrEnum):
    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"


_EC_ROLES = {Role.ENCODE: "ec_producer", Role.PREFILL: "ec_both", Role.DECODE: "ec_consumer"}
_KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


class EngineSettings(msgspec.Struct, frozen=True):
    """All that one replica's engine is made from.

    Args:
        secret: The cluster secret.
        host: This node's address.
        traces_endpoint: Where the engine sends its spans; None makes none.
        on_death: Called once when the engine is found dead. A replica ends its process there: Serve then replaces it at
            once, instead of after several failed health checks.
        stat_loggers: Factories of vLLM stat loggers, besides vLLM's own.
    """

    role: Role
    model: ModelConfig
    cluster: ClusterConfig
    secret: bytes
    host: str
    on_death: Callable[[], None] = lambda: None
    traces_endpoint: str | None = None
    stat_loggers: tuple[StatLoggerFactory, ...] = ()

    @property
    def stage(self) -> StageConfig:
        match self.role:
            case Role.ENCODE:
                return self.model.encoder
            case Role.PREFILL:
                return self.model.prefill
            case Role.DECODE:
                return self.model.decode


class Engine:
    """One vLLM engine with its transfer connectors, owned by one replica.

    Must be built in the replica's event loop: vLLM starts its output task there. Building takes seconds to
    minutes and starts processes; `close` ends them.

    Errors of `run` are `TriptychError`s; vLLM's own never pass this class.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._ports = ReservedPorts(settings.host, 2, settings.cluster.side_channel_port_range)
        control_port, side_channel_port = self._ports.numbers
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = settings.host
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)
        self._sockets = SocketFolder(_SOCKETS)
        os.environ["VLLM_RPC_BASE_PATH"] = str(self._sockets.path)
        resource_tracker.start()
        self._llm = AsyncLLM.from_engine_args(
            _engine_args(settings, control_port), stat_loggers=list(settings.stat_loggers)
        )
        self._warm = asyncio.Lock()
        self._is_warm = False
        self._is_dead = False

    @property
    def llm(self) -> AsyncLLM:
        return self._llm

    async def check_health(self) -> None:
        """Warm the engine up on the first call, so that no replica is called healthy before it is fast.

        Raises:
            StageUnavailable: The engine is dead. Permanent for this replica.
        """
        async with self._warm:
            if not self._is_warm:
                await self._warm_up()
                self._is_warm = True
        if self._llm.errored:
            raise self._dead()

    async def _warm_up(self) -> None:
        """Run the paths whose first use takes seconds; logprobs is one of them.

        An encoder-only engine cannot sample, and start-up profiling has already run its vision tower.
        """
        if self._settings.role is Role.ENCODE:
            return
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1, prompt_logprobs=1, temperature=1.0)
        async with aclosing(self.run({"type": "token", "prompt_token_ids": [1, 2, 3]}, sampling, "warm-up")) as outputs:
            async for _ in outputs:
                pass

    async def run(
        self,
        prompt: EngineInput,
        sampling: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the engine's outputs. Closing the generator aborts the request.

        Raises:
            TriptychError: The request failed; the engine goes on, except after `StageUnavailable`.
        """
        try:
            stream = self._llm.generate(
                prompt,
                sampling,
                request_id,
                priority=priority,
                reasoning_ended=reasoning_ended,
                reasoning_parser_kwargs=reasoning_parser_kwargs,
                trace_headers=trace_headers,
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if any(completion.finish_reason == "error" for completion in output.outputs):
                        raise await self._failure(request_id, prompt)
                    yield output
        except EngineDeadError as error:
            raise self._dead() from error
        except VLLMValidationError as error:
            raise InvalidRequest(str(error), param=error.parameter) from error
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

    async def run_to_end(
        self,
        prompt: EngineInput,
        sampling: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestOutput:
        """The last output of a request."""
        last: RequestOutput | None = None
        stream = self.run(prompt, sampling, request_id, priority=priority, trace_headers=trace_headers)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                last = output
        if last is None:
            raise EngineFault("the engine ended the request without an output")
        return last

    async def announce(self, identifiers: Sequence[str]) -> dict[str, EncodingRef]:
        """Pin the slab copies of those identifiers that are held, one pin for each announcement. Unsigned."""
        found = await self._rpc("ec_announce", list(identifiers))
        return {name: to_ref(fields) for name, fields in found.items() if fields is not None}

    async def release(self, leases: Sequence[str]) -> None:
        """Drop announcement pins that nobody will read."""
        if leases:
            await self._rpc("ec_release", list(leases))

    async def stats(self) -> dict[str, float]:
        """The connector's counters and gauges on rank 0, and `requests`: those that the engine has not finished."""
        stats: dict[str, float] = await self._rpc("ec_stats")
        return stats | {"requests": self._llm.output_processor.get_num_unfinished_requests()}

    async def reject(self, request_id: str, kv_transfer_params: dict[str, Any]) -> None:
        """Let prefill free blocks that this engine was to read and will not."""
        await self._llm.notify_kv_transfer_request_rejected(request_id, kv_transfer_params)

    def close(self) -> None:
        self._llm.shutdown()
        self._ports.close()
        self._sockets.close()

    async def _rpc(self, method: str, *args: Any) -> Any:
        try:
            results = await self._llm.collective_rpc(method, args=args)
        except EngineDeadError as error:
            raise self._dead() from error
        return results[0]

    async def _failure(self, request_id: str, prompt: EngineInput) -> TriptychError:
        failures = await self._rpc("ec_failures", [request_id])
        failure = failures.get(request_id)
        if failure is None:
            return EngineFault(f"the {self._settings.role} engine failed the request")
        return _failure_error(failure["reason"], failure["identifiers"])

    def _dead(self) -> StageUnavailable:
        if not self._is_dead:
            self._is_dead = True
            self._settings.on_death()
        return StageUnavailable(f"the {self._settings.role} engine has died", retry_after_s=_BUSY_RETRY_AFTER_S)


def to_ref(fields: Mapping[str, Any]) -> EncodingRef:
    """An unsigned reference from the connector's announcement, whose other keys are not part of it."""
    return msgspec.convert({key: fields[key] for key in EncodingRef.__struct_fields__ if key in fields}, EncodingRef)


def transfer_params(refs: Mapping[str, EncodingRef]) -> dict[str, Any]:
    """`ec_transfer_params` as our connector and upstream's clients read them."""
    return {name: {"ref": msgspec.to_builtins(ref)} for name, ref in refs.items()}


def wire_logprobs(positions: SampleLogprobs | PromptLogprobs | None) -> Logprobs | None:
    """Logprobs as they cross a hop: for each position its tokens in vLLM's order, None where there are none."""
    if positions is None:
        return None
    return tuple(
        None
        if position is None
        else tuple(TokenLogprob(token, p.logprob, p.rank, p.decoded_token) for token, p in position.items())
        for position in positions
    )


def _failure_error(reason: str, identifiers: Sequence[str]) -> TriptychError:
    match reason:
        case "cache_miss":
            return MultiModalCacheMiss("no cache holds the item any more; send it with its tensors", hashes=identifiers)
        case "too_large":
            return ItemTooLarge("the item exceeds the encoder cache", hashes=identifiers)
        case "busy":
            return EncoderBusy("every slab extent is pinned", hashes=identifiers, retry_after_s=_BUSY_RETRY_AFTER_S)
        case "lost" | "timeout" | "mismatch":
            return EncodingUnavailable(f"the encoding could not be read ({reason})", hashes=identifiers)
        case _:
            return EngineFault(f"unknown connector failure {reason!r}", hashes=identifiers)


def _engine_args(settings: EngineSettings, control_port: int) -> AsyncEngineArgs:
    model, stage, role = settings.model, settings.stage, settings.role
    args: dict[str, Any] = {
        "model": model.checkpoint,
        "revision": model.revision,
        "served_model_name": [model.served_name],
        "seed": model.seed,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "trust_remote_code": model.trust_remote_code,
        "limit_mm_per_prompt": model.limit_mm_per_prompt.model_dump(),
        "reasoning_parser": model.reasoning_parser or "",
        "tensor_parallel_size": stage.tensor_parallel_size,
        "distributed_executor_backend": "uni" if stage.tensor_parallel_size == 1 else "mp",
        "enforce_eager": stage.enforce_eager or stage.device == "cpu",
        "gpu_memory_utilization": stage.memory_utilization,
        "max_num_seqs": stage.max_num_seqs,
        "max_num_batched_tokens": stage.max_num_batched_tokens,
        "kv_cache_memory_bytes": stage.kv_cache_memory_bytes,
        "block_size": model.block_size,
        "enable_prefix_caching": stage.enable_prefix_caching,
        "mm_processor_cache_gb": 0,
        "worker_extension_cls": _WORKER_EXTENSION,
        "disable_log_stats": False,
        "otlp_traces_endpoint": settings.traces_endpoint,
        "ec_transfer_config": _ec_config(settings, control_port),
    }
    if role in _KV_ROLES:
        args["kv_transfer_config"] = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role=_KV_ROLES[role],
            kv_buffer_device=stage.device,
            kv_connector_extra_config={"kv_lease_duration": settings.cluster.kv_lease_s},
        )
    return AsyncEngineArgs(**{key: value for key, value in args.items() if value is not None})


def _ec_config(settings: EngineSettings, control_port: int) -> ECTransferConfig:
    stage, cluster = settings.stage, settings.cluster
    transfer = cluster.encoding_transfer
    return ECTransferConfig(
        ec_connector=_CONNECTOR,
        ec_connector_module_path=_CONNECTOR_MODULE,
        ec_role=_EC_ROLES[settings.role],
        ec_connector_extra_config={
            "control_host": settings.host,
            # Rank r of several takes the r-th port after it; without a firewall each may pick its own.
            "control_port": control_port if cluster.side_channel_port_range else 0,
            "slab_bytes": stage.slab_bytes,
            "inflight_bytes": stage.inflight_bytes,
            "read_deadline_s": transfer.read_deadline_s,
            "quarantine_s": transfer.quarantine_s,
            "pin_lease_s": transfer.pin_lease_s,
            "busy_wait_s": transfer.busy_wait_s,
            "secret_hex": settings.secret.hex(),
            "peer_networks": list(cluster.peer_networks),
        },
    )
