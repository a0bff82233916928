"""Stand-ins for what the state machines reach through their ports.

What they do not do: `FakeReader` moves no bytes (a read ends when the test says so, whatever the regions are),
`FakeNetwork` delivers nothing and never fails, `FakeMemory` digests by table, `FakeLink` keeps no order between
ranks.
"""

from __future__ import annotations

from collections import deque

from ec_connector.protocol import PeerMessage, Place, encode
from ec_connector.transport.reads import PeerUnusable, Read, ReadState, Region
from serving.protocol import EncodingRef

PEER = "tcp://127.0.0.1:7001"
OTHER_PEER = "tcp://127.0.0.1:7002"
MIB = 1 << 20
PLACE = Place("boot", "pid:[1]", "ipc:[1]", 0)


class FakeReader:
    """Reads that stay as `state` says until `end` is called."""

    def __init__(self) -> None:
        self.state = ReadState.DONE
        self.reads: list[Read] = []
        self.peers: list[str] = []
        self.dropped: list[str] = []

    def add_peer(self, metadata: bytes) -> str:
        if not metadata:
            raise PeerUnusable("empty metadata")
        self.peers.append(metadata.decode())
        return self.peers[-1]

    def drop_peer(self, name: str) -> None:
        self.dropped.append(name)

    def read(self, peer: str, source: Region, source_offset: int, offset: int, size_bytes: int) -> Read:
        self.reads.append(Read((peer, source_offset, offset, size_bytes), self.state))
        return self.reads[-1]

    def poll(self, read: Read) -> ReadState:
        return read.state

    def end(self, state: ReadState) -> None:
        for read in self.reads:
            if read.state is ReadState.MOVING:
                read.state = state


class FakeNetwork:
    """Remembers what was sent to whom."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.sent: list[tuple[str, PeerMessage]] = []

    def connect(self, address: str) -> None:
        self.open.add(address)

    def disconnect(self, address: str) -> None:
        self.open.discard(address)

    def send(self, address: str, message: PeerMessage) -> None:
        assert address in self.open
        self.sent.append((address, message))

    def take(self) -> list[PeerMessage]:
        sent, self.sent = self.sent, []
        return [message for _, message in sent]


class FakeMemory:
    """Digests 7 for everything, unless told otherwise."""

    def __init__(self) -> None:
        self.value = 7

    def digest(self, offset: int, size_bytes: int) -> int:
        return self.value


class FakeLink:
    """One rank's agent, answering only what the test puts into `inbox`."""

    def __init__(self) -> None:
        self.inbox: deque[bytes] = deque()
        self.sent: list[bytes] = []
        self.closed = False

    def send(self, payload: bytes) -> None:
        self.sent.append(payload)

    def receive(self, timeout_s: float = 0.0) -> list[bytes]:
        taken = list(self.inbox)
        self.inbox.clear()
        return taken

    def close(self) -> None:
        self.closed = True

    def say(self, *messages: object) -> None:
        self.inbox.extend(encode(message) for message in messages)  # type: ignore[arg-type]


def ref(
    identifier: str,
    *,
    peer: str = PEER,
    size_bytes: int = MIB,
    offset: int | None = 0,
    digest: int = 7,
    lease: str | None = None,
    epoch: str = "epoch",
) -> EncodingRef:
    """A reference to (rows, 64) bfloat16 of `size_bytes`, under its own lease unless told otherwise."""
    return EncodingRef(
        identifier=identifier,
        peer=peer,
        epoch=epoch,
        offset=offset,
        generation=1,
        shape=(size_bytes // 128, 64),
        dtype="bfloat16",
        size_bytes=size_bytes,
        digest=digest,
        lease=f"lease-{identifier}" if lease is None else lease,
    )
