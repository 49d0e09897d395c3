"""Compares BlockPool with a simple model: which blocks are referenced, which can be found, and
which are taken first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pegboard.engine.kv.pool import NULL_BLOCK, BlockPool


def test_take_is_all_or_nothing_and_never_gives_the_null_block() -> None:
    pool = BlockPool(5)
    assert pool.take(5) is None
    assert pool.num_free == 4
    taken = pool.take(4)
    assert taken is not None and sorted(taken) == [1, 2, 3, 4]
    assert pool.usage == 1.0


def test_cached_blocks_are_evicted_last_and_oldest_first() -> None:
    pool = BlockPool(5)
    a, b, c, d = pool.take(4) or []
    for name, block_id in ((b"a", a), (b"b", b), (b"c", c)):
        pool.insert(0, name, block_id)
    pool.free([c, b, a])  # the last blocks of the request first
    pool.free([d])  # has no content worth keeping, so it is taken first
    assert pool.take(1) == [d]
    assert pool.take(1) == [c]
    assert [pool.find(0, name) for name in (b"a", b"b", b"c")] == [a, b, None]


def test_a_touched_block_survives() -> None:
    pool = BlockPool(3)
    a, b = pool.take(2) or []
    pool.insert(0, b"a", a)
    pool.free([a])
    pool.touch([a, NULL_BLOCK])
    assert pool.take(1) is None
    pool.free([b])
    assert pool.take(1) == [b]
    assert pool.find(0, b"a") == a


def test_groups_do_not_mix_and_the_first_block_keeps_a_hash() -> None:
    pool = BlockPool(4)
    a, b, _ = pool.take(3) or []
    pool.insert(0, b"x", a)
    pool.insert(0, b"x", b)
    assert pool.find(0, b"x") == a and pool.find(1, b"x") is None
    pool.insert(1, b"x", b)
    assert pool.find(1, b"x") == b


def test_reset_needs_everything_free() -> None:
    pool = BlockPool(3)
    (a,) = pool.take(1) or []
    pool.insert(0, b"a", a)
    assert not pool.reset()
    pool.free([a])
    assert pool.reset()
    assert pool.find(0, b"a") is None


def test_freeing_too_often_is_caught() -> None:
    pool = BlockPool(2)
    pool.free(pool.take(1) or [])
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free([1])


class PoolMachine(RuleBasedStateMachine):
    """Runs random operations. `refs` and `names` contain the expected state."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.refs: Counter[int] = Counter()
        self.names: dict[bytes, int] = {}

    @rule(n=st.integers(0, 4))
    def take(self, n: int) -> None:
        free = [block for block in range(1, 8) if not self.refs[block]]
        taken = self.pool.take(n)
        if taken is None:
            assert n > len(free)
            return
        assert len(set(taken)) == n and set(taken) <= set(free)
        uncached = [block for block in free if block not in self.names.values()]
        assert set(taken) <= set(uncached) or set(uncached) <= set(taken), (
            "a cached block was taken before an empty one"
        )
        self.names = {name: block for name, block in self.names.items() if block not in taken}
        self.refs.update(taken)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        held = sorted(block for block, count in self.refs.items() if count)
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.free([block])
            self.refs[block] -= 1

    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def insert(self, data: st.DataObject, name: bytes) -> None:
        held = sorted(block for block, count in self.refs.items() if count)
        if held:
            block = data.draw(st.sampled_from(held))
            self.pool.insert(0, name, block)
            if block not in self.names.values():
                self.names.setdefault(name, block)

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, name: bytes) -> None:
        block = self.pool.find(0, name)
        assert block == self.names.get(name)
        if block is not None:
            self.pool.touch([block])
            self.refs[block] += 1

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == sum(1 for block in range(1, 8) if not self.refs[block])
        assert self.pool.num_cached == len(self.names)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
