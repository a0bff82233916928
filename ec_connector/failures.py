"""Why requests failed, kept until the stage server asks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ec_connector.protocol import Fail

_KEPT = 1024


class Failures:
    """The newest failures, by vLLM's internal request id."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, Fail] = OrderedDict()

    def add(self, failure: Fail) -> None:
        self._failures[failure.request_id] = failure
        while len(self._failures) > _KEPT:
            self._failures.popitem(last=False)

    def take(self, request_ids: Sequence[str] | None) -> dict[str, dict[str, Any]]:
        """Remove and return `reason` and `identifiers` of these requests (None: all), keyed by the ids given.

        A request is known here by vLLM's internal id: the external one, `-` and 8 characters.
        """
        taken = {}
        for internal in list(self._failures):
            external = internal if request_ids is None else _match(internal, request_ids)
            if external is not None:
                failure = self._failures.pop(internal)
                taken[external] = {
                    "reason": failure.reason.value,
                    "identifiers": list(failure.identifiers),
                }
        return taken


def _match(internal: str, request_ids: Sequence[str]) -> str | None:
    return next((r for r in request_ids if internal == r or (internal[:-9] == r and internal[-9] == "-")), None)
