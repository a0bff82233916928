"""The pool keeps its invariants whatever is done to it, and gives room to all or none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ec_connector.pool import GRANULE_BYTES, Extent, Pool, Spec, State, granule_bytes

CAPACITY = 16 * GRANULE_BYTES
SIZES = st.integers(1, 6 * GRANULE_BYTES)


def spec(identifier: str, size_bytes: int = GRANULE_BYTES) -> Spec:
    return Spec(identifier, size_bytes, (size_bytes, 1), "bfloat16")


def ready(pool: Pool, identifier: str, size_bytes: int = GRANULE_BYTES) -> Extent:
    extents = pool.reserve([spec(identifier, size_bytes)])
    assert extents is not None
    pool.commit(extents[0], digest=1)
    return extents[0]


class Model:
    """What must be true of a pool after any sequence of operations; `pick` chooses what an operation works on."""

    def __init__(self) -> None:
        self.pool = Pool(CAPACITY)
        self.held: dict[State, list[Extent]] = {state: [] for state in State}
        self.names = 0

    def apply(self, operation: str, pick: int, sizes: list[int]) -> None:
        filling, ready, quarantined = (self.held[state] for state in State)
        pinned = [extent for extent in ready if extent.pins]
        match operation:
            case "reserve":
                self.reserve(sizes)
            case "commit" if filling:
                ready.append(filling.pop(pick % len(filling)))
                self.pool.commit(ready[-1], digest=3)
            case "abandon" if filling:
                self.pool.abandon(filling.pop(pick % len(filling)))
            case "quarantine" if filling:
                quarantined.append(filling.pop(pick % len(filling)))
                self.pool.quarantine(quarantined[-1])
            case "release" if quarantined:
                self.pool.release(quarantined.pop(pick % len(quarantined)))
            case "pin" if ready:
                self.pool.pin(ready[pick % len(ready)])
            case "unpin" if pinned:
                self.pool.unpin(pinned[pick % len(pinned)])

    def reserve(self, sizes: list[int]) -> None:
        before, stats = self.pool.extents(), self.pool.stats()
        specs = [spec(f"item-{self.names + index}", size) for index, size in enumerate(sizes)]
        self.names += len(sizes)
        extents = self.pool.reserve(specs)
        if extents is None:
            assert self.pool.extents() == before
            assert self.pool.stats() == stats
            return
        assert min(e.generation for e in extents) > max((e.generation for e in before), default=0)
        left = set(map(id, self.pool.extents()))
        evicted = [extent for extent in before if id(extent) not in left]
        assert all(extent.state is State.READY and extent.pins == 0 for extent in evicted)
        self.held[State.FILLING] += extents
        self.held[State.READY] = [extent for extent in self.held[State.READY] if id(extent) in left]

    def check(self) -> None:
        expected = [extent for extents in self.held.values() for extent in extents]
        held = sorted(self.pool.extents(), key=lambda extent: extent.offset)
        assert set(map(id, held)) == set(map(id, expected))
        end = 0
        for extent in held:
            assert extent.offset >= end
            assert extent.offset % GRANULE_BYTES == 0
            end = extent.offset + granule_bytes(extent.size_bytes)
            found = self.pool.find(extent.identifier)
            assert (found is extent) is (extent.state is not State.QUARANTINED)
        assert end <= CAPACITY
        assert self.pool.stats().used_bytes == sum(granule_bytes(extent.size_bytes) for extent in held)

    def finish(self) -> None:
        for extent in self.held[State.READY]:
            while extent.pins:
                self.pool.unpin(extent)
        for extent in self.held[State.FILLING]:
            self.pool.abandon(extent)
        for extent in self.held[State.QUARANTINED]:
            self.pool.release(extent)
        assert self.pool.reserve([spec("whole", CAPACITY)]) is not None, "free runs were not merged"


OPERATIONS = ("reserve", "reserve", "commit", "commit", "abandon", "quarantine", "release", "pin", "unpin")


@settings(max_examples=2000, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 31), st.lists(SIZES, min_size=1, max_size=3)),
        max_size=30,
    )
)
def test_invariants_hold_after_any_sequence(sequence: list[tuple[str, int, list[int]]]) -> None:
    model = Model()
    for operation, pick, sizes in sequence:
        model.apply(operation, pick, sizes)
        model.check()
    model.finish()


class TestEviction:
    def test_the_least_recently_used_goes_first(self) -> None:
        pool = Pool(3 * GRANULE_BYTES)
        for name in "abc":
            ready(pool, name)
        a = pool.find("a")
        assert a is not None
        pool.touch(a)
        ready(pool, "d")
        assert [pool.find(name) is not None for name in "abcd"] == [True, False, True, True]

    def test_a_pinned_extent_stays(self) -> None:
        pool = Pool(2 * GRANULE_BYTES)
        pool.pin(ready(pool, "a"))
        ready(pool, "b")
        assert pool.reserve([spec("c"), spec("d")]) is None
        assert pool.find("b") is not None, "a reservation that failed evicted something"
        assert pool.reserve([spec("c")]) is not None
        assert pool.find("a") is not None

    def test_an_unpin_counts_as_room(self) -> None:
        pool = Pool(GRANULE_BYTES)
        extent = ready(pool, "a")
        pool.pin(extent)
        before = pool.freed
        pool.unpin(extent)
        assert pool.freed > before


class TestMisuse:
    def test_a_second_extent_for_an_identifier_is_refused(self) -> None:
        pool = Pool(CAPACITY)
        ready(pool, "a")
        with pytest.raises(ValueError, match="exists"):
            pool.reserve([spec("a")])

    def test_unpinning_what_is_not_pinned_is_refused(self) -> None:
        pool = Pool(CAPACITY)
        with pytest.raises(ValueError, match="not pinned"):
            pool.unpin(ready(pool, "a"))

    def test_pinning_what_is_not_ready_is_refused(self) -> None:
        pool = Pool(CAPACITY)
        extents = pool.reserve([spec("a")])
        assert extents is not None
        with pytest.raises(ValueError, match="filling"):
            pool.pin(extents[0])

    def test_an_item_larger_than_the_pool_never_fits(self) -> None:
        assert not Pool(CAPACITY).fits_empty(CAPACITY + 1)
        assert Pool(CAPACITY).fits_empty(CAPACITY)
