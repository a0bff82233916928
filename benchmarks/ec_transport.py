"""The transport and the pool alone: `python -m benchmarks.ec_transport --device cpu|cuda [--quick] [--json FILE]`.

Two processes, a slab each on the given device (of two or more GPUs, the first two), encodings saved, read by NIXL and
digested. It needs torch, nixl, msgspec, xxhash and numpy, so that a bare GPU machine can run it: neither vLLM nor Ray
nor ZeroMQ is imported.

`ec_transport_p50_us/DEVICE/SIZE` is one READ with the digest's check beside a copy of as many bytes within the device;
`ec_transport_read_p50_us` the READ alone; `ec_transport_wrong_digests` must be 0. `ec_transport_in_place` is the share
of reads that were complete when the call returned.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from benchmarks.records import Record, publish, ratio
from ec_connector.pool import Pool, Spec
from ec_connector.slab import Slab
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.reads import ReadState, Region
from serving.plugin import register

_SIZES = {"16KiB": 16 << 10, "512KiB": 512 << 10, "4MiB": 4 << 20, "32MiB": 32 << 20}
_SLAB_BYTES = 128 << 20
_WIDTH = 4096
_WARM_UP = 3
_POLL_S = 50e-6
"""As the agent does: NIXL has nothing to wait on."""


class _Item(msgspec.Struct, frozen=True):
    offset: int
    size_bytes: int
    digest: int


class _Times(msgspec.Struct):
    """Microseconds of each repeat."""

    reads: list[float]
    checked: list[float]
    copies: list[float]


class Side:
    """A slab with its pool and NIXL agent."""

    def __init__(self, device: torch.device) -> None:
        register()  # NIXL's progress threads must not spin
        torch.set_num_threads(1)  # as in engines; two threads that share busy cores wait for each other
        self.device = device
        self.slab = Slab(_SLAB_BYTES, device)
        self.slab.adopt_thread()
        self.pool = Pool(_SLAB_BYTES)
        self.nixl = NixlAgent(f"transport-{device}-{os.getpid()}", self.slab.region)

    def place(self, name: str, size_bytes: int) -> int:
        """The offset of a new extent; the oldest make room."""
        spec = Spec(name, size_bytes, (size_bytes // (2 * _WIDTH), _WIDTH), "bfloat16")
        extents = self.pool.reserve([spec])
        assert extents is not None, "nothing here is ever pinned"
        self.pool.commit(extents[0], 0)
        return extents[0].offset

    def save(self, name: str, size_bytes: int) -> _Item:
        """A tensor that no other name gives, saved and digested."""
        generator = torch.Generator(self.device).manual_seed(len(name) + size_bytes)
        tensor = torch.randn(size_bytes // (2 * _WIDTH), _WIDTH, generator=generator, device=self.device)
        offset = self.place(name, size_bytes)
        digest = self.slab.write(offset, tensor.to(torch.bfloat16))
        self.synchronize()
        return _Item(offset, size_bytes, self.slab.digest(offset, size_bytes) if digest is None else digest)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(device: str, repeats: int) -> list[Record]:
    processes = multiprocessing.get_context("spawn")
    pipe, theirs = processes.Pipe()
    producer = processes.Process(target=_produce, args=(device, theirs), daemon=True)
    producer.start()
    theirs.close()
    try:
        return _consume(device, pipe, repeats)
    finally:
        producer.kill()
        producer.join()


def _produce(device: str, pipe: Connection) -> None:
    side = Side(_nth(device, 0))
    pipe.send((side.slab.region, side.nixl.metadata()))
    while True:
        name, size_bytes = pipe.recv()
        pipe.send(side.save(name, size_bytes))


def _consume(device: str, pipe: Connection, repeats: int) -> list[Record]:
    side = Side(_nth(device, 1))
    source, metadata = pipe.recv()
    peer = side.nixl.add_peer(metadata)
    records: list[Record] = []
    wrong = in_place = total = 0
    for size_name, size_bytes in _SIZES.items():
        times = _Times([], [], [])
        for turn in range(_WARM_UP + repeats):
            pipe.send((f"{size_name}-{turn}", size_bytes))
            item = pipe.recv()
            offset = side.place(f"{size_name}-{turn}", size_bytes)
            started = time.perf_counter()
            at_once = _read(side, peer, source, item, offset)
            read = time.perf_counter()
            wrong += side.slab.digest(offset, size_bytes) != item.digest
            checked = time.perf_counter()
            copied = _copy(side, size_bytes)
            if turn >= _WARM_UP:
                in_place += at_once
                total += 1
                times.reads.append((read - started) * 1e6)
                times.checked.append((checked - started) * 1e6)
                times.copies.append(copied * 1e6)
        records += _records(f"{device}/{size_name}", times)
    records.append(Record("ec_transport_wrong_digests", wrong, "items"))
    return [*records, Record("ec_transport_in_place", in_place / total, "share")]


def _records(suffix: str, times: _Times) -> list[Record]:
    copy = statistics.median(times.copies)
    return [
        ratio(f"ec_transport_p50_us/{suffix}", statistics.median(times.checked), copy, "us"),
        ratio(f"ec_transport_read_p50_us/{suffix}", statistics.median(times.reads), copy, "us"),
    ]


def _read(side: Side, peer: str, source: Region, item: _Item, offset: int) -> bool:
    """Read one item; whether it was complete when the call returned."""
    read = side.nixl.read(peer, source, item.offset, offset, item.size_bytes)
    at_once = read.state is ReadState.DONE
    while side.nixl.poll(read) is ReadState.MOVING:
        time.sleep(_POLL_S)
    if read.state is not ReadState.DONE:
        raise RuntimeError("the READ failed")
    return at_once


def _copy(side: Side, size_bytes: int) -> float:
    """Seconds for copying as many bytes from one end of the slab to the other."""
    shape = (size_bytes // (2 * _WIDTH), _WIDTH)
    source = side.slab.view(0, shape, "bfloat16").clone()
    side.synchronize()
    started = time.perf_counter()
    side.slab.view(_SLAB_BYTES - size_bytes, shape, "bfloat16").copy_(source)
    side.synchronize()
    return time.perf_counter() - started


def _nth(device: str, number: int) -> torch.device:
    """The CPU, or a GPU: different ones where there are several."""
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", number % torch.cuda.device_count())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    chosen = parser.parse_args()
    publish(measure(chosen.device, 20 if chosen.quick else 200), chosen.json)


if __name__ == "__main__":
    main()
