"""The texts against a search from the definition, and the proposer over rows that share answers."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pegboard_draft_suffix.continuation import MOST_OCCURRENCES, continuation
from pegboard_draft_suffix.options import SuffixOptions
from pegboard_draft_suffix.proposer import Answers, SuffixProposer
from pegboard_draft_suffix.text import ANCHOR, END, Text
from pydantic import ValidationError

from pegboard.interfaces.draft import DraftProposer, DraftSetup
from pegboard_testing.contract_draft import DraftContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_draft import draft_step
from pegboard_testing.fake_limits import fake_limits

TOKENS = st.integers(0, 2) | st.sampled_from([0, 70_000, 2**31 - 1])


def search(tokens: list[int], tail: list[int]) -> dict[int, int]:
    """Return the indexes at which `continuation` looks, with the number of tokens before each that
    agree with tail."""
    found = {}
    for index in range(len(tokens) - 1, 0, -1):
        same = 0
        while (
            same < min(index, len(tail)) and tokens[index - same - 1] == tail[len(tail) - same - 1]
        ):
            same += 1
        if same >= ANCHOR and len(found) < MOST_OCCURRENCES:
            found[index] = same
    return found


def score(tokens: list[int], indexes: list[int], drafts: list[int]) -> float:
    """Return how many draft tokens are right on average over the indexes."""
    total = 0
    for index in indexes:
        for token, draft in zip(tokens[index : index + len(drafts)], drafts, strict=False):
            if token != draft:
                break
            total += 1
    return total / len(indexes)


def index(text: Text) -> dict[int, int]:
    return {run: position for shard in text._latest for run, position in shard.items()}


def test_contract() -> None:
    check_entry(installed_entry("draft", "suffix"))


class TestSuffix(DraftContract):
    """A row's proposals depend on its own text alone if no answers are kept."""

    def proposer(self, setup: DraftSetup) -> DraftProposer:
        return SuffixProposer(SuffixOptions(suffix_decoding_max_cached_requests=0), setup)


class TestSharedSuffix(DraftContract):
    def proposer(self, setup: DraftSetup) -> DraftProposer:
        return SuffixProposer(SuffixOptions(suffix_decoding_max_cached_requests=3), setup)

    test_proposals_fit_their_rows = None  # other rows change the proposals here


@given(st.data())
def test_a_continuation_is_the_best_that_the_occurrences_have(data: st.DataObject) -> None:
    answers = data.draw(st.lists(st.lists(TOKENS, max_size=12), max_size=8))
    dropped = data.draw(st.integers(0, len(answers)))
    text = Text()
    for answer in answers:
        for first in range(0, len(answer), 3):  # as after steps that accept some drafts
            text.append(answer[first : first + 3])
        text.append([END])
    text.forget(sum(len(answer) + 1 for answer in answers[:dropped]))
    kept = [token for answer in answers[dropped:] for token in [*answer, END]]
    tail = data.draw(st.lists(TOKENS, max_size=6))
    most = data.draw(st.integers(0, 5))
    factor = data.draw(st.sampled_from([0.5, 1.0, 3.0]))
    least = data.draw(st.floats(0, 1))
    assert text.tokens[text.floor - text.first :].tolist() == kept and text.end == text.floor + len(
        kept
    )

    best = continuation(text, array("i", tail), most, factor, least)
    found = search(kept, tail)
    if not found:
        assert not best.token_ids
        return
    assert (
        len(best.token_ids) <= min(most, int(factor * max(found.values())))
        and END not in best.token_ids
    )
    groups = [
        [index for index, same in found.items() if same >= length] for length in set(found.values())
    ]
    if best.token_ids:
        assert any(
            score(kept, group, best.token_ids) == pytest.approx(best.score) for group in groups
        )
        assert best.score >= least * len(best.token_ids)
    for length, group in zip(set(found.values()), groups, strict=True):
        counts = Counter(kept[index] for index in group)
        same = max(counts.values())
        if most and factor * length >= 1 and counts[END] < same and same > least * len(group):
            assert best.score >= same / len(group), "the first token alone is better"


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=8), st.data())
def test_occurrences_in_newer_answers_stay_when_old_ones_are_forgotten(
    answers: list[list[int]], data: st.DataObject
) -> None:
    """In any parts, the latest first."""
    text = Text()
    tokens = list[int]()
    floor = 0
    for answer in answers:
        text.append([*answer, END])
        tokens += [*answer, END]
        count = data.draw(st.integers(0, 6))
        text.forget(count)
        floor = min(floor + count, len(tokens))
        for tail in {(a, b) for a in range(3) for b in range(3)}:
            places = [
                i
                for i in range(len(tokens) - 1, ANCHOR - 1, -1)
                if tuple(tokens[i - ANCHOR : i]) == tail and i >= floor
            ]
            matches = text.matches(array("i", tail), 1000)
            assert [text.first + index for _, index in matches] == places
            assert text.matches(array("i", tail), 2) == matches[:2]


def test_a_row_proposes_what_finished_requests_answered() -> None:
    """The answer counts, and the end of its prompt, so that the same question finds it. The rest of
    the prompt does not."""
    options = SuffixOptions(suffix_decoding_max_tree_depth=4)
    proposer = SuffixProposer(options, DraftSetup(fake_limits(), is_adaptive=False))
    question = np.array([91, 92, 93, 5, 6, 7, 8], np.int32)
    proposer.add(0, question)
    step = draft_step([0], [np.append(question, [1, 2, 3, 4])], [8])
    assert not proposer.propose(step).token_ids[0].tolist()
    proposer.remove(np.array([0]))

    proposer.add(2, np.array([40, 5, 6, 7, 8], np.int32))
    assert propose(proposer, 2, [40, 5, 6, 7, 8], 8) == [1, 2, 3, 4]
    assert propose(proposer, 2, [40, 5, 6, 7, 8, 1], 2) == [2, 3]
    proposer.add(3, np.array([91, 92], np.int32))
    assert propose(proposer, 3, [91, 92], 8) == []


def test_a_row_prefers_the_text_that_agrees_longer() -> None:
    proposer = SuffixProposer(SuffixOptions(), DraftSetup(fake_limits(), is_adaptive=False))
    proposer.add(0, np.array([9], np.int32))
    propose(proposer, 0, [9, 1, 2, 3, 4, 5], 0)
    proposer.remove(np.array([0]))
    # "3 4" is followed by 6 in the row, and "1 2 3 4" by 5 in the answer
    own = [3, 4, 6, 6, 1, 2, 3, 4]
    proposer.add(0, np.array(own, np.int32))
    assert propose(proposer, 0, own, 4) == [6, 6]  # two tokens that are expected are more than one
    assert propose(proposer, 0, own, 1) == [6]
    proposer.add(1, np.array(own[2:], np.int32))
    assert propose(proposer, 1, own[2:], 4) == [5]


def propose(proposer: SuffixProposer, row: int, history: list[int], most: int) -> list[int]:
    (ids,) = proposer.propose(draft_step([row], [history], [most])).token_ids
    return ids.tolist()


@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=5), max_size=30),
    st.integers(0, 9),
    st.integers(0, 40),
    st.integers(1, 9),
)
def test_the_oldest_answers_are_forgotten(
    given_answers: list[list[int]], most: int, most_tokens: int, work_tokens: int
) -> None:
    """In parts of any size. The rest is the text of the last answers, with an index of its own runs
    only."""
    answers = Answers(most, most_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pegboard_draft_suffix.proposer.WORK_TOKENS", work_tokens)
        for answer in given_answers:
            before = answers.text.end
            answers.add(answer)
            assert answers.text.end - before <= work_tokens
        while answers.work():
            pass
    expected: list[list[int]] = []
    for answer in (
        [[*answer, END][-most_tokens:] for answer in given_answers] if most_tokens else ()
    ):
        expected.append(answer)
        while len(expected) > most or sum(map(len, expected)) > most_tokens:
            expected.pop(0)
    text = answers.text
    fresh = Text()
    last = [token for answer in expected for token in answer]
    fresh.append(last)
    assert text.tokens[text.floor - text.first :].tolist() == last
    assert 8 * (text.floor - text.first) <= len(text.tokens), (
        "the memory of forgotten tokens is kept"
    )
    if last and text.first == text.floor:
        moved = {run: position - text.floor for run, position in index(text).items()}
        assert {run: place for run, place in moved.items() if place >= ANCHOR} == index(fresh)
    assert all(position >= text.floor for position in index(text).values()), (
        "runs of forgotten answers are still indexed"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {("suffix_decoding_max_tree_depth"): 1},
        {("suffix_decoding_max_cached_requests"): -1},
        {("suffix_decoding_max_spec_factor"): 0},
        {"suffix_decoding_min_token_prob": 1.5},
        {"max_tree_depth": 8},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        SuffixOptions.model_validate(wrong)
