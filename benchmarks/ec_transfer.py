"""How fast one encoding gets from one process to another: `python -m benchmarks.ec_transfer [--quick] [--json FILE]`.

A transfer of ours is timed from the scheduler's wish to the answer that the item lies in the slab, read and digested,
with the place announced beforehand as in the pipeline. Beside it, in the same run and in turns:

    memcpy           copying the bytes inside one process
    nixl_read        a bare NIXL READ between the same two processes, without control messages or digest
    ec_example_disk  what vLLM's ECExampleConnector does: save a safetensors file, load and copy it; on disk,
    ec_example_shm   and in memory
    ec_cpu_1ms       the sessions of vLLM's ECCPUConnector, driven by an engine step of 1 ms,
    ec_cpu_10ms      and of 10 ms
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
import torch
from safetensors.torch import load_file, save_file

from benchmarks.ec_agents import SIZES, WIDTH, build_agent, link_to, produce
from benchmarks.ec_upstream import Sessions
from benchmarks.records import Record, options, percentile, publish, ratio
from ec_connector.protocol import Drop, Pinned, ToScheduler, Want, WantedItem, encode
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.reads import HOST_DEVICE, ReadState, Region
from serving.protocol import EncodingRef

_STEPS_S = {"ec_cpu_1ms": 0.001, "ec_cpu_10ms": 0.010}
_WARM_UP = 3

Timed = Callable[[str, int], float]
"""Runs one transfer of so many bytes under a fresh name and returns its seconds."""


class Ours:
    """A consumer's agent in this process and a producer's in another."""

    def __init__(self, producer: Connection) -> None:
        self._producer = producer
        self._agent, _ = build_agent("consumer")
        self._link = link_to(self._agent)

    def __call__(self, name: str, size_bytes: int) -> float:
        self._producer.send((name, size_bytes))
        ref = msgspec.convert(self._producer.recv(), EncodingRef)
        started = time.perf_counter()
        self._link.send(encode(Want(name, (WantedItem(name, ref.shape[0], ref=ref),))))
        answers = self._link.receive(30.0)
        elapsed = time.perf_counter() - started
        answer = msgspec.msgpack.decode(answers[0], type=ToScheduler)
        if not isinstance(answer, Pinned):
            raise RuntimeError(f"the transfer failed: {answer}")
        self._link.send(encode(Drop(name)))
        return elapsed

    def close(self) -> None:
        self._agent.stop()
        self._link.close()


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
            time.sleep(50e-6)
        elapsed = time.perf_counter() - started
        if read.state is not ReadState.DONE:
            raise RuntimeError("the READ failed")
        return elapsed


class Memcpy:
    def __init__(self) -> None:
        self._source, self._target = (np.ones(max(SIZES.values()), dtype=np.uint8) for _ in range(2))

    def __call__(self, name: str, size_bytes: int) -> float:
        started = time.perf_counter()
        np.copyto(self._target[:size_bytes], self._source[:size_bytes])
        return time.perf_counter() - started


class ExampleConnector:
    """One safetensors file an item, as ECExampleConnector writes and loads it; the copy touches every byte."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, size_bytes: int) -> float:
        tensor = torch.ones(size_bytes // (2 * WIDTH), WIDTH, dtype=torch.bfloat16)
        file = self._folder / "encoder_cache.safetensors"
        started = time.perf_counter()
        save_file({"ec_cache": tensor}, file)
        load_file(file)["ec_cache"].clone()
        elapsed = time.perf_counter() - started
        file.unlink()
        return elapsed


def measure(repeats: int) -> list[Record]:
    """Median and p99 of a transfer of ours beside each baseline's, in microseconds."""
    times: dict[tuple[str, str], list[float]] = {}
    with _contenders() as contenders:
        for size_name, size_bytes in SIZES.items():
            for turn in range(_WARM_UP + repeats):
                for name, run in contenders.items():
                    elapsed = run(f"{size_name}-{turn}", size_bytes)
                    if turn >= _WARM_UP:
                        times.setdefault((name, size_name), []).append(elapsed * 1e6)
    baselines = [name for name in contenders if name != "ours"]
    records = []
    for baseline in baselines:
        for size in SIZES:
            ours, theirs = times["ours", size], times[baseline, size]
            name = f"{baseline}/{size}"
            records.append(
                ratio(f"ec_transfer_p50_us/{name}", statistics.median(ours), statistics.median(theirs), "us")
            )
            records.append(ratio(f"ec_transfer_p99_us/{name}", percentile(ours, 0.99), percentile(theirs, 0.99), "us"))
    return records


@contextmanager
def _contenders() -> Iterator[dict[str, Timed]]:
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
            yield {
                "ours": ours,
                "memcpy": Memcpy(),
                "nixl_read": BareRead(msgspec.convert(region, Region), metadata),
                "ec_example_disk": ExampleConnector(Path(disk)),
                "ec_example_shm": ExampleConnector(Path(memory)),
                **sessions,
            }
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
