"""The whole configuration as one frozen object, and the only code that reads files or sets the environment for it.

`load` is what the application's builder and `python -m configs.check` call. The parts live beside this file
(`cluster.py`, `models.py`, `stages.py`); other packages import all names from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from configs.base import ConfigError, Frozen
from configs.cluster import ClusterConfig, EncodingTransferConfig, MediaConfig
from configs.messages import describe
from configs.models import AdmissionConfig, ModalityLimits, ModelConfig, Requirement
from configs.stages import Autoscaling, DecodeConfig, DeploymentConfig, IngressConfig, PrefillConfig, StageConfig
from configs.tracing import TracingConfig

__all__ = [
    "AdmissionConfig",
    "Autoscaling",
    "ClusterConfig",
    "ConfigError",
    "DecodeConfig",
    "DeploymentConfig",
    "EncodingTransferConfig",
    "IngressConfig",
    "MediaConfig",
    "ModalityLimits",
    "ModelConfig",
    "PipelineConfig",
    "PrefillConfig",
    "Requirement",
    "StageConfig",
    "TracingConfig",
    "describe",
    "load",
    "read_yaml",
    "replica_environment",
]


class PipelineConfig(Frozen):
    """Everything the application is built from: the `args` of a Serve application."""

    models: tuple[ModelConfig, ...] = Field(
        ..., description="The models to serve, each with stages of its own behind one ingress."
    )
    ingress: IngressConfig = Field(IngressConfig(), description="The HTTP front that all models share.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="Addresses, trust and leases.")
    media: MediaConfig = Field(MediaConfig(), description="What is fetched and decoded for clients.")
    tracing: TracingConfig = Field(TracingConfig(), description="Where spans of requests go.")

    @model_validator(mode="after")
    def _models_differ(self) -> Self:
        if not self.models:
            raise ValueError("models: give at least one")
        names = [model.served_name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"models: the name {name!r} is served twice; give one of them another name")
        return self


def load(source: str | Path | Mapping[str, Any]) -> PipelineConfig:
    """The configuration in `source`: the `args` mapping itself, or a file that holds them.

    A file may be a Serve config (`args` of its one application) or the mapping alone.

    Raises:
        ConfigError: Naming every wrong key and what would be right.
    """
    values: Any = source if isinstance(source, Mapping) else _application_args(read_yaml(Path(source)))
    try:
        return PipelineConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error, PipelineConfig)) from error


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        ConfigError: There is no such file, or it is not YAML; with the line.
    """
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error


def _application_args(content: Any) -> Any:
    if not isinstance(content, Mapping) or "applications" not in content:
        return content
    applications = content["applications"]
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], Mapping):
        raise ConfigError("applications: expected a list of exactly one application")
    return applications[0].get("args") or {}


def replica_environment(config: PipelineConfig) -> dict[str, str]:
    """Environment variables that every replica of the application must start with.

    They are read by libraries when they are imported, hence not constructor arguments.
    """
    environment = {
        # Usage reports would be the only connections that leave the cluster.
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM would keep responses in one ingress process, where other replicas do not find them: refused instead.
        "VLLM_ENABLE_RESPONSES_API_STORE": "0",
        "VLLM_IMAGE_FETCH_TIMEOUT": str(config.media.fetch_timeout_s),
        "VLLM_VIDEO_FETCH_TIMEOUT": str(config.media.fetch_timeout_s),
        "VLLM_AUDIO_FETCH_TIMEOUT": str(config.media.fetch_timeout_s),
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": str(config.media.max_download_bytes >> 20),
        "VLLM_MAX_IMAGE_PIXELS": str(config.media.max_image_pixels),
        # Serve's threads of its own cost a tenth of a request's CPU time. Nothing here blocks a replica's loop.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        # Answers have no limit of their own; one with every prompt token's logprobs has megabytes.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 30),
    }
    if config.tracing.otlp_endpoint is not None:
        environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = config.tracing.protocol
    if all(model.is_local for model in config.models):
        environment["HF_HUB_OFFLINE"] = "1"
    if any(model.device == "cpu" for model in config.models):
        # By default every engine's worker binds its threads to the same first core: 20 s a request instead of 70 ms.
        environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        # Lets a single worker run inside the engine's own process, as on GPUs: 430 MiB and one start-up less an engine,
        # and no shared-memory queue that a killed process leaves behind. Without it the CPU platform insists on two.
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return environment
