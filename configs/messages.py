"""Configuration errors as lines that name the key and say what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

__all__ = ["describe"]

_SYMBOLS = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}
_BOUNDS = {"greater_than_equal": "ge", "greater_than": "gt", "less_than_equal": "le", "less_than": "lt"}

_EXPECTED = {
    "tuple_type": "a list",
    "model_type": "keys with values",
    "dict_type": "keys with values",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "byte_size": "bytes, such as 67108864 or 64MiB",
    "byte_size_unit": "bytes with a unit such as KiB, MiB or GiB",
}


def describe(error: ValidationError, root: type[BaseModel], prefix: str = "") -> str:
    """One line per mistake, such as `models[0].prefill.num_replicas: must be >= 1, got 0`.

    Args:
        error: What pydantic found.
        root: The model that was validated; unknown keys are compared with its own.
        prefix: Path of `root` inside the file.
    """
    return "\n".join(_line(details, root, prefix) for details in error.errors(include_url=False))


def _line(details: ErrorDetails, root: type[BaseModel], prefix: str) -> str:
    location, kind = details["loc"], details["type"]
    context = details.get("ctx", {})
    if kind == "extra_forbidden":
        text = "unknown key" + _suggestion(str(location[-1]), _keys_at(root, location[:-1]))
    elif kind == "missing":
        text = "required, but missing"
    elif kind in _SYMBOLS:
        text = f"must be {_SYMBOLS[kind]} {context[_BOUNDS[kind]]}, got {_shown(details['input'])}"
    elif kind in _EXPECTED:
        text = f"expected {_EXPECTED[kind]}, got {_shown(details['input'])}"
    elif kind == "literal_error":
        one_of = "one of " if " or " in context["expected"] else ""
        text = f"must be {one_of}{context['expected']}, got {_shown(details['input'])}"
    elif kind == "value_error":
        text = str(context["error"])
    else:
        text = f"{_lowered(details['msg'])}, got {_shown(details['input'])}"
    path = _path(location, prefix)
    return f"{path}: {text}" if path else text


def _path(location: Sequence[int | str], prefix: str) -> str:
    path = prefix
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _suggestion(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known keys: {', '.join(sorted(known))}" if known else ""


def _keys_at(root: type[BaseModel], location: Sequence[int | str]) -> tuple[str, ...]:
    """The keys that the model at `location` has. Parts that are no field (list positions) stay at the same model."""
    model = root
    for part in location:
        field = model.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:
            model = next(_models_in(field.annotation), model)
    return tuple(model.model_fields)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]


def _shown(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
