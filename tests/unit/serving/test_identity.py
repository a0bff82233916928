"""Internal identifiers: bound to tenant, name, model and content."""

from __future__ import annotations

import pytest

from serving.identity import IdentityIndex, internal_id, is_internal, payload_digest, unknown_id
from serving.protocol import TensorInfo, Tensors


def tensors(*frames: bytes, grid: tuple[int, ...] = (1, 6, 8)) -> Tensors:
    return Tensors(frames, {"image_grid_thw": list(grid)}, {"pixel_values": TensorInfo((1,), "uint8")})


def test_digest_covers_bytes_their_frames_and_metadata() -> None:
    variants = [
        tensors(b"ab"),
        tensors(b"ac"),
        tensors(b"a", b"b"),
        tensors(b"", b"ab"),
        tensors(b"ab", grid=(1, 8, 6)),
    ]
    digests = {payload_digest(variant) for variant in variants}
    assert len(digests) == len(variants)
    assert payload_digest(tensors(b"ab")) == payload_digest(tensors(b"ab"))
    reordered = Tensors((b"ab",), {"b": 1, "a": 2}, {})
    assert payload_digest(reordered) == payload_digest(Tensors((b"ab",), {"a": 2, "b": 1}, {}))


def test_same_name_for_other_content_tenant_or_model_is_another_item() -> None:
    base = internal_id("salt", "cat.png", "d1")
    others = {
        internal_id("salt", "cat.png", "d2"),
        internal_id("salt", "dog.png", "d1"),
        internal_id("pepper", "cat.png", "d1"),
        internal_id(None, "cat.png", "d1"),
        internal_id("", "cat.png", "d1"),
        internal_id("saltcat", ".png", "d1"),
        internal_id("salt", "cat.png", "d1", model="m"),
    }
    assert len(others | {base}) == 8
    assert base == internal_id("salt", "cat.png", "d1")
    assert "salt" not in base
    assert "cat" not in base


def test_internal_identifier_proves_its_payload() -> None:
    """So a second door need not rename it, and a client cannot claim one for other content."""
    digest = payload_digest(tensors(b"ab"))
    mine = internal_id("salt", "cat.png", digest)
    assert is_internal(mine, digest)
    assert not is_internal(mine, payload_digest(tensors(b"ac")))
    assert not is_internal(digest, digest)
    assert not is_internal(f"cat-{digest}", digest)
    assert not is_internal(unknown_id("salt", "cat.png"), digest)


def test_index_answers_with_the_tenants_latest() -> None:
    index = IdentityIndex(8)
    index.record("salt", "cat.png", "first")
    index.record("salt", "cat.png", "second")
    index.record("pepper", "cat.png", "another's")
    assert index.find("salt", "cat.png") == "second"
    assert index.find("pepper", "cat.png") == "another's"
    assert index.find(None, "cat.png") is None
    assert index.find("salt", "dog.png") is None


def test_index_forgets_the_least_recently_used() -> None:
    index = IdentityIndex(2)
    index.record(None, "a", "1")
    index.record(None, "b", "2")
    assert index.find(None, "a") == "1"
    index.record(None, "c", "3")
    assert [index.find(None, name) for name in "abc"] == ["1", None, "3"]
    assert len(index) == 2
    with pytest.raises(ValueError, match="capacity"):
        IdentityIndex(0)
