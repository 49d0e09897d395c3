"""What a step returned stays as it was, although later steps fill the same buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from pegboard import LLM, PoolingParams, SamplingParams
from pegboard.data.batch import Batch, StepOutput
from pegboard.worker.model_runner import ModelRunner

PROMPTS = [
    [3, 4, 5] * 5,
    [*range(60, 85)],
    [5],
    [9, 8, 7, 9, 8, 7, 6, 9, 8],
    [*range(60, 80), 3],
    [7, 7, 7, 7],
]
COMMON = {"ignore_eos": True, "detokenize": False}
SAMPLED = [
    SamplingParams(max_tokens=9, temperature=0, logprobs=2, prompt_logprobs=1, **COMMON),
    SamplingParams(max_tokens=6, temperature=0, **COMMON),
    SamplingParams(max_tokens=12, seed=1, n=2, top_p=0.9, logprobs=0, **COMMON),
    SamplingParams(max_tokens=9, temperature=0, repetition_penalty=1.2, logprobs=-1, **COMMON),
    SamplingParams(max_tokens=3, seed=4, min_p=0.05, prompt_logprobs=3, **COMMON),
    SamplingParams(max_tokens=11, temperature=0, logprobs=1, allowed_token_ids=[7], **COMMON),
]
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "adaptive_length": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recorded": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4},
    "preempted": {
        "num_gpu_blocks_override": 19,
        "block_size": 4,
        "max_num_seqs": 6,
        "enable_prefix_caching": False,
    },
    "drafts": {"speculative_config": DRAFTS},
    "vectors": {"runner": "pooling", "max_num_batched_tokens": 32},
}


def contents(output: StepOutput) -> str:
    return repr(msgspec.to_builtins(output, enc_hook=lambda array: array.tolist()))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepOutput, str]]:
    """Each step's output, with what it contained when the step had ended."""
    plain = ModelRunner.run
    kept = []

    def run(self: ModelRunner, batch: Batch, masks: Any = None) -> Callable[[], StepOutput]:
        wait = plain(self, batch, masks)
        output = wait()  # before a later step starts
        kept.append((output, contents(output)))
        return wait

    monkeypatch.setattr(ModelRunner, "run", run)
    return kept


@pytest.mark.parametrize("name", SETTINGS)
def test_results_do_not_change(
    name: str,
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    steps: list[tuple[StepOutput, str]],
) -> None:
    llm = open_llm(write("llama").directory, **{"block_size": 16, **SETTINGS[name]})
    steps.clear()
    if name == "vectors":
        llm.embed(
            PROMPTS,
            pooling_params=[PoolingParams(use_activation=row % 2 == 0) for row in range(6)],
            use_tqdm=False,
        )
        llm.embed(PROMPTS[::-1], use_tqdm=False)
    else:
        llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SAMPLED, use_tqdm=False)
    assert len(steps) > 1
    assert (llm.llm_engine.engine.stats()["num_preemptions_total"] > 0) == (name == "preempted")
    assert any(len(output.token_ids.flat) > len(output.rows) for output, _ in steps) == (
        name == "drafts"
    )
    for number, (output, then) in enumerate(steps):
        assert contents(output) == then, f"step {number} of {len(steps)}"
