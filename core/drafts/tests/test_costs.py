"""The costs of steps are learned from their times, whatever else the machine does."""

from __future__ import annotations

import random

import pytest

from pegboard_drafts.costs import StepCosts, features

TRUE = {
    "drafts are cheap": (4.0, 1.0, 0.2, 0.1),
    "drafts are expensive": (0.5, 1.0, 1.4, 0.3),
    "steps with drafts are expensive": (1.0, 1.0, 0.6, 2.0),
}


def run(costs: StepCosts, true: tuple[float, ...], steps: int, seconds: float, seed: int) -> None:
    """Measure steps with errors of 10 %, and one of thirty that takes three times as long."""
    chance = random.Random(seed)
    for _ in range(steps):
        rows = chance.choice([1, 2, 4, 8, 16])
        drafts = chance.choice([0, 0, rows, 4 * rows])
        cost = sum(a * b for a, b in zip(features(rows, drafts).tolist(), true, strict=True))
        error = chance.gauss(1, 0.1) * (3 if chance.random() < 1 / 30 else 1)
        costs.observe(rows, drafts, seconds * cost * error)


@pytest.mark.parametrize("name", TRUE)
def test_how_the_parts_compare(name: str) -> None:
    """Also after the machine has become slower, or faster."""
    true = TRUE[name]
    costs = StepCosts(1.0)
    for number, seconds in enumerate((0.01, 0.03, 0.002)):
        run(costs, true, 300, seconds, number)
        for rows in (1, 8):
            plain = true[0] + true[1] * rows
            share = costs.draft * rows / costs.plain(rows)
            assert share == pytest.approx(true[2] * rows / plain, rel=0.35), seconds
        assert costs.mixed(8) / costs.plain(8) == pytest.approx(
            8 * true[3] / (true[0] + 8), rel=0.5, abs=0.1
        )
        took = costs.of(seconds * (true[0] + true[1]))
        assert took == pytest.approx(costs.plain(1), rel=0.35)


def test_plain_steps_do_not_change_what_drafts_are_compared_with_them() -> None:
    """The machine becomes ten times as fast while nothing is drafted, after a first step that was
    unusual."""
    costs = StepCosts(1.0)
    before = costs.draft / costs.plain(1)
    costs.observe(1, 0, 0.9)
    for seconds in (0.03, 0.003):
        for _ in range(400):
            costs.observe(1, 0, seconds)
        assert costs.draft / costs.plain(1) == pytest.approx(before, rel=0.6)
        assert costs.of(seconds) == pytest.approx(costs.plain(1), rel=0.05)
