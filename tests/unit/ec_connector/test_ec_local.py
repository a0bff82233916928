"""The link between a scheduler and its agents: whole messages in order, and no strangers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from ec_connector.transport.local import LocalClient, LocalServer

SECRET = b"s" * 16


@pytest.fixture
def address() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def server(address: str) -> Iterator[LocalServer]:
    listening = LocalServer(address, SECRET)
    yield listening
    listening.close()


@pytest.fixture
def client(address: str, server: LocalServer) -> Iterator[LocalClient]:
    linked = LocalClient(address, SECRET)
    yield linked
    linked.close()


def take(server: LocalServer, count: int) -> list[tuple[int, bytes]]:
    taken: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + 5
    while len(taken) < count and time.monotonic() < deadline:
        taken += server.take()
    return taken


def test_messages_arrive_whole_and_in_order(server: LocalServer, client: LocalClient) -> None:
    sent = [b"", b"a", b"b" * 300_000, b"c"]
    for payload in sent[:2]:
        client.send(payload)
    assert [payload for _, payload in take(server, 2)] == sent[:2]


def test_replies_larger_than_the_socket_takes_are_sent_later(server: LocalServer, client: LocalClient) -> None:
    client.send(b"hello")
    [(sender, _)] = take(server, 1)
    sent = [bytes([number]) * 500_000 for number in range(8)]
    for payload in sent:
        server.reply(sender, payload)
    received: list[bytes] = []
    deadline = time.monotonic() + 5
    while len(received) < len(sent) and time.monotonic() < deadline:
        server.take()
        received += client.receive(0.01)
    assert received == sent


def test_what_came_before_the_end_is_heard(address: str) -> None:
    server = LocalServer(address, SECRET)
    client = LocalClient(address, SECRET)
    client.send(b"last words")
    client.close()
    assert [payload for _, payload in take(server, 1)] == [b"last words"]
    server.take()
    server.close()


def test_another_secret_is_not_heard(address: str) -> None:
    server = LocalServer(address, SECRET)
    stranger, friend = LocalClient(address, b"other"), LocalClient(address, SECRET)
    stranger.send(b"stranger")
    friend.send(b"friend")
    assert [payload for _, payload in take(server, 1)] == [b"friend"]
    assert stranger.receive(0.05) == []
    stranger.close()
    friend.close()
    server.close()


def test_the_address_is_free_after_a_close_and_taken_before(address: str) -> None:
    server = LocalServer(address, SECRET)
    with pytest.raises(OSError, match="cannot listen"):
        LocalServer(address, SECRET)
    server.close()
    LocalServer(address, SECRET).close()


def test_a_link_to_nobody_fails_and_to_the_dead_is_silent(address: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        LocalClient(address, SECRET)
    server = LocalServer(address, SECRET)
    client = LocalClient(address, SECRET)
    server.close()
    client.send(b"anyone?")
    assert client.receive(0.05) == []
    client.close()
