"""Signed references: every field counts, and nothing a client can send makes verification fail with an exception."""

from __future__ import annotations

import time

import msgspec
import pytest

from serving.protocol import EncodingRef
from serving.references import ReferenceSigner, metadata_digest
from tests.fakes import ref_for

SECRET = b"0123456789abcdef"


def signer(**changes: object) -> ReferenceSigner:
    options: dict[str, object] = {"lifetime_s": 20.0, "peer_networks": ["127.0.0.0/8"]}
    return ReferenceSigner(SECRET, **(options | changes))  # type: ignore[arg-type]


def signed(**changes: object) -> EncodingRef:
    return signer(**changes).sign(ref_for("a"), metadata={"image_grid_thw": [1, 4, 4]}, cache_salt="tenant")


def test_what_was_signed_verifies() -> None:
    assert signer().verify(signed(), cache_salt="tenant")


@pytest.mark.parametrize("field", [name for name in EncodingRef.__struct_fields__ if name != "mac"])
def test_every_field_is_covered(field: str) -> None:
    ref = signed()
    value = getattr(ref, field)
    other = {str: "x", int: 7_777, float: time.time() + 1000, tuple: (9, 9)}[type(value)]
    assert not signer().verify(msgspec.structs.replace(ref, **{field: other}), cache_salt="tenant")


def test_another_secret_another_tenant_and_the_past_do_not_verify() -> None:
    other = ReferenceSigner(b"fedcba9876543210", lifetime_s=20.0, peer_networks=["127.0.0.0/8"])
    assert not other.verify(signed(), cache_salt="tenant")
    assert not signer().verify(signed(), cache_salt=None)
    assert not signer().verify(signed(lifetime_s=-1.0), cache_salt="tenant")
    assert not signer(clock_skew_s=30.0).verify(signed(), cache_salt="tenant")


def test_a_peer_outside_the_networks_does_not_verify() -> None:
    assert not signer(peer_networks=["10.0.0.0/8"]).verify(signed(), cache_salt="tenant")


@pytest.mark.parametrize("changes", [{"mac": "ü"}, {"size_bytes": 2**70}, {"peer": "tcp://["}, {"peer": "nowhere"}])
def test_nonsense_is_no_reference(changes: dict[str, object]) -> None:
    assert not signer().verify(msgspec.structs.replace(signed(), **changes), cache_salt="tenant")


def test_metadata_digest_ignores_key_order() -> None:
    assert metadata_digest({"a": [1], "b": 2}) == metadata_digest({"b": 2, "a": [1]})
    assert metadata_digest({"a": [1]}) != metadata_digest({"a": [2]})


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        ReferenceSigner(b"short", lifetime_s=1.0, peer_networks=[])
