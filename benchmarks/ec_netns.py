"""Transfers between two network namespaces: `python -m benchmarks.ec_netns [--quick] [--json FILE]`. Needs root.

The producer and the consumer get a network namespace each, joined by a veth pair, and an IPC namespace each, as two
containers have: UCX then cannot copy in place and takes TCP. The pair is made here and removed at the end, also after
a failure. Measured as in `benchmarks.ec_transfer`, for delays of NIXL's progress thread of 0, 1 and 10 ms, both sides.

`ec_netns_p50_us/DELAY/SIZE` and `ec_netns_p99_us/DELAY/SIZE`: from the wish to verified bytes. `ec_netns_tcp_peers`:
how many of the runs' connectors said that the lane is TCP (of 3). `ec_netns_wire_share`: bytes that crossed the veth
pair, by the kernel's count, per byte that was read; 1 or more, or the lane was not TCP.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

import msgspec

from benchmarks.ec_agents import SIZES, Fetcher, publish_items, settings
from benchmarks.records import Record, options, percentile, publish
from ec_connector.counters import counters
from serving import plugin
from serving.protocol import EncodingRef

_DELAYS_US = {"0ms": 0, "1ms": 1_000, "10ms": 10_000}
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x00020000, 0x08000000, 0x40000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_HOSTS = ("10.213.77.1", "10.213.77.2")
_NETWORK = "10.213.77.0/24"
_LANE_WAIT_S = 20.0
_LANE_POLL_S = 0.05
"""The agent tells its lane in counters only; the measuring is over by now."""
_WARM_UP = 3


class _Result(msgspec.Struct):
    """Microseconds by size, whether the connector said TCP, bytes read and bytes that came over the wire."""

    times: dict[str, list[float]]
    is_tcp: bool
    read_bytes: float
    wire_bytes: int = 0


def measure(repeats: int, sizes: Mapping[str, int]) -> list[Record]:
    records: list[Record] = []
    results = []
    with _veth_pair() as namespaces:
        for delay, delay_us in _DELAYS_US.items():
            result = _run(namespaces, delay_us, repeats, sizes)
            results.append(result)
            for size, times in result.times.items():
                records.append(Record(f"ec_netns_p50_us/{delay}/{size}", statistics.median(times), "us"))
                records.append(Record(f"ec_netns_p99_us/{delay}/{size}", percentile(times, 0.99), "us"))
    # The pair is one for all runs, so the last count covers them all.
    share = results[-1].wire_bytes / sum(r.read_bytes for r in results)
    records.append(Record("ec_netns_tcp_peers", sum(r.is_tcp for r in results), "peers"))
    return [*records, Record("ec_netns_wire_share", share, "bytes per byte")]


def _run(namespaces: tuple[str, str], delay_us: int, repeats: int, sizes: Mapping[str, int]) -> _Result:
    """One producer and one consumer; the parent only carries announcements from one to the other."""
    processes = multiprocessing.get_context("spawn")
    ends = [processes.Pipe() for _ in range(2)]
    children = [
        processes.Process(target=target, args=(namespace, host, delay_us, theirs, *more), daemon=True)
        for target, namespace, host, (_, theirs), more in (
            (_produce, namespaces[0], _HOSTS[0], ends[0], ()),
            (_consume, namespaces[1], _HOSTS[1], ends[1], (repeats, sizes)),
        )
    ]
    for child, (_, theirs) in zip(children, ends, strict=True):
        child.start()
        theirs.close()
    (producer, _), (consumer, _) = ends
    try:
        while not isinstance(wish := consumer.recv(), _Result):
            producer.send(wish)
            consumer.send(producer.recv())
        wish.wire_bytes = _received_bytes(namespaces[1])
        return wish
    finally:
        for child in children:
            child.kill()
            child.join()


def _produce(namespace: str, host: str, delay_us: int, pipe: Connection) -> None:
    _enter(namespace, delay_us)
    publish_items(pipe, settings(host, _NETWORK))


def _consume(
    namespace: str, host: str, delay_us: int, pipe: Connection, repeats: int, sizes: Mapping[str, int]
) -> None:
    _enter(namespace, delay_us)
    fetcher = Fetcher(settings(host, _NETWORK))
    times: dict[str, list[float]] = {}
    for size_name, size_bytes in sizes.items():
        for turn in range(_WARM_UP + repeats):
            pipe.send(([f"{size_name}-{turn}"], size_bytes))
            refs = msgspec.convert([announced for announced, _ in pipe.recv()], list[EncodingRef])
            elapsed = fetcher.fetch(refs)
            if turn >= _WARM_UP:
                times.setdefault(size_name, []).append(elapsed * 1e6)
    deadline = time.monotonic() + _LANE_WAIT_S
    while True:
        stats = fetcher.agent.call(lambda core, _: counters(core))
        if stats["peers_tcp"] or stats["peers_in_place"] or time.monotonic() > deadline:
            break
        time.sleep(_LANE_POLL_S)
    pipe.send(_Result(times, bool(stats["peers_tcp"]), stats["read_bytes"]))
    pipe.recv()  # until the parent ends this process


def _enter(namespace: str, delay_us: int) -> None:
    """Move this process, which has one thread still, into a network namespace and an IPC namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        _check(libc.setns(file.fileno(), _CLONE_NEWNET))
    _check(libc.unshare(_CLONE_NEWIPC | _CLONE_NEWNS))
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))  # where UCX looks for this namespace's interfaces
    plugin.NIXL_PROGRESS_DELAY_FLOOR_US = delay_us  # read when the first agent is made


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextmanager
def _veth_pair() -> Iterator[tuple[str, str]]:
    """Two network namespaces whose `ec` interfaces are the ends of one cable."""
    names = (f"ec-a-{os.getpid()}", f"ec-b-{os.getpid()}")
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", "ec", "netns", names[0], "type", "veth", "peer", "name", "ec", "netns", names[1])
        for name, host in zip(names, _HOSTS, strict=True):
            _ip("-n", name, "addr", "add", f"{host}/24", "dev", "ec")
            _ip("-n", name, "link", "set", "ec", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            _ip("netns", "del", name)  # and the pair with it


def _received_bytes(namespace: str) -> int:
    command = ["ip", "-n", namespace, "-s", "-j", "link", "show", "ec"]
    (link,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return int(link["stats64"]["rx"]["bytes"])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> None:
    chosen = options(__doc__)
    if os.geteuid() != 0:
        sys.exit("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the namespaces go
    sizes = {name: size for name, size in SIZES.items() if not (chosen.quick and name == "32MiB")}
    publish(measure(8 if chosen.quick else 100, sizes), chosen.json)


if __name__ == "__main__":
    main()
