"""What agents say: to each other over TCP, and to their own engine's scheduler over ipc.

Frozen msgspec structs in msgpack, one tagged union per direction. Between agents:

    consumer -> producer   Hello, Get, Done, Release
    producer -> consumer   Welcome, Refused, Grant, Nack

A consumer that holds an announced place needs only Hello (once per peer) and Done. `Get` asks for a place
that had not been ready at announcement. What is never reported as done expires.
"""

from __future__ import annotations

import enum
import hashlib
import json
from typing import Any

import msgspec

from serving.protocol import EncodingRef

WIRE_VERSION = 2
"""Raised with every change to this file that an older peer would misread."""


class Reason(enum.StrEnum):
    """Why a request could not get its encodings."""

    CACHE_MISS = "cache_miss"
    """No reference, no tensors and no copy in the slab."""
    LOST = "lost"
    """The peer is gone, or no longer holds the item."""
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"
    """Shape, dtype, digest, epoch or model differ from what was announced."""
    TOO_LARGE = "too_large"
    BUSY = "busy"
    """Every extent stayed pinned for as long as a request may wait."""


class Source(enum.StrEnum):
    """How an engine came by an item for one request."""

    ENCODED = "encoded"
    SLAB = "slab"
    REMOTE = "remote"
    NONE = "none"
    """Never needed: the prefix cache covered its tokens."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=True):
    pass


# --- between agents -------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """First message to a peer. `compatibility` is `compatibility_hash` of the consumer's model."""

    wire_version: int
    compatibility: str


class Place(_Message, frozen=True):
    """Where a process runs, as far as it decides which way its memory can be read. `boot` names the running kernel."""

    boot: str
    pid_namespace: str
    ipc_namespace: str
    user: int


class Welcome(_Message, frozen=True):
    """The producer's answer: how to read its slab.

    `address` is the slab's base in the producer's address space; `device` is -1 for host memory.
    """

    epoch: str
    nixl_metadata: bytes
    address: int
    slab_bytes: int
    device: int
    place: Place


class Refused(_Message, frozen=True):
    """The peers cannot work together. Permanent until one of them restarts with another model or version."""

    why: str


class Get(_Message, frozen=True):
    """Asks for a place. Answered by Grant or Nack with the same `token`, once the item is ready or gone."""

    token: int
    identifier: str


class Grant(_Message, frozen=True):
    token: int
    lease: str
    offset: int
    generation: int
    shape: tuple[int, int]
    dtype: str
    size_bytes: int
    digest: int


class Nack(_Message, frozen=True):
    token: int
    why: str


class Done(_Message, frozen=True):
    """One reader of `lease` has its bytes. The pin goes when all `readers` ranks have said so."""

    lease: str
    reader: int
    readers: int


class Release(_Message, frozen=True):
    """As Done, for a lease that this reader will not use."""

    lease: str
    reader: int
    readers: int


PeerMessage = Hello | Get | Done | Release
PeerReply = Welcome | Refused | Grant | Nack


# --- between a scheduler and the agents of its engine ---------------------------------------------------------


class WantedItem(_Message, frozen=True):
    """One item that a request cannot be scheduled without.

    `rows` is what the prompt needs. `optional` means that the engine holds tensors and can encode the item itself;
    where `room_width` is set too, room for the output (rows, room_width) is reserved first.
    """

    identifier: str
    rows: int
    ref: EncodingRef | None = None
    optional: bool = False
    room_width: int = 0


class Want(_Message, frozen=True):
    """Pin these items for the request, reading them from their peers where necessary. All or none are reserved."""

    request_id: str
    items: tuple[WantedItem, ...]


class Drop(_Message, frozen=True):
    """The request ended, in whatever way. `leases` are (peer, lease) it was given and never asked for."""

    request_id: str
    leases: tuple[tuple[str, str], ...] = ()


class PinView(_Message, frozen=True):
    """vLLM will keep a view of the item until `load_id` comes back as unpinned by the worker."""

    load_id: int
    identifier: str


class Announce(_Message, frozen=True):
    """Pin what is ready of `identifiers` and say where it lies. `metadata` is kept with the extents.

    A `revocable` pin yields when this engine needs the room itself.
    """

    token: int
    identifiers: tuple[str, ...]
    metadata: dict[str, dict[str, Any]]
    revocable: bool = False


class Retract(_Message, frozen=True):
    """An announcement came too late to be handed out: drop its leases."""

    leases: tuple[str, ...]


class Fail(_Message, frozen=True):
    """The request is about to fail; keep the reason for the stage server. Answered by Noted."""

    request_id: str
    reason: Reason
    identifiers: tuple[str, ...]


class Count(_Message, frozen=True):
    """Asks for the agent's counters and gauges. Answered by Counted."""


ToAgent = Want | Drop | PinView | Announce | Retract | Fail | Count


class Pinned(_Message, frozen=True):
    """The item is in this rank's slab, pinned for the request. `transfer_s` is 0 unless it was read from a peer."""

    request_id: str
    identifier: str
    source: Source
    transfer_s: float


class Absent(_Message, frozen=True):
    """An optional item is not here; the engine encodes it, into the room reserved where it was asked for."""

    request_id: str
    identifier: str


class Missing(_Message, frozen=True):
    """The item cannot be had."""

    request_id: str
    identifier: str
    reason: Reason


class Announced(_Message, frozen=True):
    """`refs` are unsigned and hold an entry for each item that the slab holds or is filling."""

    token: int
    peer: str
    epoch: str
    refs: dict[str, EncodingRef]


class Noted(_Message, frozen=True):
    request_id: str


class Counted(_Message, frozen=True):
    numbers: dict[str, float]


ToScheduler = Pinned | Absent | Missing | Announced | Noted | Counted


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


class _Entry(msgspec.Struct):
    """One item's entry of `ec_transfer_params`; upstream's keys beside `ref` are not read here."""

    ref: EncodingRef | None = None


def ref_from(params: object, identifier: str) -> EncodingRef | None:
    """The reference to an item in a request's `ec_transfer_params`. The stage server has checked its signature.

    What is no reference counts as none: a client's words must not raise inside an engine's scheduler.
    """
    try:
        entries = msgspec.convert(params or {}, dict[str, Any])
        return msgspec.convert(entries.get(identifier) or {}, _Entry).ref
    except msgspec.ValidationError:
        return None


def announced_fields(ref: EncodingRef) -> dict[str, Any]:
    """The fields of `ref` that an agent fills in, as plain values; the rest is the signing server's."""
    fields = ("identifier", "peer", "epoch", "offset", "generation", "shape", "dtype", "size_bytes", "digest", "lease")
    plain = msgspec.to_builtins(ref)
    return {field: plain[field] for field in fields}


def compatibility_hash(*, model: str, revision: str | None, dtype: str) -> str:
    """Names what two engines must share for one's encoder outputs to mean anything to the other.

    Args:
        model: Name or path of the model's weights.
        revision: Revision of the weights, if the name alone does not fix it.
        dtype: Element type of encoder outputs.
    """
    factors = json.dumps([WIRE_VERSION, model, revision, dtype])
    return hashlib.blake2b(factors.encode(), digest_size=16).hexdigest()
