"""How fast one encoding gets from one process to another: `python -m benchmarks.ec_transfer [--quick] [--json FILE]`.

A transfer of ours is timed from the scheduler's wish to the answer that the item lies in the slab, read and digested,
with the place announced beforehand as in the pipeline. Beside it, in the same run and in turns:

    memcpy           copying the bytes inside one process
    nixl_read        a bare NIXL READ between the same two processes, without control messages or digest
    ec_example_disk  vLLM's ECExampleConnector: it saves a safetensors file, loads and copies it; on disk,
    ec_example_shm   and in memory; both with saving
    ec_cpu_1ms       the sessions of vLLM's ECCPUConnector, driven by an engine step of 1 ms,
    ec_cpu_10ms      and of 10 ms; without saving

`ec_save` is what happens before: from the finished tensor to the announcement (copy, digest, lease). `ec_handover` is
both together, which is what to hold against the baselines that save. `ec_pipelined` is one of 16 items that one request
wishes for at once.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.ec_agents import SIZES, Fetcher, produce, settings
from benchmarks.ec_upstream import Files, Sessions
from benchmarks.records import Record, options, percentile, publish, ratio
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.reads import HOST_DEVICE, ReadState, Region
from serving.protocol import EncodingRef

_STEPS_S = {"ec_cpu_1ms": 0.001, "ec_cpu_10ms": 0.010}
_WITH_SAVING = ("ec_example_disk", "ec_example_shm")
_WARM_UP = 3
_POLL_S = 50e-6
"""As the agent does: NIXL has nothing to wait on."""
_PIPELINED = 16
_PIPELINED_SIZES = ("512KiB", "4MiB")

Timed = Callable[[str, int], float]
"""Runs one transfer of so many bytes under a fresh name and returns its seconds."""


class Ours:
    """A consumer's agent in this process and a producer's in another."""

    def __init__(self, producer: Connection) -> None:
        self._producer = producer
        self._fetcher = Fetcher(settings())
        self.last_save_s = 0.0

    def __call__(self, name: str, size_bytes: int) -> float:
        return self.transfer([name], size_bytes)

    def transfer(self, names: list[str], size_bytes: int) -> float:
        """Seconds for all of these items, wished for by one request."""
        self._producer.send((names, size_bytes))
        announced, saves_s = zip(*self._producer.recv(), strict=True)
        self.last_save_s = statistics.fmean(saves_s)
        return self._fetcher.fetch(msgspec.convert(announced, list[EncodingRef]))

    def close(self) -> None:
        self._fetcher.close()


class BareRead:
    """NIXL READs from a region of the other process into one of ours."""

    def __init__(self, source: Region, metadata: bytes) -> None:
        self._buffer = np.zeros(max(SIZES.values()), dtype=np.uint8)
        region = Region(self._buffer.ctypes.data, self._buffer.nbytes, HOST_DEVICE)
        self._nixl = NixlAgent(f"bench-read-{os.getpid()}", region)
        self._source = source
        self._peer = self._nixl.add_peer(metadata)

    def __call__(self, name: str, size_bytes: int) -> float:
        started = time.perf_counter()
        read = self._nixl.read(self._peer, self._source, 0, 0, size_bytes)
        while self._nixl.poll(read) is ReadState.MOVING:
            time.sleep(_POLL_S)
        elapsed = time.perf_counter() - started
        if read.state is not ReadState.DONE:
            raise RuntimeError("the READ failed")
        return elapsed


class Memcpy:
    def __init__(self) -> None:
        self._source, self._target = (np.ones(_PIPELINED * SIZES["4MiB"], dtype=np.uint8) for _ in range(2))

    def __call__(self, name: str, size_bytes: int) -> float:
        return self.copies(1, size_bytes)

    def copies(self, count: int, size_bytes: int) -> float:
        """Seconds for copying so many different runs of bytes."""
        started = time.perf_counter()
        for offset in range(0, count * size_bytes, size_bytes):
            np.copyto(self._target[offset : offset + size_bytes], self._source[offset : offset + size_bytes])
        return time.perf_counter() - started


class Contenders(msgspec.Struct, frozen=True):
    ours: Ours
    memcpy: Memcpy
    others: dict[str, Timed]

    @property
    def all(self) -> dict[str, Timed]:
        return {"ours": self.ours, "memcpy": self.memcpy, **self.others}


def measure(repeats: int) -> list[Record]:
    """Median and p99 of a transfer of ours beside each baseline's, in microseconds."""
    with _contenders() as contenders:
        times = _in_turns(contenders, repeats)
        pipelined = _pipelined(contenders, max(repeats // 8, 5))
    baselines = [name for name in contenders.all if name != "ours"]
    records = []
    for baseline in baselines:
        for size in SIZES:
            records += _both(f"ec_transfer_{{}}_us/{baseline}/{size}", times["ours", size], times[baseline, size])
    for size in SIZES:
        memcpy, save = times["memcpy", size], times["save", size]
        handover = [sum(both) for both in zip(save, times["ours", size], strict=True)]
        records += _both(f"ec_save_{{}}_us/memcpy/{size}", save, memcpy)
        for baseline in ("memcpy", *_WITH_SAVING):
            records += _both(f"ec_handover_{{}}_us/{baseline}/{size}", handover, times[baseline, size])
    return records + pipelined


def _in_turns(contenders: Contenders, repeats: int) -> dict[tuple[str, str], list[float]]:
    """Microseconds by contender and size, and those of `ours`' saves; disturbances of the machine hit all alike.

    Each transfers twice in its turn and the second counts: the first meets caches that the others have filled, and a
    core that may have slept.
    """
    times: dict[tuple[str, str], list[float]] = {}
    for size_name, size_bytes in SIZES.items():
        for turn in range(_WARM_UP + repeats):
            for name, run in contenders.all.items():
                run(f"{size_name}-{turn}-first", size_bytes)
                elapsed = run(f"{size_name}-{turn}", size_bytes)
                if turn >= _WARM_UP:
                    times.setdefault((name, size_name), []).append(elapsed * 1e6)
            if turn >= _WARM_UP:
                times.setdefault(("save", size_name), []).append(contenders.ours.last_save_s * 1e6)
    return times


def _pipelined(contenders: Contenders, repeats: int) -> list[Record]:
    """Microseconds per item, of 16 that one request wishes for."""
    records = []
    for size_name in _PIPELINED_SIZES:
        ours, memcpy = [], []
        for turn in range(1 + repeats):
            names = [f"pipelined-{size_name}-{turn}-{number}" for number in range(_PIPELINED)]
            ours.append(contenders.ours.transfer(names, SIZES[size_name]) / _PIPELINED * 1e6)
            memcpy.append(contenders.memcpy.copies(_PIPELINED, SIZES[size_name]) / _PIPELINED * 1e6)
        records += _both(f"ec_pipelined_{{}}_us/memcpy/{size_name}", ours[1:], memcpy[1:])
    return records


def _both(metric: str, ours: list[float], theirs: list[float]) -> list[Record]:
    return [
        ratio(metric.format("p50"), statistics.median(ours), statistics.median(theirs), "us"),
        ratio(metric.format("p99"), percentile(ours, 0.99), percentile(theirs, 0.99), "us"),
    ]


@contextmanager
def _contenders() -> Iterator[Contenders]:
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["benchmarks.ec_agents", "benchmarks.ec_upstream"])
    pipe, theirs = processes.Pipe()
    producer = processes.Process(target=produce, args=(theirs,), daemon=True)
    producer.start()
    theirs.close()
    region, metadata = pipe.recv()
    ours = Ours(pipe)
    sessions = {name: Sessions(step_s) for name, step_s in _STEPS_S.items()}
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        try:
            others: dict[str, Timed] = {
                "nixl_read": BareRead(msgspec.convert(region, Region), metadata),
                "ec_example_disk": Files(Path(disk)),
                "ec_example_shm": Files(Path(memory)),
                **sessions,
            }
            yield Contenders(ours, Memcpy(), others)
        finally:
            for session in sessions.values():
                session.close()
            ours.close()
            producer.kill()
            producer.join()


def main() -> None:
    chosen = options(__doc__)
    publish(measure(repeats=20 if chosen.quick else 200), chosen.json)


if __name__ == "__main__":
    main()
