"""The link between a scheduler and the agents of its own engine: framed messages over a Unix socket.

A socket and not ZeroMQ's ipc: there, every message passes through two more threads, and each wake-up of a thread
costs as much as copying hundreds of kilobytes. The address lies in Linux's abstract namespace, so no file is left
behind whatever ends the process.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 16 << 10
"""Python allocates as much for every read, and large allocations cost a system call and page faults."""
_BACKLOG = 8
_START_WAIT_S = 5.0


class Framed:
    """Messages over a connected stream socket. Never blocks, except in `send`.

    Args:
        stream: The socket; owned from here on.
    """

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._received = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._stream.fileno()

    def send(self, payload: bytes) -> None:
        """Send one message, waiting for room.

        Raises:
            OSError: The other end is gone.
        """
        self._stream.setblocking(True)
        self._stream.sendall(_LENGTH.pack(len(payload)) + payload)

    def queue(self, payload: bytes) -> bool:
        """Send what the socket takes now and keep the rest for `flush`. Returns whether something was kept.

        Raises:
            OSError: The other end is gone.
        """
        self._unsent += _LENGTH.pack(len(payload)) + payload
        return self.flush()

    def flush(self) -> bool:
        """Go on with what `queue` kept; as `queue`."""
        while self._unsent:
            try:
                sent = self._stream.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            del self._unsent[:sent]
        return False

    def receive(self) -> list[bytes]:
        """All messages that have arrived whole.

        Raises:
            ConnectionError: The other end is gone, and every message it sent has been returned before.
        """
        closed = self._fill()
        messages = list(self._take())
        if closed and not messages:
            raise ConnectionResetError("the other end closed the connection")
        return messages

    def close(self) -> None:
        self._stream.close()

    def _fill(self) -> bool:
        """Read what is there; whether the other end is gone."""
        while True:
            try:
                data = self._stream.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except ConnectionError:
                return True
            if not data:
                return True
            self._received += data
            if len(data) < _READ_BYTES:
                return False

    def _take(self) -> list[bytes]:
        messages = []
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[start + _LENGTH.size : end]))
            start = end
        del self._received[:start]
        return messages


class LocalServer:
    """The agent's end. Hears processes of its own user that know the cluster secret.

    Args:
        address: The agent's `local_address`.
        secret: The cluster secret; may be empty.

    Raises:
        OSError: The address is taken.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_abstract(address))
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot listen at {address}: {error.strerror}") from error
        self._socket.listen(_BACKLOG)
        self._token = _token(secret)
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._strangers: dict[int, Framed] = {}
        self._links: dict[int, Framed] = {}

    def fileno(self) -> int:
        """Readable when `take` has something to do."""
        return self._epoll.fileno()

    def take(self) -> list[tuple[int, bytes]]:
        """(sender, message) of all that arrived; also sends what `reply` could not."""
        taken: list[tuple[int, bytes]] = []
        for number, happened in self._epoll.poll(0):
            if number == self._socket.fileno():
                self._accept()
                continue
            if happened & select.EPOLLOUT:
                self._flush(number)
            if happened & ~select.EPOLLOUT:
                taken += [(number, payload) for payload in self._receive(number)]
        return taken

    def reply(self, sender: int, payload: bytes) -> None:
        """Send a message to whom `take` named. Dropped when it is gone."""
        if sender not in self._links:
            return
        try:
            kept = self._links[sender].queue(payload)
        except OSError:
            self._drop(sender)
            return
        if kept:
            self._epoll.modify(sender, select.EPOLLIN | select.EPOLLOUT)

    def close(self) -> None:
        for number in [*self._links, *self._strangers]:
            self._drop(number)
        self._epoll.close()
        self._socket.close()

    def _accept(self) -> None:
        stream, _ = self._socket.accept()
        credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(credentials)
        if user != os.geteuid():
            stream.close()
            return
        self._strangers[stream.fileno()] = Framed(stream)
        self._epoll.register(stream, select.EPOLLIN)

    def _receive(self, number: int) -> list[bytes]:
        """Messages of one connection; the first of all must be the token."""
        try:
            messages = (self._links.get(number) or self._strangers[number]).receive()
        except ConnectionError:
            self._drop(number)
            return []
        if number not in self._links and messages:
            if not hmac.compare_digest(messages.pop(0), self._token):
                self._drop(number)
                return []
            self._links[number] = self._strangers.pop(number)
        return messages

    def _flush(self, number: int) -> None:
        try:
            kept = self._links[number].flush()
        except OSError:
            self._drop(number)
            return
        if not kept:
            self._epoll.modify(number, select.EPOLLIN)

    def _drop(self, number: int) -> None:
        framed = self._links.pop(number, None) or self._strangers.pop(number)
        self._epoll.unregister(number)
        framed.close()


class LocalClient:
    """The scheduler's link to one agent of its engine. Used by one thread.

    Args:
        address: The agent's `local_address`. The agent listens already: vLLM starts workers before the scheduler.
        secret: The cluster secret.

    Raises:
        OSError: Nobody listens there.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._framed = Framed(stream)
        stream.settimeout(_START_WAIT_S)
        try:
            stream.connect(_abstract(address))
        except OSError:
            stream.close()
            raise
        self._poll = select.poll()
        self._poll.register(stream, select.POLLIN)
        self._framed.send(_token(secret))

    def send(self, payload: bytes) -> None:
        """Send one message. Dropped when the agent is gone: vLLM itself notices a dead worker."""
        try:
            self._framed.send(payload)
        except OSError:
            return

    def receive(self, timeout_s: float = 0.0) -> list[bytes]:
        """All messages that are there, waiting for up to `timeout_s` for the first."""
        if timeout_s:
            self._poll.poll(timeout_s * 1000)
        try:
            return self._framed.receive()
        except ConnectionError:
            return []

    def close(self) -> None:
        self._framed.close()


def local_address(engine_id: str, rank: int) -> str:
    """Where the agent of one rank listens for its scheduler."""
    return f"triptych-ec-{engine_id}-{rank}"


def _abstract(address: str) -> str:
    return f"\0{address}"


def _token(secret: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=32, person=b"ec scheduler").digest()
