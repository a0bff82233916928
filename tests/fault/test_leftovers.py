"""What processes that are killed leave behind on their machine: nothing, once others have replaced them."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fault.conftest import MODEL
from tests.serving_process import Application

pytestmark = [pytest.mark.fault, pytest.mark.ec, pytest.mark.timeout(1200)]

_TIMES = 10
_RECOVERY_S = 240.0
_SETTLED_S = 30.0


@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_ten_kills_leave_no_file_and_no_socket(app: Application, victim: str) -> None:
    """Of an encoder: the process with the slab, or the replica around it, which takes its engine along."""
    _await_replicas(app)
    before = _left(app)
    for _ in range(_TIMES):
        engine = _engine(app)
        replica = engine.parent()
        assert replica is not None
        (engine if victim == "engine" else replica).kill()
        psutil.wait_procs([engine, replica], timeout=_RECOVERY_S)
        _await_replicas(app)
    deadline = time.monotonic() + _SETTLED_S
    while _left(app) != before:
        assert time.monotonic() < deadline, f"{before} became {_left(app)}"
        time.sleep(0.1)


def _left(app: Application) -> Counter[str]:
    """Shared-memory files, folders of engines' sockets and listening sockets of the pipeline's processes, counted."""
    sockets = Path(app.pipeline.environment()["VLLM_RPC_BASE_PATH"])
    found = Counter({"shared memory": len(list(Path("/dev/shm").iterdir()))})
    found["socket folders"] = len(list(sockets.glob("vllm-sockets-*")))
    found["sockets"] = len(list(sockets.rglob("vllm-sockets-*/*")))
    for pid in app.pipeline.survivors():
        with suppress(psutil.Error):
            connections = psutil.Process(pid).net_connections("tcp")
            found["listening"] += sum(one.status == psutil.CONN_LISTEN for one in connections)
    return found


def _engine(app: Application) -> psutil.Process:
    for pid in app.pipeline.survivors():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            parent = process.parent()
            is_engine = " ".join(process.cmdline()).startswith("VLLM::EngineCore")
            if is_engine and parent is not None and f"{MODEL}-encode" in " ".join(parent.cmdline()):
                return process
    raise AssertionError("no encoder runs")


def _await_replicas(app: Application) -> None:
    """Every deployment has its replicas, and the encoder's has an engine."""
    deadline = time.monotonic() + _RECOVERY_S
    while True:
        with suppress(AssertionError):
            if set(app.pipeline.states().values()) <= {"RUNNING", "RUNNING 2/2"} and _engine(app):
                return
        assert time.monotonic() < deadline
        time.sleep(0.1)
