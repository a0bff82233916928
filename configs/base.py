"""What every part of the configuration shares: frozen pydantic models in which unknown keys are errors."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ByteSize, ConfigDict, Field

__all__ = ["ConfigError", "Count", "Frozen", "Seconds", "SizeBytes"]

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
SizeBytes = Annotated[ByteSize, Field(ge=0)]
"""Bytes, as a number or with a unit: `67108864`, `64MiB`, `2GiB`."""


class ConfigError(Exception):
    """A configuration that cannot work. The message names each key and says what would be right."""


class Frozen(BaseModel):
    """Base of all configuration objects. Every field carries its reason as `description`; the docs are made of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
