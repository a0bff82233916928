"""Which way a peer's bytes come: copied in place on one machine, or over a network.

UCX chooses in silence. Two processes on one machine get the slow lane when they differ in PID namespace, IPC
namespace or user, so the choice is worth a line in the log.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_JUDGED_AFTER = 4
"""Reads before a lane is judged: the first one connects, and never ends where it starts."""


class Lane:
    """Tells one peer's lane by where its reads end: a copy in place is complete when the call returns."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._reads = 0
        self._in_place = 0

    def count(self, *, in_place: bool) -> None:
        """Take note of one read; the fourth decides."""
        self._reads += 1
        self._in_place += in_place
        if self._reads != _JUDGED_AFTER:
            return
        if 2 * self._in_place >= self._reads:
            logger.info("reads from EC peer %s are copied in place", self._peer)
        else:
            logger.info(
                "reads from EC peer %s take a network lane; if it runs on this machine, give both the same PID and IPC"
                " namespaces and the same user",
                self._peer,
            )
