"""The order of the queue, and the contracts that every scheduling policy must pass."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from pegboard_scheduling_policy_shortest.options import ShortestOptions
from pegboard_scheduling_policy_shortest.policy import ShortestPolicy

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.scheduling_policy import RequestStatus, SchedulingPolicySetup
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_engine import FakeEngine
from pegboard_testing.fake_limits import fake_limits

SETUP = SchedulingPolicySetup(fake_limits(max_num_batched_tokens=32, max_num_seqs=1))
NEVER_S = 1e9


@dataclass(eq=False)
class View:
    """The fields of a request that the policy looks at."""

    num_tokens: int
    arrival_s: float = 0.0
    status: RequestStatus = RequestStatus.WAITING


def policy(max_wait_s: float) -> ShortestPolicy:
    return ShortestPolicy(ShortestOptions(max_wait_s=max_wait_s), SETUP)


def test_contract() -> None:
    check_entry(installed_entry("scheduling_policy", "shortest"))


@given(st.lists(st.integers(1, 9)), st.sets(st.integers(0, 9)))
def test_fewest_tokens_first(lengths: list[int], removed: set[int]) -> None:
    queue = policy(NEVER_S * 10)
    views = [View(length, time.time()) for length in lengths]
    for view in views:
        queue.add(view)
    for index in removed:
        if index < len(views):
            queue.remove(views[index])
    left = [view for index, view in enumerate(views) if index not in removed]
    assert list(queue.waiting()) == sorted(left, key=lambda view: view.num_tokens)


def test_a_request_that_has_waited_too_long_is_not_overtaken() -> None:
    queue = policy(60.0)
    now_s = time.time()
    fresh = View(1, now_s + NEVER_S)
    older = View(9, now_s - 2 * 3600)
    oldest = View(99, now_s - 3 * 3600)
    for view in (fresh, older, oldest):
        queue.add(view)
    assert list(queue.waiting()) == [oldest, older, fresh]


def test_a_preempted_request_goes_before_its_equals() -> None:
    queue = policy(NEVER_S * 10)
    arrival_s = time.time()
    waiting = View(4, arrival_s)
    preempted = View(4, arrival_s, RequestStatus.PREEMPTED)
    queue.add(waiting)
    queue.add(preempted)
    assert list(queue.waiting()) == [preempted, waiting]


def test_it_drives_an_engine() -> None:
    """The engine has one row, so requests run one after another and finish in the policy's
    order."""
    engine = FakeEngine(policy=policy(NEVER_S * 10), max_num_seqs=1)
    for name, length in [("long", 20), ("short", 2), ("middle", 9)]:
        engine.add(name, [3] * length, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    finished = []
    while engine.engine.has_work:
        finished += [delta.request_id for delta in engine.engine.step() if delta.finish_reason]
    assert finished == ["short", "middle", "long"]
