"""Real engines for tests of the connector: encoders, readers, and one that does everything alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from PIL import Image

from models.registry import resolve

PROMPTS = {
    "tiny-qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>describe the image",
    "tiny-llava": "USER: <image>\ndescribe the image ASSISTANT:",
}

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def engine(
    model: str,
    role: str | None,
    extra: dict[str, Any] | None = None,
    *,
    stat_loggers: list[Any] | None = None,
    **overrides: Any,
) -> Any:
    """A small engine on the CPU. `role` is its part in encoder-cache transfers, `extra` the connector's settings."""
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args: dict[str, Any] = {
        "model": resolve(f"builtin:{model}"),
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"image": 4, "video": 0},
        "distributed_executor_backend": "uni",  # as the stages do: one process less an engine
    }
    if role is not None:
        args["worker_extension_cls"] = "ec_connector.worker.WorkerExtension"
        args["ec_transfer_config"] = ECTransferConfig(
            ec_connector="TriptychECConnector",
            ec_connector_module_path="ec_connector.connector",
            ec_role=role,
            ec_connector_extra_config={
                "control_host": "127.0.0.1",
                "read_deadline_s": 3.0,
                "slab_bytes": 32 << 20,
                "inflight_bytes": 4 << 20,
                "secret_hex": "5e" * 32,
            }
            | (extra or {}),
        )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**(args | overrides)), stat_loggers=stat_loggers)


class Pair:
    """An engine that encodes, one that reads, one that does everything alone; and prompts for them."""

    def __init__(self, model: str, size: tuple[int, int], producer: Any, consumer: Any, alone: Any = None) -> None:
        self.prompt = PROMPTS[model]
        self.size = size
        self.producer = producer
        self.consumer = consumer
        self.alone = alone or engine(model, None)
        self.count = 0

    async def render(self, *colours: str, names: list[str] | None = None) -> Any:
        """A prompt with one image per colour, tensors included; identifiers are the colours, or `names`."""
        images = [Image.new("RGB", self.size, colour) for colour in colours]
        text = self.prompt if len(colours) == 1 else " ".join([self.prompt] * len(colours))
        [prompt] = await self.alone.renderer.render_cmpl_async(
            [
                {
                    "prompt": text,
                    "multi_modal_data": {"image": images},
                    "multi_modal_uuids": {"image": names or list(colours)},
                }
            ]
        )
        return prompt

    async def run(self, engine: Any, prompt: Any, refs: dict[str, Any] | None = None, max_tokens: int = 8) -> Any:
        from vllm import SamplingParams

        extra = {"ec_transfer_params": {i: {"ref": ref} for i, ref in (refs or {}).items()}} if refs else None
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        self.count += 1
        last = None
        async for output in engine.generate(copy.copy(prompt), sampling, f"request-{self.count}"):
            last = output
        return last

    async def encode(self, colour: str) -> dict[str, Any]:
        """The producer's announcement of one item."""
        output = await self.run(self.producer, await self.render(colour), max_tokens=1)
        return dict(output.ec_transfer_params[colour])

    async def failure(self) -> dict[str, Any]:
        """Why the last request at the consumer failed. Rank 0 knows, as for the stage server."""
        request_id = f"request-{self.count}"
        found, *_ = await self.consumer.collective_rpc("ec_failures", args=([request_id],))
        return dict(found[request_id])

    async def stats(self, engine: Any) -> dict[str, Any]:
        [stats] = await engine.collective_rpc("ec_stats")
        return dict(stats)

    def close(self) -> None:
        for each in {self.producer, self.consumer, self.alone}:
            each.shutdown()
        del self.producer, self.consumer, self.alone


def without_tensors(prompt: Any) -> Any:
    """Metadata in place of tensors; nothing at all where the model has no metadata."""
    from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems

    kept = {
        modality: [
            MultiModalKwargsItem({k: e for k, e in item.items() if e.field.keep_on_cpu}) or None for item in items
        ]
        for modality, items in prompt["mm_kwargs"].items()
    }
    return prompt | {"mm_kwargs": MultiModalKwargsItems(kept)}


def tokens(output: Any) -> tuple[int, ...]:
    return tuple(output.outputs[0].token_ids)


@contextmanager
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield
