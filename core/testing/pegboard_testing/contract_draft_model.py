"""Contract tests of draft plugins with a model, `PaddedProposer`s. A plugin's test file:

class TestMyProposer(DraftModelContract):
    model = SimpleNamespace(start=lambda hidden: hidden)

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        return MyProposer(None, setup)

The draft model is a fake one, whose hidden states depend on everything that was computed before. So
a token that is computed twice, at a wrong place or not at all changes the drafts. The proposals
after each step must be those of a new proposer that gets the whole text at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.interfaces.draft import (
    ComputedTokens,
    DraftSetup,
    DraftStep,
    PaddedProposer,
    PaddedStep,
)
from pegboard_testing.fake_forwards import FakeForwards, folded
from pegboard_testing.fake_limits import fake_limits

NUM_ROWS = 3
VOCAB_SIZE = 32
MAX_DRAFTS = 3


@dataclass
class _Row:
    """text: prompt and outputs. computed: how many tokens of it the target has computed. drafts:
    after the last step. num_wrong: of the last step."""

    text: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    num_wrong: int = 0


@dataclass
class _Part:
    """What a step computes of a row. kept: of the tokens, those that stay. tokens: with wrong
    drafts. sampled: the samples at the last places, right ones first; [] = it samples nothing."""

    number: int
    start: int
    largest_start: int
    kept: int
    tokens: list[int]
    sampled: list[int]


class DraftModelContract:
    """Override `proposer`, and `model` and `logits` if the plugin's proposer uses more of its
    model. logits: [N, 1] hidden states of the fake model → [N, V]."""

    model: Any = None
    logits: Callable[[Tensor], Tensor] | None = None

    def proposer(self, setup: DraftSetup) -> PaddedProposer:
        """Return a new proposer."""
        raise AssertionError("override DraftModelContract.proposer")

    def make(self, texts: dict[int, list[int]], can_wait: bool) -> tuple[PaddedProposer, Any]:
        """A proposer that makes as many proposals as it can, and its forwards."""
        limits = fake_limits(
            max_num_seqs=NUM_ROWS,
            vocab_size=VOCAB_SIZE,
            max_drafts=MAX_DRAFTS,
            max_num_batched_tokens=64,
        )
        logits = type(self).logits
        forwards = FakeForwards(self.model, VOCAB_SIZE, texts, can_wait=can_wait, logits=logits)
        setup = DraftSetup(limits, is_adaptive=False, forwards=forwards)
        return self.proposer(setup), forwards

    @given(data=st.data(), can_wait=st.booleans())
    @settings(
        max_examples=60, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    def test_proposals_are_those_for_the_whole_text(
        self, data: st.DataObject, can_wait: bool
    ) -> None:
        """With and without knowing on the host how many drafts were right."""
        rows: dict[int, _Row] = {}
        texts: dict[int, list[int]] = {}
        pairs = [self.make(texts, can_wait) for _ in range(2)]
        (plain, _), (padded, _) = pairs
        for _ in range(data.draw(st.integers(1, 12))):
            self._come_and_go(data, rows, texts, pairs)
            if not rows:
                continue
            chosen = data.draw(st.lists(st.sampled_from([*rows]), min_size=1, unique=True))
            parts = [self._part(data, number, rows[number]) for number in chosen]
            known = plain.propose(_plain_step(parts, rows)).token_ids
            step = _padded_step(parts, rows)
            drafts, probs = padded.propose_padded(step)
            sampled = [part for part in parts if part.sampled]
            assert probs is None, "nothing was drawn"
            assert not sampled or len(drafts) == len(sampled), "one row of drafts for each sample"
            for place, part in enumerate(sampled):
                row = rows[part.number]
                row.drafts = drafts[place].tolist()
                assert row.drafts == known[place].tolist(), "they differ if the host knows nothing"
                assert row.drafts == self._alone(row.text), "they differ from those of a new row"

    def _alone(self, text: list[int]) -> list[int]:
        """Return the drafts of a new proposer after this text."""
        proposer, _ = self.make({0: text}, can_wait=False)
        proposer.add(0, np.array(text, np.int32))
        part = _Part(0, 0, 0, len(text) - 1, text[:-1], [text[-1]])
        (ids,) = proposer.propose(_plain_step([part], {0: _Row(text)})).token_ids
        drafts: list[int] = ids.tolist()
        return drafts

    def _come_and_go(
        self, data: st.DataObject, rows: dict[int, _Row], texts: dict[int, list[int]], pairs: Any
    ) -> None:
        if rows and data.draw(st.integers(0, 5)) == 0:
            number = data.draw(st.sampled_from([*rows]))
            for proposer, forwards in pairs:
                proposer.remove(np.array([number]))
                forwards.remove(np.array([number]))
            del rows[number], texts[number]
        free = [number for number in range(NUM_ROWS) if number not in rows]
        if free and data.draw(st.booleans()):
            tokens = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9)
            rows[free[0]] = row = _Row(data.draw(tokens))
            texts[free[0]] = row.text
            for proposer, _ in pairs:
                proposer.add(free[0], np.array(row.text, np.int32))

    def _part(self, data: st.DataObject, number: int, row: _Row) -> _Part:
        """Compute some tokens of the row."""
        start = row.computed
        missing = len(row.text) - start
        if missing > 1 or not row.drafts:
            count = data.draw(st.integers(1, missing))
            drafts = list[int]()
        else:
            count = 1
            drafts = row.drafts[: data.draw(st.integers(0, MAX_DRAFTS))]
        wrong = data.draw(st.integers(0, row.num_wrong))
        right = data.draw(st.integers(0, len(drafts)))
        tokens = [*row.text[start : start + count], *drafts]
        row.computed += count + right
        row.num_wrong = 0
        sampled = list[int]()
        if start + count == len(row.text):
            new = [*drafts[:right], data.draw(st.integers(0, VOCAB_SIZE - 1))]
            row.text += new
            row.num_wrong = len(drafts) - right
            sampled = [*new, *[-1] * row.num_wrong]
        return _Part(number, start, start + wrong, count + right, tokens, sampled)


def _states(part: _Part, row: _Row, count: int) -> list[int]:
    """Return the target's hidden states of the first tokens of a part, one number each."""
    text = [*row.text[: part.start], *part.tokens]
    return [folded(text[: part.start + place + 1]) for place in range(count)]


def _numbers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def _plain_step(parts: list[_Part], rows: dict[int, _Row]) -> DraftStep:
    sampled = [part for part in parts if part.sampled]
    states = [state for part in parts for state in _states(part, rows[part.number], part.kept)]
    num_new = [sum(token >= 0 for token in part.sampled) for part in sampled]
    return DraftStep(
        rows=np.array([part.number for part in sampled], np.int32),
        history=[np.array(rows[part.number].text, np.int32) for part in sampled],
        max_drafts=np.full(len(sampled), MAX_DRAFTS),
        num_verified=np.array([len(part.sampled) - 1 for part in sampled], np.int64),
        num_new=np.array(num_new, np.int64),
        computed=ComputedTokens(
            rows=np.array([part.number for part in parts], np.int32),
            starts=np.array([part.start for part in parts], np.int64),
            counts=np.array([part.kept for part in parts], np.int64),
            samples=np.array([bool(part.sampled) for part in parts]),
            hidden=(_numbers(states),),
        ),
    )


def _padded_step(parts: list[_Part], rows: dict[int, _Row]) -> PaddedStep:
    places = list[int]()
    last = list[int]()
    newest = list[int]()
    ends = list[int]()
    first = 0
    for part in parts:
        count = len(part.tokens)
        if part.sampled:
            begin = first + count - len(part.sampled)
            right = sum(token >= 0 for token in part.sampled)
            places += range(begin, first + count)
            last.append(begin + right - 1)
            newest.append(part.sampled[right - 1])
            ends.append(part.start + part.kept)
        first += count
    states = [
        state for part in parts for state in _states(part, rows[part.number], len(part.tokens))
    ]
    samples = [max(token, 0) for part in parts for token in part.sampled]
    return PaddedStep(
        rows=np.array([part.number for part in parts], np.int32),
        starts=np.array([part.largest_start for part in parts], np.int64),
        counts=np.array([len(part.tokens) for part in parts], np.int64),
        samples=np.array([bool(part.sampled) for part in parts]),
        depths=MAX_DRAFTS,
        hidden=(_numbers(states),),
        exact=torch.tensor([part.start for part in parts]),
        places=torch.tensor(places, dtype=torch.int64),
        token_ids=torch.tensor(samples, dtype=torch.int64),
        last=torch.tensor(last, dtype=torch.int64),
        newest=torch.tensor(newest, dtype=torch.int64),
        ends=torch.tensor(ends, dtype=torch.int64),
    )
