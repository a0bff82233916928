"""Names of shared memory and semaphores go with their process, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_OWNER = """
import multiprocessing
import os
import sys
from serving import resource_tracker

started = resource_tracker.start()
lock = multiprocessing.get_context("spawn").Lock()
assert resource_tracker.start() == started
print(lock._semlock.name.removeprefix("/"), flush=True)
sys.stdin.read()
"""


def test_a_semaphore_goes_when_its_process_group_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as owner:
        assert owner.stdout is not None
        name = Path("/dev/shm") / f"sem.{owner.stdout.readline().strip()}"
        assert name.exists()
        os.killpg(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while name.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
