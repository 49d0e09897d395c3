"""The index against a search through the whole request, and the proposer over rows that come and
go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_draft_ngram.index import NGramIndex
from pegboard_draft_ngram.options import NGramOptions
from pegboard_draft_ngram.proposer import NGramProposer
from pydantic import ValidationError

from pegboard.interfaces.draft import DraftProposer, DraftSetup
from pegboard_testing.contract_draft import DraftContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_draft import draft_step
from pegboard_testing.fake_limits import fake_limits


def search(token_ids: list[int], shortest: int, longest: int) -> int | None:
    """Return what the index should find, from the definition."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == token_ids[-n:]:
                return start + n
    return None


def test_contract() -> None:
    check_entry(installed_entry("draft", "ngram"))


class TestNGram(DraftContract):
    def proposer(self, setup: DraftSetup) -> DraftProposer:
        return NGramProposer(NGramOptions(prompt_lookup_min=1, prompt_lookup_max=2), setup)


@given(st.data())
def test_the_index_finds_the_first_occurrence_of_the_longest_ngram(data: st.DataObject) -> None:
    ids = st.integers(0, 2) | st.sampled_from([0, 70_000, 200_000])
    token_ids = np.array(data.draw(st.lists(ids, min_size=1, max_size=40)), np.int32)
    shortest = data.draw(st.integers(1, 4))
    longest = shortest + data.draw(st.integers(0, 3))
    known = data.draw(st.integers(1, len(token_ids)))
    index = NGramIndex(token_ids[:known], shortest, longest)
    while known < len(token_ids):  # as after steps that accept some drafts
        added = data.draw(st.integers(1, 4))
        index.append(token_ids[: known + added], known)
        known = min(known + added, len(token_ids))
    assert index.num_tokens == len(token_ids)
    assert index.find(token_ids) == search(token_ids.tolist(), shortest, longest)


def test_rows_have_their_own_proposals_and_limits() -> None:
    proposer = NGramProposer(
        NGramOptions(prompt_lookup_max=2), DraftSetup(fake_limits(), is_adaptive=False)
    )
    histories = [np.array(ids, np.int32) for ids in ([1, 2, 3, 4, 1, 2], [1, 2, 3], [7, 7, 7, 7])]
    for row, history in enumerate(histories):
        proposer.add(row, history)
    step = draft_step([2, 0, 1], [histories[2], histories[0], histories[1]], [3, 2, 5])
    proposals = proposer.propose(step).token_ids
    assert [ids.tolist() for ids in proposals] == [[7, 7], [3, 4], []]
    proposals[1][:] = 9
    assert histories[0].tolist() == [1, 2, 3, 4, 1, 2], "a proposal is a copy"

    proposer.remove(np.array([0, 5]))
    proposer.add(0, histories[1])
    assert not len(proposer.propose(draft_step([0], [histories[1]], [4])).token_ids[0])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
    ],
)
def test_lengths_default_to_each_other(given: dict[str, int], expected: tuple[int, int]) -> None:
    options = NGramOptions(**given)
    assert (options.shortest, options.longest) == expected


def test_lengths_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(
        ValidationError, match="prompt_lookup_min 3 is larger than prompt_lookup_max 2"
    ):
        NGramOptions(prompt_lookup_min=3, prompt_lookup_max=2)
