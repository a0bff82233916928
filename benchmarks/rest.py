"""What a pipeline's processes hold and cost while nobody asks anything of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import psutil

from benchmarks.records import Record, ratio

__all__ = ["KINDS", "cpu_at_rest", "memory", "memory_records"]

KINDS = ("engines", "ingress", "ray")
_REST_S = 5.0
"""How long after the last request the engines are left alone: leases and heartbeats of that request have ended."""
_REPLICA = "ray::ServeReplica:"
_ENGINE = "VLLM::"


def cpu_at_rest(pids: Callable[[], list[int]], seconds: float) -> dict[str, float]:
    """Cores used over `seconds`, by kind: engines with their replicas, the ingress, and Ray's own processes."""
    time.sleep(_REST_S)
    before = _cpu_seconds(pids())
    started = time.monotonic()
    time.sleep(seconds)  # the measurement itself: CPU time of a pipeline that nobody asks anything
    elapsed = time.monotonic() - started
    after = _cpu_seconds(pids())
    return {kind: (after[kind] - before[kind]) / elapsed for kind in KINDS}


def memory(pids: list[int]) -> dict[str, int]:
    """Resident bytes of each replica and of each engine; an engine is named after its replica."""
    held = {}
    for pid in pids:
        try:
            process = psutil.Process(pid)
            names = [" ".join(each.cmdline()) for each in (process, *process.parents())]
            rss = process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        replica = next((name.strip().rpartition(":")[2] for name in names if name.startswith(_REPLICA)), None)
        if replica is not None and names[0].startswith((_REPLICA, _ENGINE)):
            held[replica if names[0].startswith(_REPLICA) else f"{replica}/engine"] = rss
    return held


def memory_records(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[Record]:
    """Resident MiB afterwards, beside those before; a process that was not there before is left out."""
    for name in sorted(before.keys() & after.keys()):
        yield ratio(f"serve/rss_mib/warm/{name}", after[name] / 2**20, before[name] / 2**20, "MiB")


def _cpu_seconds(pids: list[int]) -> dict[str, float]:
    """CPU seconds used so far, by kind of process."""
    used: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for pid in pids:
        try:
            process = psutil.Process(pid)
            times, kind = process.cpu_times(), _kind(process)
        except psutil.NoSuchProcess:
            continue
        used[kind] += times.user + times.system
    return used


def _kind(process: psutil.Process) -> str:
    """Engines and their replicas, the ingress replica, or Ray itself.

    vLLM and Ray name their processes; what an engine's process starts is the engine's.
    """
    names = [" ".join(each.cmdline()) for each in (process, *process.parents())]
    if any(name.startswith(_REPLICA) and ":ingress" in name for name in names):
        return "ingress"
    if any(name.startswith((_ENGINE, _REPLICA)) for name in names):
        return "engines"
    return "ray"
