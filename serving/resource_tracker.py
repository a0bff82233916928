"""Python's tracker of shared memory and semaphores, where it outlives what it tracks.

An engine's processes share one tracker, which removes their names from the system once the last of them has gone.
Ray ends the process group of a worker that was killed, and with it the tracker, before it has removed anything: here
it gets a process group of its own.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import resource_tracker
from typing import Any

__all__ = ["start"]

_MAIN = "from multiprocessing.resource_tracker import main; main({read})"


def start() -> int:
    """Start this process' tracker, unless it runs; children that `multiprocessing` spawns use it too.

    Returns:
        The tracker's process id.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is None:
        read, write = os.pipe()
        try:
            os.set_inheritable(read, True)
            command = [sys.executable, "-c", _MAIN.format(read=read)]
            tracker._pid = os.posix_spawn(sys.executable, command, os.environ, setpgroup=0)
            tracker._fd = write
        finally:
            os.close(read)
    return int(tracker._pid)
