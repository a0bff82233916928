"""`python -m configs.document > docs/configuration.md`: the reference of all keys, from the schema itself."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.schema import DecodeConfig, IngressConfig, PipelineConfig, PrefillConfig, StageConfig

__all__ = ["markdown"]

_INTRODUCTION = """# Configuration

One YAML file, which is a Ray Serve config file as it stands: `serve run configs/pipeline.yaml`. What Serve itself reads
(`http_options`, `proxy_location`, ...) is described in Ray's documentation; the keys below stand under
`applications[0].args`. Unknown keys are errors. `python -m configs.check FILE` judges a file in a second, names every
wrong key and says what would be right; `make serve` and `make demo` run it first.

Units are part of the names: `_s` seconds, `_bytes` bytes (a number, or text such as `64MiB` or `2GiB`), `_tokens`
tokens. This file is written by `python -m configs.document` from `configs/`; a test compares the two.
"""

_TITLES = {
    "": "`args`",
    "models[]": "`models[]`: one model",
    "models[].encoder": "`models[].encoder`, `.prefill`, `.decode`: one stage",
}


def markdown() -> str:
    """The whole of docs/configuration.md."""
    return "\n".join([_INTRODUCTION, *_sections(PipelineConfig, "", set())])


def _sections(model: type[BaseModel], path: str, done: set[type[BaseModel]]) -> Iterator[str]:
    """A table for `model`, then those of the models that its fields hold; each model once."""
    if model in done:
        return
    done.add(model)
    inherited = _inherited(model, done)
    yield f"## {_TITLES.get(path, f'`{path}`')}\n"
    yield f"{(model.__doc__ or '').strip()}{inherited and f' {inherited}'}\n"
    yield "| key | value | default | what it is for |\n|---|---|---|---|"
    fields = {key: field for key, field in model.model_fields.items() if not (inherited and _is_plain(model, key))}
    yield "".join(f"{_row(key, field)}\n" for key, field in fields.items())
    for key, field in model.model_fields.items():
        for nested, is_list in _models_in(field.annotation):
            yield from _sections(nested, f"{path}.{key}".lstrip(".") + ("[]" if is_list else ""), done)


def _inherited(model: type[BaseModel], done: set[type[BaseModel]]) -> str:
    if model in (PrefillConfig, DecodeConfig) and StageConfig in done:
        return "All keys of the encoder stage, and:"
    if model is IngressConfig:
        return "The replica keys of a stage (`num_replicas` to `health_check_timeout_s`); defaults that differ, and:"
    return ""


def _is_plain(model: type[BaseModel], key: str) -> bool:
    """Whether the key is the same in the model's base and needs no second row."""
    base = model.__mro__[1]
    inherited: FieldInfo | None = typing.cast(type[BaseModel], base).model_fields.get(key)
    return inherited is not None and inherited.description == model.model_fields[key].description


def _row(key: str, field: FieldInfo) -> str:
    return f"| `{key}` | {_kind(field.annotation)} | {_default(field)} | {field.description} |"


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "see below"
    if value is None or value == "":
        return "left out"
    if isinstance(value, tuple | dict):
        return f"`{list(value)}`" if isinstance(value, tuple) else "`{}`"
    if _kind(field.annotation).startswith("bytes"):
        return f"`{ByteSize(value).human_readable()}`"
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _kind(annotation: Any) -> str:
    """The value that a key takes, in a reader's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_kind(argument) for argument in arguments if argument is not types.NoneType)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"{_kind(arguments[0])} to {_kind(arguments[1])}"
    names = {int: "integer", float: "number", str: "text", bool: "true or false", ByteSize: "bytes", Path: "path"}
    return names.get(annotation, "keys")


def _models_in(annotation: Any) -> Iterator[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, False
    for argument in get_args(annotation):
        for model, is_list in _models_in(argument):
            yield model, is_list or get_origin(annotation) is tuple


if __name__ == "__main__":
    print(markdown(), end="")
