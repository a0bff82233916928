"""Control sockets: one hub per IO thread.

This is the only module that imports zmq. A hub owns its sockets; only `wake` may be called from other threads.
With a cluster secret every connection is CURVE: both key pairs derive from the secret, and a connection whose
client key is another is refused.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ec_connector.transport.local import LocalServer

_HEARTBEAT_MS = 2_000
_HEARTBEAT_TIMEOUT_MS = 6_000
_LOSSES = (
    zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class Received(msgspec.Struct, frozen=True):
    """A message at a server (`sender` set, for `Hub.reply`) or on a connection (`sender` empty)."""

    origin: str
    sender: bytes
    payload: bytes


class ReceivedLocally(msgspec.Struct, frozen=True):
    """A message from this engine's scheduler. `sender` is for `LocalServer.reply`."""

    sender: int
    payload: bytes


class ConnectionLost(msgspec.Struct, frozen=True):
    """The connection to `address` broke, was refused, or failed to authenticate. It is closed already."""

    address: str


Event = Received | ReceivedLocally | ConnectionLost


class CurveKeys(msgspec.Struct, frozen=True):
    """Key pairs for both roles, as Z85 text."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def derive_keys(secret: bytes) -> CurveKeys | None:
    """The cluster's keys, or None when there is no secret (plain sockets, loopback only)."""
    if not secret:
        return None
    server, client = (
        z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
        for role in (b"ec server", b"ec client")
    )
    return CurveKeys(zmq.curve_public(server), server, zmq.curve_public(client), client)


class Hub:
    """All control sockets of one IO thread.

    Args:
        secret: The cluster secret; empty for plain sockets.
    """

    def __init__(self, secret: bytes) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = derive_keys(secret)
        self._poller = zmq.Poller()
        self._servers: dict[str, zmq.Socket[bytes]] = {}
        self._links: dict[str, zmq.Socket[bytes]] = {}
        self._monitors: dict[zmq.Socket[bytes], str] = {}
        self._origins: dict[zmq.Socket[bytes], str] = {}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._zap: zmq.Socket[bytes] | None = self._open_zap() if self._keys else None
        self._local: LocalServer | None = None

    def serve(self, name: str, address: str) -> str:
        """Listen at `address`; messages arrive with origin `name`. Returns the address with its real port.

        Raises:
            OSError: The address cannot be bound.
        """
        socket = self._socket(zmq.ROUTER)
        if self._keys:
            socket.curve_server = True
            socket.curve_secretkey = self._keys.server_secret
            socket.curve_publickey = self._keys.server_public
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise OSError(error.errno, f"cannot listen at {address}: {error}") from error
        self._servers[name] = socket
        self._origins[socket] = name
        self._poller.register(socket, zmq.POLLIN)
        return bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def adopt(self, server: LocalServer) -> None:
        """Poll `server` too; the hub closes it."""
        self._local = server
        self._poller.register(server.fileno(), zmq.POLLIN)

    def connect(self, address: str) -> None:
        """Open a connection to a server. Messages arrive with origin `address`."""
        if address in self._links:
            return
        socket = self._socket(zmq.DEALER)
        _use_client_keys(socket, self._keys)
        socket.heartbeat_ivl = _HEARTBEAT_MS
        socket.heartbeat_timeout = _HEARTBEAT_TIMEOUT_MS
        monitor = socket.get_monitor_socket(_LOSSES)
        self._poller.register(monitor, zmq.POLLIN)
        self._monitors[monitor] = address
        socket.connect(address)
        self._links[address] = socket
        self._origins[socket] = address
        self._poller.register(socket, zmq.POLLIN)

    def disconnect(self, address: str) -> None:
        """Close the connection, dropping what was not sent."""
        socket = self._links.pop(address, None)
        if socket is None:
            return
        monitor = next(m for m, owner in self._monitors.items() if owner == address)
        del self._monitors[monitor], self._origins[socket]
        self._poller.unregister(monitor)
        self._poller.unregister(socket)
        socket.disable_monitor()
        monitor.close()
        socket.close()

    def send(self, address: str, payload: bytes) -> None:
        """Queue a message. Dropped when the queue is full (the peer has stopped reading) or the connection is lost."""
        if address in self._links:
            _send(self._links[address], [payload])

    def reply(self, name: str, sender: bytes, payload: bytes) -> None:
        """Answer a message that server `name` received. Dropped when the sender is gone."""
        _send(self._servers[name], [sender, payload])

    def poll(self, timeout_s: float | None) -> list[Event]:
        """What arrived, after waiting for up to `timeout_s` (None: until something does, or `wake`)."""
        timeout_ms = None if timeout_s is None else max(0, -int(-timeout_s * 1000 // 1))
        events: list[Event] = []
        for ready, _ in self._poller.poll(timeout_ms):
            if ready == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif self._local is not None and ready == self._local.fileno():
                events += [ReceivedLocally(*message) for message in self._local.take()]
            elif self._zap is not None and ready is self._zap:
                self._authenticate(self._zap)
            elif ready in self._monitors:
                events.extend(self._losses(ready))
            elif ready in self._origins:
                events.extend(self._messages(ready))
        return events

    def wake(self) -> None:
        """Make a waiting `poll` return. May be called from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        for address in list(self._links):
            self.disconnect(address)
        for socket in self._servers.values():
            socket.close()
        if self._local is not None:
            self._local.close()
        if self._zap is not None:
            self._zap.close()
        self._context.term()
        os.close(self._wake_fd)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        return socket

    def _messages(self, socket: zmq.Socket[bytes]) -> list[Received]:
        origin = self._origins[socket]
        received: list[Received] = []
        while True:
            try:
                *sender, payload = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return received
            received.append(Received(origin, sender[0] if sender else b"", payload))

    def _losses(self, monitor: zmq.Socket[bytes]) -> list[ConnectionLost]:
        address = self._monitors[monitor]
        recv_monitor_message(monitor)
        self.disconnect(address)
        return [ConnectionLost(address)]

    def _open_zap(self) -> zmq.Socket[bytes]:
        socket = self._socket(zmq.REP)
        socket.bind(_ZAP_ENDPOINT)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _authenticate(self, socket: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question whether a client may connect (ZeroMQ RFC 27)."""
        assert self._keys is not None
        version, request, _domain, _address, _identity, mechanism, *credentials = socket.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [z85.decode(self._keys.client_public)]
        status = [b"200", b"OK"] if known else [b"400", b"unknown key"]
        socket.send_multipart([version, request, *status, b"", b""])


def _use_client_keys(socket: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    if keys:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> Any:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return
