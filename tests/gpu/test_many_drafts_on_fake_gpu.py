"""Drafts on a fake GPU on which torch computes, so that there is time for many requests."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import tiny_drafts
from fake_gpu_engine import engine_on_fake_gpu, submitted_steps
from tiny_drafts import METHODS, Drafted
from tiny_heads import metric

from pegboard import LLM, SamplingParams
from pegboard_testing.distributions import chi_square_fits, processed_logits, softmax

PROMPT = [60, 61, 62]
NUM_SAMPLES = 1200
DRAWN = [
    (2, SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)),
    (4, SamplingParams(temperature=1.2, top_k=3, max_tokens=5, ignore_eos=True)),
]
"""How many tokens are compared. The first one is drawn without a draft, and each of the others may
be a draft."""


def with_stored_weights(here: Drafted) -> Any:
    """Return the target of transformers as its checkpoint is."""
    stored = load_file(here.directory / "model.safetensors")
    assert not here.model.load_state_dict(stored, strict=False).missing_keys
    return here.model


def distribution(
    model: Any, depth: int, params: SamplingParams
) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Return all that may follow the prompt, `depth` tokens each, and how likely each is according
    to transformers."""
    texts: list[tuple[int, ...]] = [()]
    probs = np.ones(1)
    for _ in range(depth):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *text] for text in texts])).logits[:, -1]
        rows = [softmax(processed_logits(row, params, PROMPT, [])) for row in logits.numpy()]
        joint = probs[:, None] * np.stack(rows)
        which, tokens = np.nonzero(joint)
        texts = [
            (*texts[i], token) for i, token in zip(which.tolist(), tokens.tolist(), strict=True)
        ]
        probs = joint[which, tokens]
    return texts, probs


def counts(llm: LLM, depth: int, params: SamplingParams) -> Counter[tuple[int, ...]]:
    """Return how often each text follows the prompt in many requests."""
    prompts = [{"prompt_token_ids": PROMPT}] * NUM_SAMPLES
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Counter(tuple(output.outputs[0].token_ids[:depth]) for output in outputs)


@pytest.mark.parametrize("method", METHODS)
def test_drawn_drafts_leave_the_distribution_of_the_target(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are drawn too, from another distribution than that of the target, and many are
    rejected. Without seeds of requests, so that the acceptance is by chance as well."""
    torch.manual_seed(1)
    here = METHODS[method](tmp_path)
    model = with_stored_weights(here)
    settings = {"max_num_seqs": 128, "max_num_batched_tokens": 512, "seed": 5}
    more = {"speculative_config": here.config, "disable_log_stats": False}
    submitted = submitted_steps(monkeypatch)
    with engine_on_fake_gpu(here.directory, by_triton=False, **settings, **more) as (llm, gpu):
        waits = (gpu.host_reads, gpu.blocking_uploads)
        for depth, params in DRAWN:
            observed = counts(llm, depth, params)
            texts, probs = distribution(model, depth, params)
            assert observed.keys() <= set(texts)
            found = np.array([observed[text] for text in texts])
            assert chi_square_fits(found, probs), params
        assert (gpu.host_reads, gpu.blocking_uploads) == waits, "no step waits for the device"
        print("M", metric(llm, "accepted_tokens") ,metric(llm, "draft_tokens"))
        assert 0.1 < metric(llm, "accepted_tokens") / metric(llm, "draft_tokens") < 0.9
    verifying = [is_alone for batch, is_alone in submitted if batch.num_draft_tokens.any()]
    assert verifying.count(False) > 2, "steps with drafts are scheduled ahead"
