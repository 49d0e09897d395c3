"""Drafts on a fake GPU on which torch computes, so that there is time for many requests."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import tiny_drafts
from fake_gpu_engine import engine_on_fake_gpu, submitted_steps
from test_draft_combinations import (
    LONG,
    MIXED_ENGINE,
    answer,
    compare,
    give_adapters,
    num_kept,
    value,
)
from tiny_drafts import METHODS, Drafted
from tiny_heads import metric
from tiny_models import VOCAB_SIZE, nightly, open_llm

from pegboard import LLM, SamplingParams
from pegboard_testing.distributions import chi_square_fits

pytestmark = pytest.mark.usefixtures("interpreted_triton")

FIRST = 60
"""The only token of the prompt."""
DEPTH = 3
"""Tokens whose distribution is known. Each of them but the first may be a draft."""
NUM_SAMPLES = 1000
DRAWN = [
    SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=1.2, top_k=5, max_tokens=4, ignore_eos=True),
]


def logits_of(here: Drafted) -> list[Tensor]:
    """Return the logits of transformers after the prompt and all texts of 0, 1, … tokens."""
    stored = load_file(here.directory / "model.safetensors")
    assert not here.model.load_state_dict(stored, strict=False).missing_keys
    logits = []
    for length in range(DEPTH):
        texts = itertools.product([FIRST], *[range(VOCAB_SIZE)] * length)
        with torch.no_grad():
            logits.append(here.model(torch.tensor(list(texts)), logits_to_keep=1).logits[:, 0])
    return logits


def distribution(logits: list[Tensor], params: SamplingParams) -> np.ndarray:
    """Return how likely each text of DEPTH tokens is: [V ** DEPTH]."""
    joint = torch.ones(1, dtype=torch.float64)
    for each in logits:
        x = each.double() / params.temperature
        if params.top_k > 0:
            x = x.masked_fill(x < x.topk(params.top_k).values[:, -1:], -torch.inf)
        joint = (joint.unsqueeze(1) * x.softmax(-1)).flatten()
    return joint.numpy()


def counts(llm: LLM, params: SamplingParams) -> np.ndarray:
    """Return how often each text follows the prompt in many requests: [V ** DEPTH]."""
    prompts = [{"prompt_token_ids": [FIRST]}] * NUM_SAMPLES
    outputs = llm.generate(prompts, params, use_tqdm=False)
    texts = np.array([output.outputs[0].token_ids[:DEPTH] for output in outputs])
    places = np.ravel_multi_index(tuple(texts.T), (VOCAB_SIZE,) * DEPTH)
    return np.bincount(places, minlength=VOCAB_SIZE**DEPTH)


def by_kind(values: np.ndarray) -> np.ndarray:
    """Return the sums [2 ** DEPTH] of values [V ** DEPTH] of texts in which the same tokens are
    what drafts mostly are, namely one more than the token before."""
    texts = np.indices((VOCAB_SIZE,) * DEPTH).reshape(DEPTH, -1)
    steps = np.diff(texts, axis=0, prepend=FIRST) == 1
    kinds = 2 ** np.arange(DEPTH) @ steps
    return np.bincount(kinds, values, minlength=2**DEPTH)


@pytest.mark.parametrize(
    "method", nightly(("draft_model", "eagle", "mlp_speculator"), "draft_model", "eagle")
)
def test_drawn_drafts_leave_the_distribution_of_the_target(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are drawn too, from other distributions than those of the target, and many of them are
    rejected. The requests have no seeds, so that chance accepts drafts."""
    torch.manual_seed(1)
    monkeypatch.setattr(tiny_drafts, "NOISE", 0.15)
    here = METHODS[method](tmp_path)
    logits = logits_of(here)
    submitted = submitted_steps(monkeypatch)
    settings = {
        "speculative_config": here.config,
        "disable_log_stats": False,
        "max_in_flight": 2,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 1024,
        "seed": 5,
    }
    with engine_on_fake_gpu(here.directory, by_triton=False, **settings) as (llm, gpu):
        waits = (gpu.host_reads, gpu.blocking_uploads)
        for params in DRAWN:
            expected = distribution(logits, params)
            found = counts(llm, params)
            assert chi_square_fits(found, expected), params
            assert chi_square_fits(by_kind(found), by_kind(expected)), params
        assert (gpu.host_reads, gpu.blocking_uploads) == waits, "no step waits for the device"
        assert 0.1 < metric(llm, "accepted_tokens") / metric(llm, "draft_tokens") < 0.9
    verifying = [is_alone for batch, is_alone in submitted if batch.num_draft_tokens.any()]
    assert verifying.count(False) > 2, "steps with drafts are scheduled ahead"


def request(number: int, **changes: Any) -> dict[str, Any]:
    """A greedy request of `answer` in test_draft_combinations."""
    return {**LONG[0], "prompt": [*range(60, 85)], "adapter": number % 3, **changes}


MIXES = {
    "preempted": LONG,
    "aborted": [request(number, aborted_after=(None, 2, 3)[number % 3]) for number in range(9)],
    "several completions": [
        request(n, sampling={"max_tokens": 12, "temperature": 0.8, "n": 3}) for n in range(4)
    ],
    "same prompts": [request(0) for _ in range(3)],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_mixes_of_requests(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters on the target, and with so few blocks that requests are preempted: tokens,
    texts and logprobs are those of the CPU without drafts, also with cached prefixes. No block is
    kept."""
    torch.manual_seed(1)
    monkeypatch.setattr(tiny_drafts, "NOISE", 0.15)
    here = METHODS[method](tmp_path)
    give_adapters(monkeypatch, here.model)
    common = {
        **MIXED_ENGINE,
        "dtype": "float32",
        "max_num_batched_tokens": 24,
        "generation_config": "vllm",
    }
    settings = {"speculative_config": here.config, "max_in_flight": 2, "block_size": 16}
    settings["num_gpu_blocks_override"] = 1 + 6 * here.num_groups
    with (
        open_llm(here.directory, **common) as plain,
        engine_on_fake_gpu(here.directory, by_triton=False, **common, **settings) as (llm, _),
    ):
        for name, mix in MIXES.items():
            for _ in range(2 if name == "same prompts" else 1):
                compare(answer(llm, mix, here.model), answer(plain, mix, here.model))
                assert num_kept(llm) == 0
        assert 0 < metric(llm, "accepted_tokens") < metric(llm, "draft_tokens")
        assert value(llm, "num_preemptions") > 0
        assert value(llm, "prefix_cache_hits") > 0
