"""Signing and checking of `EncodingRef`s.

A reference makes an engine connect to an address and read memory there, so only servers may issue one. The
signature covers every field; the key is derived from the cluster secret. A reference that does not verify is
treated as absent, never as an error of its own: what then happens is the admission policy's decision.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from serving.protocol import EncodingRef

_KEY_CONTEXT = b"triptych encoding reference v1"


def metadata_digest(fields: dict[str, Any]) -> str:
    """A digest of an item's metadata that does not depend on key order. 32 hex digits."""
    return hashlib.blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=16).hexdigest()


def salt_digest(cache_salt: str | None) -> str:
    """Names the tenant in a reference without revealing its salt. 32 hex digits."""
    return hashlib.blake2b((cache_salt or "").encode(), digest_size=16, person=b"salt").hexdigest()


class ReferenceSigner:
    """Issues and verifies references under one cluster secret.

    Args:
        secret: The cluster secret, shared by all servers. At least 16 bytes.
        lifetime_s: Seconds a new reference stays valid. Below the producer's pin lease, or it outlives the data.
        peer_networks: Networks (CIDR) whose addresses a reference may name.
        clock_skew_s: Largest difference between the machines' clocks; expiry is judged this much early.
    """

    def __init__(
        self, secret: bytes, *, lifetime_s: float, peer_networks: Sequence[str], clock_skew_s: float = 0.0
    ) -> None:
        if len(secret) < 16:
            raise ValueError("the cluster secret must have at least 16 bytes")
        self._key = hmac.digest(secret, _KEY_CONTEXT, "sha256")
        self._lifetime_s = lifetime_s
        self._skew_s = clock_skew_s
        self._networks = tuple(ipaddress.ip_network(network) for network in peer_networks)

    def sign(self, ref: EncodingRef, *, metadata: dict[str, Any], cache_salt: str | None) -> EncodingRef:
        """`ref` with its digests, expiry and signature filled in."""
        bound = msgspec.structs.replace(
            ref,
            metadata_digest=metadata_digest(metadata),
            salt_digest=salt_digest(cache_salt),
            expires_at=time.time() + self._lifetime_s,
            mac="",
        )
        return msgspec.structs.replace(bound, mac=self._mac(bound))

    def verify(self, ref: EncodingRef, *, cache_salt: str | None) -> bool:
        """Whether `ref` was issued under this secret, for this tenant, has not expired and names an allowed peer."""
        try:
            expected = self._mac(msgspec.structs.replace(ref, mac=""))
        except OverflowError:  # an integer of more than 64 bits, which no server of ours has written
            return False
        genuine = secrets.compare_digest(ref.mac.encode(), expected.encode())  # bytes: a client's text may be any
        return (
            genuine
            and ref.expires_at - self._skew_s > time.time()
            and ref.salt_digest == salt_digest(cache_salt)
            and self._allows(ref.peer)
        )

    def _mac(self, unsigned: EncodingRef) -> str:
        return hmac.digest(self._key, msgspec.msgpack.encode(unsigned), "sha256").hex()

    def _allows(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(urlsplit(peer).hostname or "")
        except ValueError:
            return False
        return any(address in network for network in self._networks)
