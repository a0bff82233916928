"""One served model: its checkpoint, its engine settings, its stages and its admission policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from configs.base import Count, Frozen
from configs.stages import DecodeConfig, PrefillConfig, StageConfig
from models.registry import PREFIX, resolve

__all__ = ["AdmissionConfig", "ModalityLimits", "ModelConfig", "Requirement"]

Requirement = Literal["nothing", "metadata", "tensors"]
"""What a request must bring for an item beside its name: least strict first."""

_PATH_STARTS = ("/", "./", "../", "~")
_CPU_BLOCK_MULTIPLE = 32


class ModalityLimits(Frozen):
    """Items per prompt. Each is a limit of the API and sizes the engine's start-up profile."""

    image: Annotated[int, Field(ge=0)] = Field(8, description="Images per prompt.")
    video: Annotated[int, Field(ge=0)] = Field(
        0, description="Videos per prompt. 0 unless needed: one video can fill the encoder cache."
    )
    audio: Annotated[int, Field(ge=0)] = Field(0, description="Audio clips per prompt.")


class AdmissionConfig(Frozen):
    """Additions to the admission policy that is derived from the model."""

    stricter: dict[str, Requirement] = Field(
        {},
        description="Per modality, what each item must bring: `nothing`, `metadata` (feature data even on cache hits) "
        "or `tensors`. May only be stricter than what the model needs; start-up refuses a laxer one.",
    )


class ModelConfig(Frozen):
    """One model and the three stages that serve it."""

    model: str = Field(
        ..., min_length=1, description="`builtin:NAME`, the path of a checkpoint, or a name on the model hub."
    )
    name: str = Field("", description="Name that clients send as `model`. Left out, it is `model` itself.")
    revision: str | None = Field(None, description="Hub revision. Pin one: all nodes must load the same weights.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Element type of weights, KV cache and encodings. `auto` takes the checkpoint's."
    )
    max_model_len: Count | None = Field(
        None, description="Longest prompt plus answer, in tokens. Left out, the checkpoint's own, which needs KV cache."
    )
    block_size: Count | None = Field(
        None,
        description="Tokens per KV block, the same for prefill and decode since whole blocks are handed over. "
        "A multiple of 32 on the CPU. Left out, the engine's default.",
    )
    seed: Annotated[int, Field(ge=0)] = Field(
        0, description="Seed of every engine, so that replicas answer sampled requests alike."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the checkpoint. Off: safer.")
    trust_request_mm_kwargs: bool = Field(
        False,
        description="Let requests say how their media are loaded and processed (`mm_processor_kwargs`, "
        "`media_io_kwargs`). Off they are refused: they can make one small picture as costly as the largest.",
    )
    trust_request_chat_template: bool = Field(
        False,
        description="Let requests bring a chat template. Off they are refused: a template is a program.",
    )
    limit_mm_per_prompt: ModalityLimits = Field(ModalityLimits(), description="Items per prompt, by modality.")
    tool_call_parser: str | None = Field(None, description="vLLM's parser for tool calls; enables tool choice.")
    reasoning_parser: str | None = Field(None, description="vLLM's parser that separates reasoning from answers.")
    chat_template: str | None = Field(None, description="Path of a chat template, where the checkpoint has none.")
    encoder: StageConfig = Field(StageConfig(), description="The vision tower.")
    prefill: PrefillConfig = Field(PrefillConfig(), description="The language model over the prompt.")
    decode: DecodeConfig = Field(DecodeConfig(), description="Token generation.")
    admission: AdmissionConfig = Field(AdmissionConfig(), description="Additions to the derived admission policy.")

    @property
    def served_name(self) -> str:
        return self.name or self.model

    @property
    def checkpoint(self) -> str:
        """What vLLM is given as `model`: a directory or a hub name."""
        return str(Path(self.model).expanduser().resolve()) if _is_path(self.model) else resolve(self.model)

    @property
    def is_local(self) -> bool:
        """Whether the checkpoint is on disk, so that nothing needs the model hub."""
        return self.model.startswith(PREFIX) or _is_path(self.model)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return self.prefill.device

    @property
    def stages(self) -> dict[str, StageConfig]:
        return {"encoder": self.encoder, "prefill": self.prefill, "decode": self.decode}

    @field_validator("model")
    @classmethod
    def _exists(cls, model: str) -> str:
        if _is_path(model):
            if not (Path(model).expanduser() / "config.json").is_file():
                raise ValueError(f"no checkpoint at {model}: there is no config.json")
        else:
            resolve(model)
        return model

    @field_validator("chat_template")
    @classmethod
    def _template_exists(cls, template: str | None) -> str | None:
        if template is not None and not Path(template).is_file():
            raise ValueError(f"no file at {template}")
        return template

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        devices = {name: stage.device for name, stage in self.stages.items()}
        if len(set(devices.values())) > 1:
            shown = ", ".join(f"{name} {device}" for name, device in devices.items())
            raise ValueError(f"all stages of a model must use the same kind of device, got {shown}; see num_gpus")
        if self.device == "cpu" and self.block_size is not None and self.block_size % _CPU_BLOCK_MULTIPLE:
            raise ValueError(f"block_size ({self.block_size}) must be a multiple of {_CPU_BLOCK_MULTIPLE} on the CPU")
        return self


def _is_path(model: str) -> bool:
    return model.startswith(_PATH_STARTS) or model == "."
