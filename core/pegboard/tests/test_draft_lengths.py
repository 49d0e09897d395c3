"""How many drafts a row verifies follows how many were right, and the number of rows."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pegboard.worker.draft_lengths import DraftLengths
from pegboard_testing.fake_limits import fake_limits

MAX_DRAFTS = 6


def lengths(**values: object) -> DraftLengths:
    return DraftLengths(
        fake_limits(max_num_seqs=32, max_drafts=MAX_DRAFTS, **values), fixed_tokens=1
    )


def play(made: DraftLengths, rates: list[float], steps: int, seed: int = 1) -> list[int]:
    """Run steps in which each draft token of row i is right with probability rates[i]. Returns how
    many each row verified."""
    chance = random.Random(seed)
    rows = list(range(len(rates)))
    verified = [0] * len(rates)
    for _ in range(steps):
        proposals = [np.full(count, 7, np.int32) for count in made.ask(rows)]
        kept = made.cut(rows, proposals)
        tokens = []
        counts = []
        for row, proposal in enumerate(kept):
            right = [chance.random() < rates[row] for _ in range(len(proposal) + 1)]
            accepted = next(
                (place for place, is_right in enumerate(right[: len(proposal)]) if not is_right),
                len(proposal),
            )
            tokens.append([7 if right[0] else 8])
            counts.append(accepted + 1)
            verified[row] += len(proposal)
        offsets = np.cumsum([0, *(len(proposal) + 1 for proposal in kept)])
        made.observe(rows, offsets, np.array(tokens), np.array(counts))
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
    assert made.ask([0]) == [1]
    play(made, [0.0], 100)
    made.add(0)
    assert [len(proposal) for proposal in made.cut([0], [np.array([3])])] == [0]
    play(made, [1.0], 300)
    made.add(0)
    assert made.ask([0])[0] > 3


def test_a_fixed_length_and_a_limit_of_rows() -> None:
    fixed = lengths(adaptive_drafts=False, max_draft_rows=2)
    assert play(fixed, [0.0, 0.0], 10) == [10 * MAX_DRAFTS] * 2
    assert play(fixed, [1.0, 1.0, 1.0], 10) == [0, 0, 0]
    adaptive = lengths(max_draft_rows=2)
    play(adaptive, [1.0, 1.0], 20)
    assert (
        play(adaptive, [1.0, 1.0, 1.0], 10) == [0, 0, 0]
        and min(play(adaptive, [1.0, 1.0], 1)) == MAX_DRAFTS
    )
