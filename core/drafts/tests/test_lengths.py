"""How many drafts a row verifies follows how many were right, and the number of rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pegboard.interfaces.draft import DraftSetup, DraftStep
from pegboard_drafts.lengths import DraftLengths
from pegboard_testing.fake_draft import draft_step
from pegboard_testing.fake_limits import fake_limits

MAX_DRAFTS = 6


def lengths(*, is_adaptive: bool = True) -> DraftLengths:
    limits = fake_limits(max_num_seqs=32, max_drafts=MAX_DRAFTS)
    return DraftLengths(DraftSetup(limits, is_adaptive))


def first(num_rows: int) -> DraftStep:
    """A step of rows with one token each, all of which may have all drafts."""
    return draft_step(range(num_rows), [[0]] * num_rows, [MAX_DRAFTS] * num_rows)


def play(made: DraftLengths, rates: list[float], steps: int, seed: int = 1) -> list[int]:
    """Run steps in which each draft token of row i is right with probability rates[i]. Returns how
    many each row verified."""
    chance = random.Random(seed)
    usual = [[7 if rate > 0.5 else 8] for rate in rates]
    step = draft_step(range(len(rates)), usual, [MAX_DRAFTS] * len(rates))
    verified = [0] * len(rates)
    for _ in range(steps):
        proposals = [np.full(count, 7, np.int32) for count in made.wanted(step)]
        kept = made.cut(step, proposals)
        step = first(len(rates))
        for row, proposal in enumerate(kept):
            right = [chance.random() < rates[row] for _ in range(len(proposal) + 1)]
            accepted = next(
                (place for place, is_right in enumerate(right[: len(proposal)]) if not is_right),
                len(proposal),
            )
            step.history[row] = np.array([7 if right[0] else 8])
            step.num_verified[row] = len(proposal)
            step.num_new[row] = accepted + 1
            verified[row] += len(proposal)
    return verified


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_rows_whose_drafts_are_wrong_soon_verify_none(num_rows: int) -> None:
    made = lengths()
    assert (
        max(play(made, [0.0] * num_rows, 20)) <= 2
        and play(made, [0.0] * num_rows, 300) == [0] * num_rows
    )
    assert sum(play(made, [0.1] * num_rows, 300)) <= 0.2 * 300 * num_rows


@pytest.mark.parametrize("num_rows", [1, 8, 32])
def test_rows_whose_drafts_are_right_soon_verify_all_they_may(num_rows: int) -> None:
    made = lengths()
    play(made, [1.0] * num_rows, 40)
    assert play(made, [1.0] * num_rows, 5) == [5 * MAX_DRAFTS] * num_rows
    play(made, [0.0] * num_rows, 20)
    assert play(made, [0.0] * num_rows, 5) == [0] * num_rows, (
        "and stop when the text no longer repeats"
    )
    play(made, [1.0] * num_rows, 40)
    assert play(made, [1.0] * num_rows, 5) == [5 * MAX_DRAFTS] * num_rows


def test_a_batch_needs_better_drafts_than_one_row() -> None:
    alone = play(lengths(), [0.6], 300)
    batch = play(lengths(), [0.6] * 16, 300)
    assert alone[0] > 300 and max(batch) < 0.4 * alone[0]


def test_one_row_alone_does_not_slow_down_a_batch() -> None:
    assert play(lengths(), [1.0] + [0.0] * 15, 100) == [0] * 16


def test_a_new_request_begins_with_what_is_usual() -> None:
    made = lengths()
    assert made.wanted(first(1)) == [1]
    play(made, [0.0], 100)
    made.add(0)
    assert [len(proposal) for proposal in made.cut(first(1), [np.array([3])])] == [0]
    play(made, [1.0], 300)
    made.add(0)
    assert made.wanted(first(1))[0] > 3


def test_rows_whose_proposals_are_wrong_take_turns() -> None:
    """Proposals that are only compared with the next token take time."""
    made = lengths()
    play(made, [0.0] * 32, 100)
    steps = [made.wanted(first(32)) for _ in range(8)]
    assert [sum(counts) for counts in steps] == [4] * 8
    assert np.sum(steps, axis=0).tolist() == [1] * 32


def test_a_row_whose_proposal_was_right_gets_one_in_each_step() -> None:
    made = lengths()
    play(made, [0.0] * 8, 100)
    ids = np.array([3])
    while not (counts := made.wanted(first(8)))[5]:
        made.cut(first(8), [ids[:count] for count in counts])
    made.cut(first(8), [ids[:count] for count in counts])
    step = draft_step(range(8), [[4]] * 5 + [[3]] + [[4]] * 2, [MAX_DRAFTS] * 8)
    for _ in range(3):
        counts = made.wanted(step)
        assert counts[5] == 1 and sum(counts) <= 2
        made.cut(step, [ids[:count] for count in counts])


def test_a_fixed_length() -> None:
    assert play(lengths(is_adaptive=False), [0.0, 0.0], 10) == [10 * MAX_DRAFTS] * 2


def test_the_limit_of_a_row_holds() -> None:
    made = lengths()
    play(made, [1.0], 40)
    assert made.wanted(draft_step([0], [[7]], [0])) == [0]
    assert made.wanted(draft_step([0], [[7]], [2])) == [2]
