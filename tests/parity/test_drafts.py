"""Speculative decoding with real models: tokens and logprobs are those of an engine without
drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import DIVIDED

from pegboard import LLM, SamplingParams

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
    "adaptive_length": False,
}
WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 8,
}
PROMPTS = [[3, 4, 5] * 5, [*range(60, 85)], [5], [9, 8, 7, 9, 8, 7, 6, 9, 8], [*range(60, 80), 3]]
SUMS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
TOLERANCE = 1e-4


def params(**values: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "max_tokens": 25,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 2,
            **values,
        }
    )


MIXED = [
    params(),
    params(temperature=1.0, seed=1, n=2, top_p=0.9),
    params(
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias={7: 3.0, 9: -2.0},
    ),
    params(
        temperature=0.7,
        seed=5,
        top_k=9,
        min_p=0.02,
        repetition_penalty=0.8,
        min_tokens=4,
        stop_token_ids=[40, 41, 42],
    ),
    params(temperature=1.5, seed=2, allowed_token_ids=[3, 4, 5, 6, 7, 8], prompt_logprobs=1),
]


def run(llm: LLM, sampling: list[SamplingParams]) -> list[Any]:
    return llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False
    )


def compare(ours: list[Any], plain: list[Any]) -> None:
    for mine, expected in zip(ours, plain, strict=True):
        for one, other in zip(mine.outputs, expected.outputs, strict=True):
            assert list(one.token_ids) == list(other.token_ids)
            assert one.finish_reason == other.finish_reason and one.stop_reason == other.stop_reason
            for got, wanted in zip(one.logprobs, other.logprobs, strict=True):
                chosen = {token: entry.logprob for token, entry in wanted.items()}
                assert {token: entry.logprob for token, entry in got.items()} == pytest.approx(
                    chosen, abs=TOLERANCE
                )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model_type", "config", "engine"),
    [
        ("llama", {}, {"block_size": 16}),  # the forward is recorded
        (
            "llama",
            {},
            {"block_size": 16, "speculative_config": {**DRAFTS, "adaptive_length": True}},
        ),
        ("llama", {}, {"block_size": 16, "enforce_eager": True}),
        ("llama", {}, {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
        ("llama", {}, {"num_gpu_blocks_override": 29, "enable_prefix_caching": False}),
        ("gemma3_text", WINDOWS, {"num_gpu_blocks_override": 33}),
    ],
    ids=["recorded", "adaptive", "eager", "chunked", "preempted", "windows, preempted"],
)
def test_tokens_and_logprobs_are_those_of_plain_decoding(
    write: Callable[..., Any],
    open_llm: Callable[..., LLM],
    model_type: str,
    config: Any,
    engine: Any,
) -> None:
    """Alone, batched, and again with cached prefixes."""
    reference = write(model_type, **config)
    drafting = {"speculative_config": DRAFTS, "disable_log_stats": False, **engine}
    plain = run(
        open_llm(
            reference.directory,
            **{name: value for name, value in engine.items() if "spec" not in name},
        ),
        MIXED,
    )
    llm = open_llm(reference.directory, **drafting)
    compare(run(llm, MIXED), plain)
    compare(run(llm, MIXED), plain)
    compare(llm.generate([{"prompt_token_ids": PROMPTS[0]}], MIXED[0], use_tqdm=False), plain[:1])
    one_token = [params(allowed_token_ids=[7])] * len(PROMPTS)
    assert {token for answer in run(llm, one_token) for token in answer.outputs[0].token_ids} == {7}
    greedy = list(plain[0].outputs[0].token_ids)
    logits = reference.model(torch.tensor([PROMPTS[0] + greedy])).logits[
        0, len(PROMPTS[0]) - 1 : -1
    ]
    assert logits.argmax(-1).tolist() == greedy

    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts, proposed, accepted, by_place = (
        metrics[f"vllm:spec_decode_num_{name}"] for name in SUMS
    )
    assert accepted.value <= proposed.value <= 3 * drafts.value
    # how many are worth their time depends on the machine
    assert accepted.value > 0 or "speculative_config" in engine
    assert (
        sum(by_place.values) == accepted.value
        and sorted(by_place.values, reverse=True) == by_place.values
    )
    is_preempted = "num_gpu_blocks_override" in engine
    # the stages of a divided model have room for more requests
    assert (metrics["vllm:num_preemptions"].value > 0) == is_preempted or DIVIDED
