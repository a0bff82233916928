"""Lanes are judged by a probe, and a fallback to TCP names its cause."""

from __future__ import annotations

import logging

import msgspec
import pytest

from ec_connector.lanes import Here, Lane, Probes
from ec_connector.ports import Greeted
from ec_connector.transport.reads import HOST_DEVICE, PROBE_BYTES, ReadState, Region
from tests.unit.ec_connector.ec_fakes import PEER, PLACE, FakeReader

HERE = Here(PLACE, has_rdma=False, ucx_tls="")
REGION = Region(1 << 30, 64 << 20, HOST_DEVICE)
ELSEWHERE = msgspec.structs.replace(PLACE, boot="another")


@pytest.mark.parametrize(
    ("here", "place", "in_place", "on_host", "lane"),
    [
        (HERE, PLACE, True, True, Lane.IN_PLACE),
        (HERE, PLACE, False, True, Lane.TCP),
        (HERE, ELSEWHERE, False, True, Lane.TCP),
        (msgspec.structs.replace(HERE, has_rdma=True), ELSEWHERE, False, True, Lane.RDMA),
        (msgspec.structs.replace(HERE, has_rdma=True), PLACE, False, True, Lane.TCP),
        (msgspec.structs.replace(HERE, has_rdma=True, ucx_tls="tcp"), ELSEWHERE, False, True, Lane.TCP),
        (HERE, PLACE, False, False, Lane.DEVICE),
    ],
)
def test_lane(here: Here, place: msgspec.Struct, in_place: bool, on_host: bool, lane: Lane) -> None:
    assert here.lane(place, in_place=in_place, on_host=on_host) is lane


@pytest.mark.parametrize(
    ("here", "change", "cause"),
    [
        (HERE, {"pid_namespace": "pid:[2]", "user": 7}, "another PID namespace and user"),
        (HERE, {"ipc_namespace": "ipc:[2]"}, "another IPC namespace"),
        (HERE, {"boot": "another"}, "another machine"),
        (msgspec.structs.replace(HERE, ucx_tls="tcp"), {}, "UCX_TLS is tcp"),
        (HERE, {}, "CAP_SYS_PTRACE"),
    ],
)
def test_why_tcp(here: Here, change: dict[str, object], cause: str) -> None:
    assert cause in here.why_tcp(msgspec.structs.replace(PLACE, **change))


class TestProbes:
    def setup_method(self) -> None:
        self.reader = FakeReader()
        self.now = 0.0
        self.probes = Probes(self.reader, HERE, lambda: self.now, offset=64 << 20, device=HOST_DEVICE)
        self.peer = Greeted(PEER, "agent", REGION, PLACE)

    def test_a_copy_in_place_is_told_by_the_second_read(self) -> None:
        while not self.probes.poll([self.peer]) and self.probes.running:
            pass
        assert self.probes.lanes == {"agent": Lane.IN_PLACE}
        assert [read.handle[3] for read in self.reader.reads][-1] == PROBE_BYTES
        assert self.probes.poll([self.peer]) == []
        assert len(self.reader.reads) == 2, "a peer is probed once"

    def test_tcp_is_a_warning_and_counted(self, caplog: pytest.LogCaptureFixture) -> None:
        self.reader.state = ReadState.MOVING
        self.probes.poll([self.peer])
        self.reader.end(ReadState.DONE)
        self.probes.poll([self.peer])
        assert self.probes.running
        self.now = 0.5
        self.reader.end(ReadState.DONE)
        with caplog.at_level(logging.WARNING):
            self.probes.poll([self.peer])
        assert self.probes.lanes == {"agent": Lane.TCP}
        assert self.probes.fallbacks == 1
        assert self.probes.slowest_bytes_per_s == PROBE_BYTES / 0.5
        assert "take TCP" in caplog.text

    def test_a_peer_that_cannot_be_read_is_named_once(self) -> None:
        self.reader.state = ReadState.LOST
        assert self.probes.poll([self.peer]) == [PEER]
        assert self.probes.poll([]) == []
        assert not self.probes.running

    def test_a_peer_that_went_is_forgotten(self) -> None:
        while not self.probes.poll([self.peer]) and self.probes.running:
            pass
        self.probes.poll([])
        assert self.probes.lanes == {}
