"""The connector passes the contract of its kind, and saves work when the KV cache is small."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kv_connector_offload.lru import Lru
from pegboard_kv_connector_offload.options import OffloadOptions
from pegboard_kv_connector_offload.scheduler import OffloadScheduler, Slots
from pegboard_kv_connector_offload.worker import OffloadWorker

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_kv_connector import Halves, greedy
from pegboard_testing.contract_kv_states import MovesStates
from pegboard_testing.fake_engine import FakeEngine


@pytest.mark.parametrize("name", ["offload", "OffloadingConnector"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("kv_connector", name))


class TestOffload(MovesStates):
    outlives = False
    num_blocks = 1000
    eviction_policy: Literal["lru", "arc"] = "lru"

    def halves(self, setup: KVConnectorSetup) -> Halves:
        options = OffloadOptions(
            num_cpu_blocks=self.num_blocks, eviction_policy=self.eviction_policy
        )
        return OffloadScheduler(options, setup), OffloadWorker(options, setup)

    def test_a_small_cache_computes_little_again(self) -> None:
        """The KV cache holds a quarter of the prompts."""
        prompts = [list(range(start, start + 33)) for start in range(8)]
        computed = {}
        for name, engine in {
            "plain": FakeEngine(num_blocks=18),
            "offload": self.engine(num_blocks=18),
        }.items():
            for _ in range(4):
                for prompt in prompts:
                    engine.generate(prompt, greedy(1))
            computed[name] = engine.worker.num_tokens
            engine.check_idle()
        first = sum(map(len, prompts))
        assert computed["plain"] == 4 * first, "nothing stays"
        assert (computed["plain"] - first) >= 3 * (computed["offload"] - first)


class TestSmallOffload(TestOffload):
    """So small that blocks are dropped all the time: still the same tokens."""

    num_blocks = 7
    test_a_prefix_is_loaded = None  # type: ignore[assignment]
    test_a_shorter_prefix_is_loaded_too = None  # type: ignore[assignment]
    test_every_rank_moves_its_own_part = None  # type: ignore[assignment]
    test_states_are_loaded = None  # type: ignore[assignment]
    test_a_prefix_ends_where_the_states_are_known = None  # type: ignore[assignment]
    test_a_longer_prefix_than_the_local_one_is_loaded = None  # type: ignore[assignment]
    test_every_rank_moves_its_own_states = None  # type: ignore[assignment]
    test_a_small_cache_computes_little_again = None  # type: ignore[assignment]


class TestSmallArcOffload(TestSmallOffload):
    """The same with the other policy."""

    eviction_policy = "arc"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["reserve", "use", "sent"]), st.integers(0, 5)), max_size=40
    ),
)
def test_a_slot_holds_one_block(num_slots: int, calls: list[tuple[str, int]]) -> None:
    """The one whose last use is longest ago makes room. Reserving a block that is there is a
    use."""
    slots = Slots(num_slots, Lru())
    named = dict[int, int]()
    order = list[int]()
    for call, number in calls:
        name = bytes([number])
        is_full = len(order) == num_slots
        oldest = next((old for old in order if old not in named.values()), None)
        is_known = number in order
        if is_known and call != "sent":
            order.remove(number)
            order.append(number)
        if call == "sent":
            slots.sent()
            named = {}
        elif call == "use" and (slot := slots.find(0, name)) is not None:
            assert slots.use(0, name) == slot
            named[slot] = number
        elif call == "reserve" and (slot := slots.reserve(0, name)) is not None:
            assert slot not in named and slots.find(0, name) == slot
            named[slot] = number
            if is_full:
                assert oldest is not None
                order.remove(oldest)
            order.append(number)
        elif call == "reserve":
            assert is_known or (is_full and oldest is None), "there is room"
        assert sorted(order) == [n for n in range(10) if slots.find(0, bytes([n])) is not None]
        held = {n: slots.find(0, bytes([n])) for n in range(10)}
        taken = [slot for slot in held.values() if slot is not None]
        assert len(set(taken)) == len(taken) <= num_slots
        assert all(held[number] == slot for slot, number in named.items())


def test_one_size_is_given() -> None:
    plan = FakeEngine().plan
    assert OffloadOptions(cpu_bytes_to_use=10 * plan.block_bytes + 1).num_slots(plan) == 10
    assert OffloadOptions(size_gb=plan.block_bytes / 2**30).num_slots(plan) == 1
    with pytest.raises(
        ValueError,
        match="expected one of size_gb, cpu_bytes_to_use, num_cpu_blocks, got size_gb and num_cpu",
    ):
        OffloadOptions(size_gb=1, num_cpu_blocks=4)
    with pytest.raises(ConfigError, match=r"smaller than a KV block of \d+ bytes"):
        OffloadScheduler(OffloadOptions(cpu_bytes_to_use=1), KVConnectorSetup(plan))
