from __future__ import annotations

import socket

import pytest

from serving.errors import StageUnavailable
from serving.ports import ReservedPorts


def _bind(port: int, *, reuse: bool) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        probe.bind(("127.0.0.1", port))


def test_a_reserved_port_is_nobody_elses_but_may_be_listened_on() -> None:
    with ReservedPorts("127.0.0.1", 2, None) as ports:
        assert len(set(ports.numbers)) == 2
        for port in ports.numbers:
            with pytest.raises(OSError, match="in use"):
                _bind(port, reuse=False)
            with socket.socket() as listener:  # as ZeroMQ does
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(("127.0.0.1", port))
                listener.listen()


def test_reservations_in_one_range_do_not_overlap() -> None:
    with ReservedPorts("127.0.0.1", 1, None) as free:
        first = free.numbers[0]
    with (
        ReservedPorts("127.0.0.1", 1, (first, first)),
        pytest.raises(StageUnavailable, match="fewer than 1 free"),
    ):
        ReservedPorts("127.0.0.1", 1, (first, first))


def test_closing_gives_the_ports_back() -> None:
    with ReservedPorts("127.0.0.1", 1, None) as ports:
        number = ports.numbers[0]
    _bind(number, reuse=False)
