"""The contract of the kind, and what this sampler guarantees in addition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from pegboard_sampler_torch.sampler import TorchSampler
from pegboard_sampler_torch.step import StepLayout

from pegboard.data.sampling_params import SamplingParams
from pegboard.interfaces.sampler import Sampler, SamplerSetup, SampleStep
from pegboard.ops.sampling import sample_tokens
from pegboard_testing.contract_sampler import (
    DraftSamplerContract,
    random_params,
)
from pegboard_testing.distributions import log_softmax, processed_logits
from pegboard_testing.fake_limits import fake_limits


class TestTorchSampler(DraftSamplerContract):
    def sampler(self, setup: SamplerSetup) -> Sampler:
        return TorchSampler(None, setup)

    def test_speculation_does_not_change_the_tokens_of_a_seeded_row(self) -> None:
        """This is more than lossless: a deterministic proposal gives exactly the same tokens in
        fewer steps."""
        rng = np.random.default_rng(11)
        x = rng.normal(0, 1, (40, 24))
        params = SamplingParams(seed=3, temperature=0.7, top_k=5, max_tokens=None)
        plain = self.make(vocab_size=24)
        self.add(plain, 0, params)
        expected = [self.tokens(self.run(plain, row[None], [0]))[0][0] for row in x]
        fast = self.make(vocab_size=24)
        found = []
        num_steps = 0
        self.add(fast, 6, params)
        while len(found) < 30:
            start = len(found)
            drafts = [
                token if rng.random() < 0.7 else int(rng.integers(24))
                for token in expected[start : start + 3]
            ]
            found += self.tokens(self.run(fast, x[start : start + 4], [6], [drafts]))[0]
            num_steps += 1
        assert found == expected[: len(found)] and num_steps < 20

    def test_a_step_without_special_rows_does_no_special_work(self) -> None:
        sampler = TorchSampler(
            None, SamplerSetup(fake_limits(vocab_size=96, max_num_seqs=8), "cpu", 0)
        )
        self.add(
            sampler,
            1,
            SamplingParams(repetition_penalty=2.0, logit_bias={3: 1.0}, top_p=0.5, logprobs=2),
        )
        self.add(sampler, 2, SamplingParams(temperature=0))
        layout = StepLayout(
            SampleStep(np.array([2, 5]), np.array([0, 1, 2])), sampler.rows, torch.device("cpu")
        )
        assert layout.present == 0
        sampler.remove(np.array([1, 2]))
        assert not sampler.rows.flags.any() and not sampler.edits and not sampler.penalties.slots

    def test_min_tokens_stops_costing_when_it_is_reached(self) -> None:
        sampler = TorchSampler(
            None, SamplerSetup(fake_limits(vocab_size=96, max_num_seqs=8), "cpu", 0)
        )
        self.add(sampler, 0, SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[7]))
        x = np.zeros((1, 96))
        x[0, 7] = 2
        x[0, 8] = 1
        assert [self.tokens(self.run(sampler, x, [0]))[0][0] for _ in range(3)] == [8, 8, 7]
        assert not sampler.edits and not sampler.rows.flags.any()

    def test_logprobs_modes(self) -> None:
        x = np.random.default_rng(12).normal(0, 2, (1, 96)).astype(np.float32)
        params = SamplingParams(logprobs=-1, temperature=0.5, logit_bias={4: 3.0}, top_k=10)
        shown = {}
        for mode in ("raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"):
            sampler = self.make(logprobs_mode=mode)
            self.add(sampler, 0, params)
            part = self.run(sampler, x, [0]).shown()[0]
            shown[mode] = np.empty(96)
            shown[mode][part.token_ids[0, 1:]] = part.values[0, 1:]
        processed = processed_logits(x[0], params, [1], [])
        np.testing.assert_allclose(shown["raw_logits"], x[0])
        np.testing.assert_allclose(shown["raw_logprobs"], log_softmax(x[0]), atol=1e-5)
        np.testing.assert_allclose(shown["processed_logits"], processed, atol=1e-5)
        np.testing.assert_allclose(shown["processed_logprobs"], log_softmax(processed), atol=1e-5)

    def test_rows_come_and_go_at_random(self) -> None:
        """A sampler whose rows have been reused many times gives the same tokens in every step as
        one that was made for a single row."""
        for trial in range(4):
            rng = np.random.default_rng(400 + trial)
            shared = self.make(rows=5)
            alone = {}
            for _ in range(25):
                row = int(rng.integers(5))
                if row in alone and rng.random() < 0.5:
                    shared.remove(np.array([row]))
                    del alone[row]
                elif row not in alone:
                    params = random_params(rng, seed=int(rng.integers(99)))
                    prompt = rng.integers(0, 96, 5).tolist()
                    alone[row] = self.make()
                    self.add(shared, row, params, prompt)
                    self.add(alone[row], 0, params, prompt)
                if not alone:
                    continue
                rows = rng.permutation(list(alone)).tolist()
                drafts = [rng.integers(0, 96, rng.integers(0, 3)).tolist() for _ in rows]
                ends = np.cumsum([0, *(1 + len(d) for d in drafts)])
                x = rng.normal(0, 4, (ends[-1], 96))
                together = self.tokens(self.run(shared, x, rows, drafts))
                for i, row in enumerate(rows):
                    single = self.run(alone[row], x[ends[i] : ends[i + 1]], [0], [drafts[i]])
                    assert together[i] == self.tokens(single)[0]


class TestTorchSamplerWithKernel(DraftSamplerContract):
    """The same tests for a plugin's op `sample_tokens`, which its reference represents here."""

    def sampler(self, setup: SamplerSetup) -> Sampler:
        return TorchSampler(None, replace(setup, kernels={"sample_tokens": sample_tokens}))
