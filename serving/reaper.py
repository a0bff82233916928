"""`python -m serving.reaper MARK DIRECTORY`: clean up after a local pipeline, also when its starter was killed.

Every process of the pipeline inherits the mark in its environment. This one waits until its standard input ends,
which the system sees to when the starter goes in whatever way; then it ends the marked processes by id (asking
first) and removes the directory. It carries no mark itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["MARK", "main", "marked"]

MARK = "TRIPTYCH_LOCAL_PIPELINE"
"""Name of the environment variable that holds the mark."""

_ASK_S = 10.0
_KILL_S = 20.0
_POLL_S = 0.2
"""The processes are nobody's children here, some not even known by id yet, so there is nothing to wait on."""


def marked(mark: str) -> list[int]:
    """Ids of the processes that carry the mark and still run. Linux only; empty elsewhere."""
    proc = Path("/proc")
    pids = [int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()] if proc.is_dir() else []
    return [pid for pid in pids if _carries(pid, f"{MARK}={mark}".encode())]


def main(arguments: Sequence[str] | None = None) -> int:
    mark, directory = sys.argv[1:] if arguments is None else arguments
    for how in (signal.SIGINT, signal.SIGTERM):
        signal.signal(how, signal.SIG_IGN)  # meant for the starter, whose end is what counts here
    sys.stdin.buffer.read()
    _end(mark, signal.SIGTERM, within_s=_ASK_S)
    _end(mark, signal.SIGKILL, within_s=_KILL_S)
    shutil.rmtree(directory, ignore_errors=True)
    return len(marked(mark))


def _end(mark: str, how: signal.Signals, *, within_s: float) -> None:
    """Signal each marked process once, also those that appear meanwhile, and return when all are gone or time is up."""
    deadline = time.monotonic() + within_s
    signalled: set[int] = set()
    while (left := set(marked(mark))) and time.monotonic() < deadline:
        for pid in left - signalled:
            try:
                os.kill(pid, how)
            except ProcessLookupError:
                continue
        signalled |= left
        time.sleep(_POLL_S)


def _carries(pid: int, assignment: bytes) -> bool:
    try:
        return assignment in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is another user's
        return False


if __name__ == "__main__":
    sys.exit(main())
