"""A folder for the sockets that an engine makes and never removes.

vLLM puts a socket for each of its channels into the temporary folder and leaves it there. Here they get a folder that
goes with its owner, or, if that was killed, when the next one is made.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["SocketFolder"]

_PREFIX = "vllm-sockets-"


class SocketFolder:
    """A new folder under `base`, locked by this process; those of processes that have gone are removed.

    The lock is the system's, so that neither a process id that came again nor one of another container misleads.
    """

    def __init__(self, base: Path) -> None:
        for old in base.glob(f"{_PREFIX}*"):
            _remove_abandoned(old)
        self._lock = -1
        while self._lock < 0:  # whoever sweeps may take a folder in the moment before it is locked
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._lock = _locked(self.path)

    def close(self) -> None:
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _locked(folder: Path) -> int:
    """A descriptor that holds the folder's lock, or -1: somebody has the lock, or has removed the folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # removed, or another user's
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if folder.exists():
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return -1


def _remove_abandoned(folder: Path) -> None:
    lock = _locked(folder)
    if lock >= 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
