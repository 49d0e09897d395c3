"""Compares the measured residency of KV blocks with a simple computation from all events, for
random histories of a pool."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from pegboard.data.sampling_params import SamplingParams
from pegboard.engine.kv.pool import BlockPool
from pegboard.engine.kv.residency import NUM_GAPS, BlockResidency
from pegboard.interfaces.metrics import Totals
from pegboard_testing.fake_engine import FakeEngine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "touch", "free", "reset"]),
            st.integers(0, 5),
            st.integers(1, 3),
        )
    )
)
def test_every_stay_is_told_once(history: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    residency = BlockResidency(1.0, clock=clock)
    pool = BlockPool(4, residency=residency)
    held: list[int] = []
    taken: dict[int, float] = {}
    uses: dict[int, list[float]] = defaultdict(list)
    lifetimes = []
    idle = []
    gaps = []
    for action, which, seconds in history:
        clock.now += seconds
        if action == "take" and (blocks := pool.take(1)) is not None:
            (block,) = blocks
            if block in taken:
                lifetimes.append(clock.now - taken[block])
                idle.append(clock.now - max([taken[block], *uses[block]]))
                last = uses[block][-NUM_GAPS - 1 :]
                gaps += [b - a for a, b in zip(last, last[1:], strict=False)]
            taken[block] = clock.now
            uses[block] = []
            held.append(block)
        elif action == "touch" and held:
            block = held[which % len(held)]
            pool.touch([block])
            uses[block].append(clock.now)
            held.append(block)
        elif action == "free" and held:
            pool.free([held.pop(which % len(held))])
        elif action == "reset" and pool.reset():
            taken.clear()
    assert (residency.lifetimes, residency.idle_times, residency.reuse_gaps) == (
        lifetimes,
        idle,
        gaps,
    )
    residency.clear()
    assert not (residency.lifetimes or residency.idle_times or residency.reuse_gaps)


@given(st.integers(0, 1000))
def test_a_share_of_the_blocks_is_watched(seed: int) -> None:
    residency = BlockResidency(0.5, seed=seed)
    residency.taken(range(1000))
    residency.taken(range(1000))
    assert 350 < len(residency.lifetimes) < 650


def test_an_engine_measures_it_when_told_to() -> None:
    def counts(share: float) -> dict[str, int]:
        totals = Totals()
        engine = FakeEngine(num_blocks=17, kv_metrics_share=share, metrics=[totals])
        for index in range(12):
            for again in range(2):
                engine.add(
                    f"{index}-{again}",
                    [index + 3] * 20,
                    SamplingParams(temperature=0, max_tokens=2),
                )
                engine.run()
        return {
            m.name: sum(r.count for r in found)
            for m, found in totals.readings()
            if m.name.startswith("kv_block_")
        }

    assert counts(0.0) == {}
    found = counts(1.0)
    assert found["kv_block_lifetime_seconds"] == found["kv_block_idle_before_evict_seconds"] > 12
    assert "kv_block_reuse_gap_seconds" in found
