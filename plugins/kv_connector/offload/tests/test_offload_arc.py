"""ARC stores what the algorithm of the paper stores, whatever may not go, and a scan does not push
out what is used repeatedly."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kv_connector_offload.arc import Arc
from pegboard_kv_connector_offload.lru import Eviction, Lru
from pegboard_kv_connector_offload.options import OffloadOptions
from pegboard_kv_connector_offload.scheduler import OffloadScheduler, Slots
from pegboard_kv_connector_offload.worker import OffloadWorker

from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard_testing.contract_kv_connector import Halves, KVConnectorContract, greedy


class Paper:
    """The four cases of figure 4 of the paper, on plain lists whose last item was used last."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def request(self, x: int) -> None:
        if x in self.t1 or x in self.t2:  # case I
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:  # case II
            ratio = 1 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + ratio, self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:  # case III
            ratio = 1 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - ratio, 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:  # case IV
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.pop(0)
                    self.replace(x)
                else:
                    self.t1.pop(0)
            elif total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x)
            self.t1.append(x)

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def numbers(names: object) -> list[int]:
    return [block_hash[0] for _, block_hash in names]  # type: ignore[attr-defined]


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 15), max_size=120))
def test_it_is_the_algorithm_of_the_paper(num_slots: int, requests: list[int]) -> None:
    arc = Arc(num_slots)
    slots = Slots(num_slots, arc)
    paper = Paper(num_slots)
    for number in requests:
        slots.reserve(0, bytes([number]))
        slots.sent()
        paper.request(number)
        lists = (arc._once, arc._often, arc._lost_once, arc._lost_often)
        assert [*map(numbers, lists)] == [paper.t1, paper.t2, paper.b1, paper.b2]
        assert arc._target == pytest.approx(paper.p)
        stored = {n for n in range(16) if slots.find(0, bytes([n])) is not None}
        assert stored == {*paper.t1, *paper.t2}


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.sampled_from(["reserve", "use", "sent"]), st.integers(0, 9)), max_size=80
    ),
)
def test_what_a_plan_names_stays(num_slots: int, calls: list[tuple[str, int]]) -> None:
    """Then another block goes, or none and nothing changes. The lists stay within their sizes."""
    arc = Arc(num_slots)
    slots = Slots(num_slots, arc)
    named = dict[int, int]()
    for call, number in calls:
        name = bytes([number])
        lists = (arc._once, arc._often, arc._lost_once, arc._lost_often)
        before = [*map(list, lists), arc._target]
        if call == "sent":
            slots.sent()
            named = {}
        elif call == "use" and (slot := slots.find(0, name)) is not None:
            assert slots.use(0, name) == slot
            named[slot] = number
        elif call == "reserve":
            is_stored = slots.find(0, name) is not None
            slot = slots.reserve(0, name)
            if slot is not None:
                assert slot not in named
                named[slot] = number
            elif not is_stored:
                assert len(named) == num_slots and [*map(list, lists), arc._target] == before
        assert all(slots.find(0, bytes([number])) == slot for slot, number in named.items())
        once, often, lost_once, lost_often = map(len, lists)
        assert once + often <= num_slots and once + lost_once <= num_slots
        assert once + often + lost_once + lost_often <= 2 * num_slots
        assert 0 <= arc._target <= num_slots


@pytest.mark.parametrize(("eviction", "stays"), [(Arc(8), True), (Lru(), False)])
def test_a_scan_does_not_push_out_what_is_used_repeatedly(eviction: Eviction, stays: bool) -> None:
    slots = Slots(8, eviction)
    hot = [bytes([number]) for number in range(4)]
    for _ in range(2):
        for name in hot:
            slots.reserve(0, name)
            slots.sent()
    for number in range(100, 200):
        slots.reserve(0, bytes([number]))
        slots.sent()
    assert [slots.find(0, name) is not None for name in hot] == [stays] * 4


class Connected(KVConnectorContract):
    def __init__(self, eviction_policy: Literal["lru", "arc"]) -> None:
        self.options = OffloadOptions(num_cpu_blocks=30, eviction_policy=eviction_policy)

    def halves(self, setup: KVConnectorSetup) -> Halves:
        return OffloadScheduler(self.options, setup), OffloadWorker(self.options, setup)


def test_an_engine_computes_less_of_a_prompt_that_comes_back() -> None:
    """Two prompts come again and again, between many that come once. The KV cache is small."""
    computed = {}
    policies: list[Literal["lru", "arc"]] = ["lru", "arc"]
    for policy in policies:
        engine = Connected(policy).engine(num_blocks=18)
        for turn in range(12):
            for prompt in (range(33), range(30, 63)):
                for _ in range(2 if turn == 0 else 1):
                    engine.generate(prompt, greedy(1))
            for number in range(4):
                start = 4 * turn + number
                engine.generate([start % 64, *range(start % 31, start % 31 + 32)], greedy(1))
        computed[policy] = engine.worker.num_tokens
        engine.check_idle()
    assert computed["arc"] < 0.8 * computed["lru"], computed
