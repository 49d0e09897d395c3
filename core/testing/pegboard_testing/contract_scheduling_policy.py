"""Contract tests of the kind `scheduling_policy`. A plugin's test file:

    class TestMyPolicy(SchedulingPolicyContract):
        spec = MY_POLICY

        def policy(self, setup: SchedulingPolicySetup) -> SchedulingPolicy:
            return MyPolicy(None, setup)

Each policy chooses its own order. But every policy must hold exactly the waiting requests, be
deterministic, let every request finish, and stay within the engine's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from pegboard.config.limits import NO_LIMIT
from pegboard.data.batch import StepTimes
from pegboard.data.request import LoRARequest
from pegboard.interfaces.scheduling_policy import (
    RequestStatus,
    RequestView,
    SchedulingPolicy,
    SchedulingPolicySetup,
    SchedulingPolicySpec,
    StepLoad,
)
from pegboard_testing.fake_limits import fake_limits

SETUP = SchedulingPolicySetup(fake_limits(max_num_batched_tokens=512, max_num_partial_prefills=2))
MAX_STEPS = 5000


@dataclass(eq=True)
class View:
    """What a policy sees of a request. Such objects are equal and unhashable on purpose: two
    completions of one request look the same, so a policy must compare by identity."""

    request_id: str = "a"
    index: int = 0
    status: RequestStatus = RequestStatus.WAITING
    priority: int = 0
    arrival_s: float = 0.0
    num_prompt_tokens: int = 1
    num_tokens: int = 1
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_preemptions: int = 0
    lora: LoRARequest | None = None
    key: str = "a"
    all_token_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None


def random_view(rng: np.random.Generator) -> View:
    status = RequestStatus.PREEMPTED if rng.random() < 0.2 else RequestStatus.WAITING
    return View(
        str(rng.choice(list("abc"))),
        int(rng.integers(2)),
        status,
        int(rng.integers(-1, 2)),
        float(rng.integers(3)),
    )


class Engine:
    """A toy engine with `blocks` blocks and four rows. A request needs one block for each step that
    it has run, and it ends after `work` steps."""

    def __init__(
        self, policy: SchedulingPolicy, arrivals: Sequence[tuple[int, View, int]], blocks: int
    ) -> None:
        self.policy = policy
        self.arrivals = list(arrivals)
        self.blocks = blocks
        self.work = {id(view): work for _, view, work in arrivals}
        self.running: list[RequestView] = []
        self.log: list[tuple[str, int]] = []

    def name(self, view: RequestView) -> int:
        return next(index for index, (_, other, _) in enumerate(self.arrivals) if other is view)

    def run(self) -> list[tuple[str, int]]:
        """Run until every request has finished, and return the log of what happened."""
        num_finished = 0
        for step in range(MAX_STEPS):
            for when, view, _ in self.arrivals:
                if when == step:
                    self.policy.add(view)
            load = StepLoad(len(self.running), sum(1 for _ in self.policy.waiting()))
            self.policy.budget(load)
            self.grow()
            self.admit()
            for done in [
                view for view in self.running if view.num_computed_tokens >= self.work[id(view)]
            ]:
                self.log.append(("finished", self.name(done)))
                self.drop(done)
                num_finished += 1
            self.policy.observe(load, StepTimes(forward_s=0.001))
            if num_finished == len(self.arrivals):
                return self.log
        raise AssertionError(
            f"{len(self.arrivals) - num_finished} requests never finish: {self.log[-8:]}"
        )

    def used(self) -> int:
        return sum(view.num_computed_tokens + 1 for view in self.running)

    def drop(self, view: RequestView) -> None:
        self.running = [other for other in self.running if other is not view]

    def grow(self) -> None:
        """Give every running request one more block. When none is left, a victim loses its
        blocks."""
        for view in list(self.running):
            while any(view is other for other in self.running) and self.used() + 1 > self.blocks:
                victim = self.policy.victim(list(self.running), view)
                if victim is None:
                    break
                assert any(victim is other for other in self.running), "a victim must be running"
                self.log.append(("preempted", self.name(victim)))
                self.drop(victim)
                victim.status = RequestStatus.PREEMPTED
                victim.num_computed_tokens = 0
                victim.num_preemptions += 1
                self.policy.add(victim)
            else:
                if any(view is other for other in self.running):
                    view.num_computed_tokens += 1

    def admit(self) -> None:
        admitted: list[RequestView] = []
        for view in self.policy.waiting():
            if (
                len(self.running) + len(admitted) == SETUP.limits.max_num_seqs
                or self.used() + len(admitted) + 1 > self.blocks
            ):
                break
            admitted.append(view)
        for view in admitted:
            self.policy.remove(view)
            view.status = RequestStatus.RUNNING
            self.running.append(view)
            self.log.append(("admitted", self.name(view)))


class SchedulingPolicyContract:
    """Every scheduling policy passes these. Override `spec` and `policy`."""

    spec: SchedulingPolicySpec

    def policy(self, setup: SchedulingPolicySetup) -> SchedulingPolicy:
        """Return a new policy."""
        raise AssertionError("override SchedulingPolicyContract.policy")

    @pytest.mark.parametrize("seed", range(10))
    def test_exactly_the_waiting_requests_are_held(self, seed: int) -> None:
        """This holds for random adds and removes, by identity. Reading the order changes
        nothing."""
        rng = np.random.default_rng(seed)
        policy = self.policy(SETUP)
        held = list[View]()
        for _ in range(150):
            if held and rng.random() < 0.45:
                policy.remove(held.pop(int(rng.integers(len(held)))))
            else:
                held.append(random_view(rng))
                policy.add(held[-1])
            seen = [id(view) for view in policy.waiting()]
            assert sorted(seen) == sorted(map(id, held))
            assert seen == [id(view) for view in policy.waiting()]

    def test_the_first_can_be_had_without_the_rest(self) -> None:
        """The scheduler takes a few requests and stops. An abandoned iteration must not affect the
        next one."""
        policy = self.policy(SETUP)
        rng = np.random.default_rng(0)
        views = [random_view(rng) for _ in range(20)]
        for view in views:
            policy.add(view)
        first = next(iter(policy.waiting()))
        assert next(iter(policy.waiting())) is first
        policy.remove(first)
        assert all(view is not first for view in policy.waiting())

    def test_a_preempted_request_goes_before_its_equals(self) -> None:
        policy = self.policy(SETUP)
        fresh = [View("a"), View("b")]
        for view in fresh:
            policy.add(view)
        preempted = View("c", status=RequestStatus.PREEMPTED, num_preemptions=1)
        policy.add(preempted)
        assert next(iter(policy.waiting())) is preempted

    def test_priorities_are_honoured_where_claimed(self) -> None:
        """With the flag "priority", lower values come first, and the victim never has a better
        value than another running request."""
        if "priority" not in self.spec.flags:
            return
        policy = self.policy(SETUP)
        rng = np.random.default_rng(1)
        views = [
            View(str(i), priority=int(rng.integers(-5, 5)), arrival_s=float(i)) for i in range(30)
        ]
        for view in views:
            policy.add(view)
        assert [v.priority for v in policy.waiting()] == sorted(v.priority for v in views)
        victim = policy.victim(views, views[3])
        assert victim is not None and victim.priority == max(view.priority for view in views)

    def test_nobody_running_gives_no_victim(self) -> None:
        assert self.policy(SETUP).victim([], View()) is None

    def test_the_victim_among_equals_is_the_last_admitted(self) -> None:
        """The first request must be able to finish. Otherwise two requests could take each other's
        blocks forever."""
        running = [View("a"), View("a"), View("a")]
        assert self.policy(SETUP).victim(running, running[0]) is running[-1]

    def workload(self, seed: int) -> tuple[list[tuple[int, View, int]], int]:
        """Make [(step of arrival, request, steps that it needs), …], and a number of blocks that is
        enough for the longest request but not for all."""
        rng = np.random.default_rng(seed)
        arrivals = []
        for index in range(int(rng.integers(2, 25))):
            when = int(rng.integers(0, 30))
            work = int(rng.integers(1, 12))
            arrivals.append(
                (
                    when,
                    View(str(index), 0, priority=int(rng.integers(3)), arrival_s=float(when)),
                    work,
                )
            )
        return arrivals, max(work for _, _, work in arrivals) + int(rng.integers(2, 6))

    @pytest.mark.parametrize("seed", range(20))
    def test_everybody_finishes_when_blocks_are_short(self, seed: int) -> None:
        """There is no starvation and no endless preemption, and every run gives the same log."""
        stories = [Engine(self.policy(SETUP), *self.workload(seed)).run() for _ in range(2)]
        assert stories[0] == stories[1]

    @pytest.mark.parametrize("threshold", [1, 64, 4096, NO_LIMIT])
    def test_the_budget_stays_within_the_limits(self, threshold: int) -> None:
        """For any load and any past times, the policy allows a step some tokens, and never more
        than the engine allows."""
        limits = fake_limits(
            max_num_batched_tokens=512,
            long_prefill_token_threshold=threshold,
            max_num_partial_prefills=3,
            max_long_partial_prefills=2,
        )
        policy = self.policy(SchedulingPolicySetup(limits))
        rng = np.random.default_rng(threshold)
        for _ in range(50):
            load = StepLoad(int(rng.integers(9)), int(rng.integers(99)))
            budget = policy.budget(load)
            assert 1 <= budget.max_tokens <= 512
            assert 1 <= budget.max_chunk <= min(threshold, 512)
            assert 1 <= budget.max_prefills <= 3
            assert 0 <= budget.max_long_prefills <= 2
            policy.observe(load, StepTimes(*(float(x) for x in rng.exponential(0.01, 4))))
