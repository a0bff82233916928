"""What "the same answer" means: everything but names and times that each server makes up for itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

LOGPROB_TOLERANCE = 1e-2

OWN = frozenset(
    {"id", "created", "created_at", "completed_at", "request_id", "item_id", "call_id", "tool_call_id"}
    | {"system_fingerprint"}
)
"""Made up anew for each answer, or a digest of one server's settings."""


def differences(got: Any, expected: Any, path: str = "", ignored: Collection[str] = OWN) -> list[str]:
    """Where `got` is not `expected`, one line each; numbers with a fraction may differ by the tolerance."""
    if isinstance(got, Mapping) and isinstance(expected, Mapping):
        return _of_mappings(got, expected, path, ignored)
    if _is_list(got) and _is_list(expected):
        if len(got) != len(expected):
            return [f"{path}: {len(got)} / {len(expected)} entries: {got!r:.300} / {expected!r:.300}"]
        pairs = enumerate(zip(got, expected, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}[{index}]", ignored)]
    if isinstance(got, float) and isinstance(expected, float):
        return [] if abs(got - expected) <= LOGPROB_TOLERANCE else [f"{path}: {got} / {expected}"]
    return [] if got == expected else [f"{path}: {got!r:.300} / {expected!r:.300}"]


def _of_mappings(got: Mapping[str, Any], expected: Mapping[str, Any], path: str, ignored: Collection[str]) -> list[str]:
    found = []
    for key in dict.fromkeys((*expected, *got)):
        place = f"{path}.{key}"
        if key in ignored:
            continue
        if key not in got or key not in expected:
            side = "the pipeline" if key in got else "vLLM"
            found.append(f"{place}: only in {side}: {got.get(key, expected.get(key))!r:.300}")
        elif key == "top_logprobs":
            found += differences(_by_token(got[key]), _by_token(expected[key]), place, ignored)
        else:
            found += differences(got[key], expected[key], place, ignored)
    return found


def _by_token(alternatives: Any) -> Any:
    """Alternatives by token, since those of nearly the same logprob may come in either order."""
    if _is_list(alternatives) and all(isinstance(entry, Mapping) and "token" in entry for entry in alternatives):
        return {entry["token"]: entry["logprob"] for entry in alternatives}
    return alternatives


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
