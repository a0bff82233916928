"""The operations of vLLM's `EngineClient` that steer an engine: a front without one refuses them."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.engine.protocol import EngineClient

from serving.errors import Unsupported


class NoEngineControls(EngineClient):  # type: ignore[misc]
    """Base for clients that have no single engine behind them: each control names what to do instead, or why not."""

    def encode(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise Unsupported("pooling models are not served by this pipeline")

    async def notify_kv_transfer_request_rejected(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported("clients cannot bring KV blocks to this pipeline")

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported("profile a stage's engine in its own replica")

    async def stop_profile(self) -> None:
        raise Unsupported("profile a stage's engine in its own replica")

    async def reset_encoder_cache(self) -> None:
        raise Unsupported("peers may be reading the stages' encoder caches")

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        raise Unsupported("each prefill replica has a prefix cache of its own")

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported("stages are scaled, not put to sleep")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        raise Unsupported("stages are scaled, not put to sleep")

    async def release_kv_cache_memory(self) -> None:
        raise Unsupported("stages are scaled, not put to sleep")

    async def add_lora(self, lora_request: Any) -> bool:
        raise Unsupported("LoRA adapters are not served by this pipeline")

    async def pause_generation(self, **kwargs: Any) -> None:
        raise Unsupported("stages are scaled, not paused")

    async def resume_generation(self) -> None:
        raise Unsupported("stages are scaled, not paused")

    async def is_tracing_enabled(self) -> bool:
        """Always: callers' trace context goes along to whoever makes spans."""
        return True

    async def do_log_stats(self) -> None:
        """Nothing to log: the engines are in other processes."""

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return False
