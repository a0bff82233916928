"""Replicas, resources and engine sizes of the stages."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.base import Count, Frozen, Seconds, SizeBytes

__all__ = ["Autoscaling", "DecodeConfig", "DeploymentConfig", "IngressConfig", "PrefillConfig", "StageConfig"]

_CPU_UTILIZATION = 0.05
_GPU_UTILIZATION = 0.9


class Autoscaling(Frozen):
    """Ray Serve's autoscaling of one deployment."""

    min_replicas: Count = Field(
        1, description="Replicas kept without load. At least one: an engine takes a minute to start."
    )
    max_replicas: Count = Field(..., description="Replicas under full load; what the cluster has room for.")
    target_ongoing_requests: Annotated[float, Field(gt=0)] = Field(
        ..., description="Requests in progress per replica that Serve aims at. Measured, below `max_ongoing_requests`."
    )
    upscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        10.0, description="How long load must last before a replica is added."
    )
    downscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        600.0, description="How long idleness must last before a replica goes, and with it its caches."
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) must be >= min_replicas ({self.min_replicas})")
        return self


class DeploymentConfig(Frozen):
    """What Ray Serve needs to know of any deployment."""

    num_replicas: Count = Field(1, description="Fixed number of replicas; leave out under `autoscaling`.")
    autoscaling: Autoscaling | None = Field(None, description="Lets Serve choose the number of replicas by load.")
    num_cpus: Annotated[float, Field(ge=0)] = Field(
        0.5,
        description="Cores that Ray reserves for a replica. Only used for placement: a fraction lets all stages "
        "start on a small machine.",
    )
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="Custom Ray resources that a replica's node must offer, such as `prefill: 1`: places stages."
    )
    max_ongoing_requests: Count = Field(
        64,
        description="Requests that one replica works on at a time; more wait in the caller's queue. Decode takes no "
        "more than its `max_num_seqs`.",
    )
    max_queued_requests: Count = Field(
        256, description="Requests that wait per caller before more are answered 503: queues are bounded."
    )
    graceful_shutdown_timeout_s: Seconds = Field(
        30.0, description="How long a stopping replica may finish its requests before it is killed."
    )
    health_check_period_s: Seconds = Field(
        5.0, description="Seconds between health checks; a dead engine is replaced after three failed ones."
    )
    health_check_timeout_s: Seconds = Field(
        30.0,
        description="Longest wait for one health check. Above the longest engine step, or live replicas are killed.",
    )

    def serve_options(self, *, num_gpus: float = 0.0) -> dict[str, Any]:
        """Keyword arguments for Serve's `Deployment.options`."""
        actor: dict[str, Any] = {"num_cpus": self.num_cpus, "resources": dict(self.resources)}
        if num_gpus:
            actor["num_gpus"] = num_gpus
        scale: dict[str, Any] = {"num_replicas": self.num_replicas}
        if self.autoscaling is not None:
            scale = {"autoscaling_config": self.autoscaling.model_dump()}
        return scale | {
            "ray_actor_options": actor,
            "max_ongoing_requests": self.max_ongoing_requests,
            "max_queued_requests": self.max_queued_requests,
            "graceful_shutdown_timeout_s": self.graceful_shutdown_timeout_s,
            "health_check_period_s": self.health_check_period_s,
            "health_check_timeout_s": self.health_check_timeout_s,
        }

    @model_validator(mode="after")
    def _one_way_to_scale(self) -> Self:
        if self.autoscaling is not None:
            if "num_replicas" in self.model_fields_set:
                raise ValueError("give num_replicas or autoscaling, not both")
            if self.autoscaling.target_ongoing_requests > self.max_ongoing_requests:
                raise ValueError(
                    f"autoscaling.target_ongoing_requests ({self.autoscaling.target_ongoing_requests:g}) must not "
                    f"exceed max_ongoing_requests ({self.max_ongoing_requests}), or no replica is ever added"
                )
        return self


class IngressConfig(DeploymentConfig):
    """The front: HTTP, rendering, the pipeline. No engine, no GPU."""

    max_ongoing_requests: Count = Field(
        256, description="Requests in progress per ingress replica, from arrival to the last token."
    )
    request_timeout_s: Seconds | None = Field(
        600.0, description="Deadline of one request over all stages, then 504. `null`: unlimited."
    )
    media_cache_bytes: Annotated[SizeBytes, Field(ge=1 << 20)] = Field(
        1 << 30,
        validate_default=True,
        description="Rendered media that each ingress replica keeps for each model, so that a repeated picture is "
        "rendered once and may come by its uuid alone.",
    )


class StageConfig(DeploymentConfig):
    """One kind of engine: its replicas and its sizes. Encoder and decode use it as it is."""

    num_gpus: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="GPUs of one replica; 0 runs the stage on the CPU. A fraction shares a GPU between stages: keep "
        "`gpu_memory_utilization` within it.",
    )
    tensor_parallel_size: Count = Field(
        1, description="Workers among which one replica splits the model. On GPUs equal to `num_gpus`."
    )
    pipeline_parallel_size: int = Field(
        1, description="Must be 1: the encoder-cache hooks run on the first pipeline rank only."
    )
    enable_prefix_caching: bool = Field(
        True,
        description="Reuse the KV blocks of equal prompt beginnings. Safe with this admission policy, hence on.",
    )
    kv_cache_memory_bytes: SizeBytes | None = Field(
        None, description="KV cache per worker. Left out, the engine takes what `gpu_memory_utilization` leaves."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Share of a GPU's memory for the engine, weights included; on the CPU a share of host memory. "
        "Left out: 0.9 of what `num_gpus` reserves, 0.05 on the CPU (several engines share one machine).",
    )
    max_num_seqs: Count = Field(32, description="Sequences in one engine step.")
    max_num_batched_tokens: Count = Field(
        2048,
        description="Tokens in one engine step, and rows of the engine's encoder cache: no larger item can be served, "
        "and `slab_bytes` grows with it.",
    )
    enforce_eager: bool = Field(
        False, description="Skip compilation and CUDA graphs: starts in seconds, runs slower. Always so on the CPU."
    )
    slab_bytes: SizeBytes = Field(
        64 << 20,
        validate_default=True,
        description="Registered memory for encodings, on the engine's device. A consumer needs the engine's encoder "
        "cache plus `inflight_bytes`; start-up refuses less and names both numbers.",
    )
    inflight_bytes: SizeBytes = Field(
        16 << 20,
        validate_default=True,
        description="Part of the slab for encodings still on their way; at least the largest item, or it is refused.",
    )

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.num_gpus > 0 else "cpu"

    @property
    def memory_utilization(self) -> float:
        """`gpu_memory_utilization` as the engine is given it."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return _GPU_UTILIZATION * min(self.num_gpus, 1.0) if self.device == "cuda" else _CPU_UTILIZATION

    def stage_options(self) -> dict[str, Any]:
        """Keyword arguments for Serve's `Deployment.options`, GPUs included."""
        return self.serve_options(num_gpus=self.num_gpus)

    @field_validator("pipeline_parallel_size")
    @classmethod
    def _one_pipeline_rank(cls, size: int) -> int:
        if size != 1:
            raise ValueError(f"must be 1, got {size}: the encoder-cache hooks run on the first pipeline rank only")
        return size

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        gpus, ranks = self.num_gpus, self.tensor_parallel_size
        if gpus > 1 and gpus != int(gpus):
            raise ValueError(f"num_gpus ({gpus:g}) must be a fraction below 1 or a whole number")
        if gpus > 0 and max(gpus, 1.0) != ranks:
            raise ValueError(f"tensor_parallel_size ({ranks}) must equal num_gpus ({gpus:g}): one worker per GPU")
        if 0 < gpus < 1 and (self.gpu_memory_utilization or 0.0) > gpus:
            raise ValueError(
                f"gpu_memory_utilization ({self.gpu_memory_utilization:g}) must not exceed num_gpus ({gpus:g}): "
                "the rest of the GPU belongs to other replicas"
            )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be >= max_num_seqs ({self.max_num_seqs})"
            )
        if not 0 < self.inflight_bytes < self.slab_bytes:
            raise ValueError(
                f"slab_bytes ({self.slab_bytes}) must exceed inflight_bytes ({self.inflight_bytes}), which must be > 0"
            )
        return self


class PrefillConfig(StageConfig):
    """The prefill stage, which also keeps what passed through it."""

    receiver_cache_bytes: SizeBytes = Field(
        256 << 20,
        validate_default=True,
        description="Processed inputs (tensors and metadata) that a prefill replica keeps, so that a repeated item may "
        "come by name alone. 0 keeps nothing.",
    )


class DecodeConfig(StageConfig):
    """The decode stage, which streams answers."""

    stream_interval_s: Annotated[float, Field(ge=0)] = Field(
        0.05,
        description="Tokens of one answer that come faster than this are sent on together: each hop costs CPU time a "
        "message, and 50 ms is what Ray Serve LLM waits too. The first and the last token wait for nothing. 0 sends "
        "every engine step's output by itself.",
    )
