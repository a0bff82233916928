"""The receiver cache: byte budgets, what outlives what, identity, and many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill.receiver_cache import ReceiverCache
from serving.errors import InvalidFeature
from serving.protocol import Metadata, ResolvedItem, TensorInfo, Tensors

GRID = {"image_grid_thw": [1, 6, 8]}
TENANT = "t"
KIB = 1024


def tensors(size_bytes: int = 10 * KIB, fill: bytes = b"x") -> Tensors:
    return Tensors((b"h", fill * (size_bytes - 1)), dict(GRID), {"pixel_values": TensorInfo((1,), "uint8")})


def test_returns_the_most_it_holds() -> None:
    cache = ReceiverCache(64 * KIB)
    assert cache.get(TENANT, "a") is None
    cache.put(TENANT, "a", Metadata(GRID))
    assert cache.get(TENANT, "a") == Metadata(GRID)
    cache.put(TENANT, "a", tensors())
    assert cache.get(TENANT, "a") == tensors()
    cache.put(TENANT, "a", Metadata(GRID))
    assert cache.get(TENANT, "a") == tensors()  # metadata takes no tensors away


def test_resolves_what_it_holds_and_leaves_out_the_rest() -> None:
    cache = ReceiverCache(64 * KIB)
    cache.put(TENANT, "a", Metadata(GRID))
    cache.put(TENANT, "b", tensors())
    assert cache.resolve(TENANT, ["b", "absent", "a", "a"]) == {
        "b": ResolvedItem("b", GRID, True, None),
        "a": ResolvedItem("a", GRID, False, None),
    }


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Metadata(GRID), Metadata({"image_grid_thw": [1, 8, 6]})),
        (Metadata({"image_grid_thw": [1, 8, 6]}), tensors()),
        (tensors(), tensors(fill=b"y")),
        (tensors(), Metadata({})),
    ],
)
def test_content_of_an_identifier_never_changes(first: Tensors | Metadata, second: Tensors | Metadata) -> None:
    cache = ReceiverCache(64 * KIB)
    cache.put(TENANT, "a", first)
    before = cache.counters()
    with pytest.raises(InvalidFeature) as caught:
        cache.put(TENANT, "a", second)
    assert caught.value.hashes == ("a",)
    assert cache.counters() == before
    assert cache.get(TENANT, "a") == first


def test_least_recently_used_tensors_go_first_and_leave_their_metadata() -> None:
    cache = ReceiverCache(32 * KIB)
    cache.put(TENANT, "a", tensors())
    cache.put(TENANT, "b", tensors())
    cache.get(TENANT, "a")
    cache.put(TENANT, "c", tensors())
    assert cache.get(TENANT, "b") == Metadata(GRID)
    assert isinstance(cache.get(TENANT, "a"), Tensors)
    assert isinstance(cache.get(TENANT, "c"), Tensors)
    assert cache.counters().evictions == 1


def test_item_larger_than_the_cache_keeps_its_metadata_and_evicts_nothing() -> None:
    cache = ReceiverCache(32 * KIB)
    cache.put(TENANT, "a", tensors())
    cache.put(TENANT, "huge", tensors(64 * KIB))
    assert cache.get(TENANT, "huge") == Metadata(GRID)
    assert isinstance(cache.get(TENANT, "a"), Tensors)


def test_cache_of_nothing_keeps_nothing() -> None:
    cache = ReceiverCache(0)
    cache.put(TENANT, "a", tensors())
    assert cache.get(TENANT, "a") is None
    with pytest.raises(ValueError, match="negative"):
        ReceiverCache(-1)


def test_counters() -> None:
    cache = ReceiverCache(64 * KIB)
    cache.get(TENANT, "a")
    cache.put(TENANT, "a", tensors())
    cache.get(TENANT, "a")
    cache.resolve(TENANT, ["a", "b"])
    counters = cache.counters()
    assert (counters.hits, counters.misses, counters.evictions, counters.items) == (2, 2, 0, 1)
    assert 10 * KIB < counters.size_bytes < 12 * KIB


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0, 1, 3, 9, 40])), max_size=40), st.integers(0, 48))
@settings(max_examples=100, deadline=None)
def test_never_holds_more_than_its_bytes(puts: list[tuple[int, int]], capacity_kib: int) -> None:
    cache = ReceiverCache(capacity_kib * KIB)
    kept: dict[str, Tensors | Metadata] = {}
    for name, size_kib in puts:
        # An identifier's size belongs to its content, so it is part of the name here.
        identifier = f"{name}-{size_kib}"
        payload = tensors(size_kib * KIB) if size_kib else Metadata(GRID)
        cache.put(TENANT, identifier, payload)
        kept[identifier] = payload
        assert cache.counters().size_bytes <= capacity_kib * KIB
    for identifier, payload in kept.items():
        assert cache.get(TENANT, identifier) in (payload, Metadata(GRID), None)


def test_many_threads_on_one_item() -> None:
    cache = ReceiverCache(64 * KIB)

    def use(index: int) -> bool:
        cache.put(TENANT, "a", tensors() if index % 2 else Metadata(GRID))
        cache.put(TENANT, f"other-{index % 7}", tensors())
        return cache.get(TENANT, "a") in (tensors(), Metadata(GRID))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(use, range(400)))
    counters = cache.counters()
    assert counters.hits + counters.misses == 400
    assert counters.size_bytes <= 64 * KIB


def test_what_one_tenant_sent_is_not_there_for_another() -> None:
    cache = ReceiverCache(64 * KIB)
    cache.put("mine", "a", tensors())
    assert cache.get("yours", "a") is None
    assert cache.resolve("yours", ["a"]) == {}
    cache.put("yours", "a", Metadata({}))
    assert cache.get("mine", "a") == tensors()
