"""Which way a peer's bytes come: copied in place on one machine, or over a network.

UCX chooses in silence. Two processes on one machine get the slow lane when they differ in PID namespace, IPC
namespace or user, so each new peer is probed once: its lane and bandwidth are logged, and what falls back to TCP is a
warning with its cause.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ec_connector.ports import Greeted, Reader
from ec_connector.protocol import Place
from ec_connector.transport.reads import HOST_DEVICE, PROBE_BYTES, Read, ReadState

logger = logging.getLogger(__name__)

_GREETING_BYTES = 4 << 10
"""The first read of a peer connects, which takes longer than any copy; it is not measured."""

_RDMA_DEVICES = Path("/sys/class/infiniband")
_TCP_ONLY = frozenset({"tcp", "self"})


class Lane(enum.StrEnum):
    """How bytes of one peer arrive."""

    IN_PLACE = "in_place"
    """Copied by this process out of the other's memory, without its help."""
    DEVICE = "device"
    """To or from the memory of an accelerator; UCX does not tell which way."""
    RDMA = "rdma"
    """Another machine, and this one has an RDMA device that UCX may use."""
    TCP = "tcp"


class Here(msgspec.Struct, frozen=True):
    """What of this process decides the lane. `ucx_tls` is UCX's own setting, empty for its choice."""

    place: Place
    has_rdma: bool
    ucx_tls: str

    @classmethod
    def observe(cls) -> Here:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place = Place(boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/ipc"), os.geteuid())
        has_rdma = _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())
        return cls(place, has_rdma, os.environ.get("UCX_TLS", ""))

    def lane(self, place: Place, *, in_place: bool, on_host: bool) -> Lane:
        """The lane of a read from a peer at `place` that ended in place, or did not."""
        if not on_host:
            return Lane.DEVICE
        if in_place:
            return Lane.IN_PLACE
        may_use_rdma = self.has_rdma and not set(self.ucx_tls.split(",")) <= _TCP_ONLY
        return Lane.RDMA if may_use_rdma and place.boot != self.place.boot else Lane.TCP

    def why_tcp(self, place: Place) -> str:
        """What keeps a peer at `place` from a faster lane."""
        if self.ucx_tls:
            return f"UCX_TLS is {self.ucx_tls}"
        if place.boot != self.place.boot:
            return "it runs on another machine, and this one has no RDMA device"
        parts = {
            "PID namespace": place.pid_namespace != self.place.pid_namespace,
            "IPC namespace": place.ipc_namespace != self.place.ipc_namespace,
            "user": place.user != self.place.user,
        }
        differing = [name for name, differs in parts.items() if differs]
        if differing:
            return f"it runs on this machine with another {' and '.join(differing)}"
        return "UCX cannot copy between these processes, perhaps for want of CAP_SYS_PTRACE or a restricting seccomp"


class _Probe(msgspec.Struct, eq=False):
    """The two reads of one peer: the first connects, the second is timed. `read` is None once it is judged."""

    peer: Greeted
    read: Read | None = None
    started: float = 0.0
    timed: bool = False
    in_place: bool = False
    elapsed_s: float = 0.0


class Probes:
    """Probes each new peer once, when no request is waiting for a read.

    Args:
        reader: The data plane.
        here: What decides the lane on this side.
        clock: Monotonic seconds, for measuring.
        offset: Where in the own region `PROBE_BYTES` may be overwritten at any time.
        device: The own region's device.
    """

    def __init__(self, reader: Reader, here: Here, clock: Callable[[], float], *, offset: int, device: int) -> None:
        self._reader = reader
        self._here = here
        self._clock = clock
        self._offset = offset
        self._device = device
        self._probes: dict[str, _Probe] = {}  # by the data plane's name, which a restarted peer does not keep
        self.lanes: dict[str, Lane] = {}
        """By the data plane's name of the peer, for those that are known at present."""
        self.fallbacks = 0
        """Peers that were found to be read over TCP, ever."""
        self.slowest_bytes_per_s = 0.0

    @property
    def running(self) -> bool:
        return any(probe.read is not None for probe in self._probes.values())

    def poll(self, peers: Sequence[Greeted]) -> list[str]:
        """Advance the probes of `peers` and begin those of new ones; returns addresses that cannot be read."""
        known = {peer.name for peer in peers}
        for name in self._probes.keys() - known:
            del self._probes[name]
            self.lanes.pop(name, None)
        lost = []
        for peer in peers:
            probe = self._probes.get(peer.name)
            if probe is None:
                probe = self._probes[peer.name] = _Probe(peer)
                self._read(probe, _GREETING_BYTES)
            if probe.read is not None and self._advance(probe, probe.read) is ReadState.LOST:
                lost.append(peer.address)
        return lost

    def _advance(self, probe: _Probe, read: Read) -> ReadState:
        state = self._reader.poll(read)
        if state is ReadState.DONE and not probe.in_place:
            probe.elapsed_s = self._clock() - probe.started
        if state is ReadState.DONE and not probe.timed:
            probe.timed = True
            self._read(probe, PROBE_BYTES)
        elif state is ReadState.DONE:
            probe.read = None
            self._judge(probe)
        return state

    def _read(self, probe: _Probe, size_bytes: int) -> None:
        source = probe.peer.region
        probe.started = self._clock()
        probe.read = self._reader.read(probe.peer.name, source, 0, self._offset, min(size_bytes, source.size_bytes))
        probe.elapsed_s = self._clock() - probe.started
        probe.in_place = probe.read.state is ReadState.DONE

    def _judge(self, probe: _Probe) -> None:
        peer = probe.peer
        rate = min(PROBE_BYTES, peer.region.size_bytes) / max(probe.elapsed_s, 1e-9)
        on_host = self._device == HOST_DEVICE and peer.region.device == HOST_DEVICE
        lane = self._here.lane(peer.place, in_place=probe.in_place, on_host=on_host)
        self.lanes[peer.name] = lane
        self.slowest_bytes_per_s = min(rate, self.slowest_bytes_per_s or rate)
        if lane is Lane.TCP:
            self.fallbacks += 1
            why = self._here.why_tcp(peer.place)
            logger.warning("reads from EC peer %s take TCP, %.0f MB/s: %s", peer.address, rate / 1e6, why)
        else:
            logger.info("reads from EC peer %s: lane %s, %.0f MB/s", peer.address, lane, rate / 1e6)
