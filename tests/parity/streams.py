"""Streams put together again, so that how many tokens came at once does not matter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def merged_chat(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The choices and the usage of a chat stream."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"usage": None}
    for chunk in chunks:
        whole["model"] = chunk["model"]
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for told in ("prompt_token_ids", "prompt_text"):
            if chunk.get(told) is not None:
                whole[told] = chunk[told]
        for part in chunk["choices"]:
            _add_chat(choices.setdefault(part["index"], {"text": {}, "tools": {}, "roles": []}), part)
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def _add_chat(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part["delta"].items():
        if isinstance(value, str) and name != "role":
            choice["text"][name] = choice["text"].get(name, "") + value
        elif name == "role" and value:
            choice["roles"].append(value)
        elif name == "tool_calls":
            for call in value or ():
                told = choice["tools"].setdefault(call["index"], {"name": "", "arguments": ""})
                for field in told:
                    told[field] += call["function"].get(field) or ""
    _add_common(choice, part)
    if part.get("logprobs"):
        choice.setdefault("logprobs", []).extend(part["logprobs"]["content"])


def _add_common(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name in ("finish_reason", "stop_reason"):
        if part.get(name) is not None:
            choice[name] = part[name]
    for name in ("token_ids", "prompt_token_ids"):
        if part.get(name) is not None:
            choice[name] = choice.get(name, []) + part[name]


def merged_completion(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The choices and the usage of a completion stream."""
    choices: dict[int, dict[str, Any]] = {}
    whole: dict[str, Any] = {"usage": None}
    for chunk in chunks:
        whole["model"] = chunk["model"]
        whole["usage"] = chunk.get("usage") or whole["usage"]
        for part in chunk["choices"]:
            choice = choices.setdefault(part["index"], {"text": ""})
            choice["text"] += part["text"]
            _add_common(choice, part)
            for name, values in (part.get("logprobs") or {}).items():
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(values or ())
    return whole | {"choices": [choices[index] for index in sorted(choices)]}
