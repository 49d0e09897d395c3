"""Order, removal, victims and budgets of `fcfs` and `priority`, compared with plain sorted
lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_scheduling_policy_queue.fcfs import FCFSPolicy
from pegboard_scheduling_policy_queue.plugin import FCFS, PRIORITY
from pegboard_scheduling_policy_queue.priority import PriorityPolicy

from pegboard.config.limits import NO_LIMIT
from pegboard.interfaces.scheduling_policy import RequestStatus, SchedulingPolicySetup, StepLoad
from pegboard_testing.contract_scheduling_policy import View
from pegboard_testing.fake_limits import fake_limits

SETUP = SchedulingPolicySetup(fake_limits(max_num_batched_tokens=512, max_num_seqs=8))
LOAD = StepLoad(num_decodes=1, num_waiting=1)


def _is_same(found, expected) -> bool:
    found = list(found)
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


VIEWS = st.builds(
    View,
    request_id=st.sampled_from("abc"),
    index=st.integers(0, 2),
    priority=st.integers(-2, 2),
    arrival_s=st.sampled_from([0.0, 1.0, 2.5]),
    status=st.sampled_from([RequestStatus.WAITING, RequestStatus.WAITING, RequestStatus.PREEMPTED]),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add", "remove"]), VIEWS, st.integers(0, 1000)), max_size=200
)


def _priority_order(view: View) -> tuple:
    return (
        view.priority,
        view.arrival_s,
        view.status is not RequestStatus.PREEMPTED,
        view.request_id,
        view.index,
    )


@pytest.mark.parametrize("policy_class", [FCFSPolicy, PriorityPolicy])
@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_waiting_follows_the_model(policy_class, steps):
    policy = policy_class(None, SETUP)
    model = []
    for action, view, position in steps:
        if action == "add":
            policy.add(view)
            if policy_class is FCFSPolicy:
                model.insert(0 if view.status is RequestStatus.PREEMPTED else len(model), view)
            else:
                model.append(view)
                model.sort(key=_priority_order)  # stable: equals stay in order of arrival
        elif model:
            policy.remove(model.pop(position % len(model)))
        assert _is_same(policy.waiting(), model)
    assert _is_same(policy.waiting(), model), "reading must not change the order"


@pytest.mark.parametrize("policy_class", [FCFSPolicy, PriorityPolicy])
def test_siblings_of_one_request_are_told_apart(policy_class):
    first = View(index=0)
    second = View(index=0)
    policy = policy_class(None, SETUP)
    policy.add(first)
    policy.add(second)
    policy.remove(first)
    assert _is_same(policy.waiting(), [second])
    policy.remove(first)
    assert _is_same(policy.waiting(), [second])


def test_fcfs_puts_several_victims_back_in_their_old_order():
    policy = FCFSPolicy(None, SETUP)
    running = [View("a"), View("b"), View("c")]
    policy.add(View("d"))
    while len(running) > 1:
        victim = policy.victim(running, running[0])
        assert victim is running.pop()
        victim.status = RequestStatus.PREEMPTED
        policy.add(victim)
    assert [view.request_id for view in policy.waiting()] == ["b", "c", "d"]


def test_priority_victim_is_the_worst_and_may_be_the_needy_one():
    policy = PriorityPolicy(None, SETUP)
    low = View("low", priority=5)
    late = View("late", priority=5, arrival_s=3.0)
    need = View("need", priority=9)
    assert policy.victim([low, late], low) is late
    assert policy.victim([low, need, late], need) is need


@pytest.mark.parametrize("policy_class", [FCFSPolicy, PriorityPolicy])
def test_no_running_request_gives_no_victim(policy_class):
    assert policy_class(None, SETUP).victim([], View()) is None


def test_priority_queue_does_not_keep_removed_entries():
    policy = PriorityPolicy(None, SETUP)
    # this entry stays on top, so removed entries below it are never popped
    policy.add(View("keeper", priority=-1))
    for number in range(1000):
        view = View(str(number))
        policy.add(view)
        policy.remove(view)
    assert len(policy._heap) <= 70
    assert [view.request_id for view in policy.waiting()] == ["keeper"]


def test_waiting_is_lazy_in_the_priority_queue():
    policy = PriorityPolicy(None, SETUP)
    views = [View(str(number), priority=number) for number in range(50)]
    for view in reversed(views):
        policy.add(view)
    walk = policy.waiting()
    assert next(walk) is views[0]
    assert next(walk) is views[1]


@pytest.mark.parametrize("policy_class", [FCFSPolicy, PriorityPolicy])
@pytest.mark.parametrize(("threshold", "max_chunk"), [(NO_LIMIT, 512), (64, 64), (4096, 512)])
def test_budget_is_the_engine_limits(policy_class, threshold, max_chunk):
    limits = fake_limits(
        max_num_batched_tokens=512,
        long_prefill_token_threshold=threshold,
        max_num_partial_prefills=3,
        max_long_partial_prefills=2,
    )
    budget = policy_class(None, SchedulingPolicySetup(limits)).budget(LOAD)
    assert (budget.max_tokens, budget.max_chunk) == (512, max_chunk)
    assert (budget.max_prefills, budget.max_long_prefills) == (3, 2)


def test_only_the_priority_policy_claims_priorities():
    assert "priority" in PRIORITY.flags
    assert "priority" not in FCFS.flags
