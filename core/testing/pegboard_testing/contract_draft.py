"""Contract tests of the kind `draft`. A plugin's test file:

class TestMyProposer(DraftContract):
    def proposer(self, setup: DraftSetup) -> DraftProposer:
        return MyProposer(options, setup)

The proposals are checked on rows that come, grow and go, and in a whole engine with a fake model.
Proposers with a model pass `contract_draft_model.DraftModelContract` instead.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from pegboard.data.request import EngineRequest
from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.draft import DraftProposer, DraftSetup
from pegboard_testing.fake_draft import draft_step
from pegboard_testing.fake_engine import FakeEngine
from pegboard_testing.fake_limits import fake_limits

NUM_ROWS = 4
VOCAB_SIZE = 64


class DraftContract:
    """Every proposer that reads tokens on the host passes these. Override `proposer`."""

    def proposer(self, setup: DraftSetup) -> DraftProposer:
        """Return a new proposer."""
        raise AssertionError("override DraftContract.proposer")

    def make(self) -> DraftProposer:
        """A proposer that makes as many proposals as it can."""
        limits = fake_limits(max_num_seqs=NUM_ROWS, vocab_size=VOCAB_SIZE, max_drafts=5)
        return self.proposer(DraftSetup(limits, is_adaptive=False))

    @pytest.mark.parametrize("seed", range(16))
    def test_proposals_fit_their_rows(self, seed: int) -> None:
        """Each row has at most as many proposals as it may have, and they are what a proposer that
        knows only this row says."""
        chance = random.Random(seed)
        proposer = self.make()
        alone = dict[int, DraftProposer]()
        texts = dict[int, list[int]]()
        for _ in range(40):
            free = [row for row in range(NUM_ROWS) if row not in texts]
            if free and chance.random() < 0.4:
                row = chance.choice(free)
                texts[row] = [chance.randrange(8) for _ in range(chance.randint(1, 20))]
                alone[row] = self.make()
                for one in (proposer, alone[row]):
                    one.add(row, np.array(texts[row], np.int32))
            if texts and chance.random() < 0.2:
                row = chance.choice(list(texts))
                proposer.remove(np.array([row]))
                del texts[row], alone[row]
            rows = chance.sample(list(texts), chance.randint(0, len(texts)))
            for row in rows:
                texts[row] += [chance.randrange(8) for _ in range(chance.randint(1, 3))]
            limits = [chance.randint(0, 5) for _ in rows]
            proposals = self._proposed(proposer, {row: texts[row] for row in rows}, limits)
            for row, most, ids in zip(rows, limits, proposals, strict=True):
                assert [ids] == self._proposed(alone[row], {row: texts[row]}, [most]), (
                    "another row changes the proposals"
                )

    def _proposed(
        self, proposer: DraftProposer, texts: dict[int, list[int]], limits: list[int]
    ) -> list[list[int]]:
        """Return the proposals, after checks of their types, numbers and values."""
        step = draft_step(list(texts), list(texts.values()), limits)
        proposals = proposer.propose(step).token_ids
        assert len(proposals) == len(texts), (
            f"{len(texts)} rows may draft, and there are proposals for {len(proposals)}"
        )
        for ids, most in zip(proposals, limits, strict=True):
            assert ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer), (
                f"proposals are {ids.dtype}, expected integers"
            )
            assert len(ids) <= most, f"{len(ids)} proposals; the row may have {most}"
            assert all(0 <= token < VOCAB_SIZE for token in ids.tolist()), (
                f"{ids} has a token that does not exist"
            )
        kept = [ids.tolist() for ids in proposals]
        for ids in proposals:
            ids[:] = 0
        assert [text.tolist() for text in step.history] == list(texts.values()), (
            "the proposals share memory with the history"
        )
        return kept

    def test_rows_that_are_free_may_be_removed_again(self) -> None:
        proposer = self.make()
        proposer.add(1, np.array([1, 2, 1], np.int32))
        for _ in range(2):
            proposer.remove(np.array([0, 1]))
        proposer.remove(np.array([], np.int64))
        proposer.add(1, np.array([5], np.int32))
        assert len(self._proposed(proposer, {1: [5, 6]}, [0])[0]) == 0

    @pytest.mark.parametrize("seed", range(8))
    def test_the_output_is_that_of_plain_decoding(self, seed: int) -> None:
        """In an engine with few blocks, so that requests are preempted, and with aborts."""
        chance = random.Random(seed)
        engine = FakeEngine(
            max_drafts=4,
            draft=self.proposer,
            spare_blocks=chance.randint(0, 8),
            max_num_batched_tokens=chance.randint(8, 32),
        )
        requests = {}
        for number in range(8):
            prompt = [chance.randrange(6) for _ in range(chance.randint(1, 24))]
            params = SamplingParams(
                temperature=0.0, max_tokens=chance.choice([1, 9, 20]), ignore_eos=True
            )
            request = EngineRequest(request_id=f"r{number}", prompt_token_ids=prompt, params=params)
            requests[request.request_id] = request
            engine.engine.add(request)
            for _ in range(chance.randint(0, 3)):
                engine.step()
            if chance.random() < 0.2:
                engine.engine.abort([request.request_id])
        engine.run()
        engine.check_results(requests)
        engine.check_idle()
