"""Ports that stay ours between the moment they are chosen and the moment a library listens on them.

An engine takes a minute to start, and binds its side channel near the end. A port that was merely free at the
beginning may by then be some other process's connection, and vLLM's engine waits for ever when its listener could not
bind. A reserved port is held by a socket that is bound but never listens: the system then gives it to nobody, and a
library that binds with SO_REUSEADDR, as ZeroMQ does, still may.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from typing import Self

from serving.errors import StageUnavailable


class ReservedPorts:
    """Ports of one address, held until `close`.

    Args:
        host: The address to bind.
        count: Ports needed.
        allowed: First and last port to choose from; None leaves the choice to the system.

    Raises:
        StageUnavailable: Fewer ports of the range are free.
    """

    def __init__(self, host: str, count: int, allowed: tuple[int, int] | None) -> None:
        self._sockets: list[socket.socket] = []
        candidates = [0] * count if allowed is None else list(range(allowed[0], allowed[1] + 1))
        random.shuffle(candidates)  # replicas that start together would otherwise all begin with the same one
        for port in candidates:
            if len(self._sockets) == count:
                break
            self._try(host, port)
        if len(self._sockets) < count:
            self.close()
            raise StageUnavailable(f"side_channel_port_range {allowed} has fewer than {count} free ports")

    @property
    def numbers(self) -> Sequence[int]:
        return [reserved.getsockname()[1] for reserved in self._sockets]

    def close(self) -> None:
        for reserved in self._sockets:
            reserved.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _try(self, host: str, port: int) -> None:
        """Bind without SO_REUSEADDR, so that nobody else's reservation counts as free, and only then allow it."""
        reserved = socket.socket()
        try:
            reserved.bind((host, port))
        except OSError:
            reserved.close()
            return
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._sockets.append(reserved)
