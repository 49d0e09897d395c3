"""With `batch_invariant`, a request has the same tokens and the same bits of its logprobs in every
batch: alone or with others, in any order, with its prompt in one piece or in many, and with or
without a prefix from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from stored_layouts import CASES, quantize
from test_default_dtype import OWN

from pegboard import LLM, SamplingParams
from pegboard.errors import PegboardError, PluginUnsuitable

LONG = {"max_position_embeddings": 512}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {}, {}),
    "16 bits": ("llama", {"hidden_size": 64}, {"dtype": "bfloat16"}),
    "window": ("qwen2", WINDOW, {}),
    "int8 cache": ("llama", {}, {"kv_cache_dtype": "int8"}),
    "experts": ("qwen3_moe", EXPERTS, {}),
    "latent": (*OWN["deepseek_v2, groups"], {}),
    "mamba": (*OWN["mamba"], {}),
    "mamba2": (*OWN["mamba2"], {}),
    "qwen3_next": (*OWN["qwen3_next"], {}),
    "int4": ("llama", {"hidden_size": 64, "intermediate_size": 128}, {"quantization": "rtn_int4"}),
    "fp8": ("llama", {"hidden_size": 64, "intermediate_size": 128}, {"quantization": "fp8"}),
    "fp8 experts": ("qwen3_moe", EXPERTS, {"quantization": "fp8"}),
}
"""Name → model type, values of its config, settings."""
COMMON = {"max_tokens": 6, "logprobs": 3, "detokenize": False, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **COMMON)
SEEDED = SamplingParams(seed=5, top_p=0.9, top_k=40, **COMMON)


def prompts(scale: int = 10) -> list[list[int]]:
    """Six prompts. Two of them share their first 28 · scale keys: with 10, more than those that
    rows read together."""
    generator = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 90, (count,), generator=generator).tolist()

    shared = tokens(28 * scale)
    most = tokens(15 * scale)
    return [tokens(5), shared + tokens(19), tokens(33), shared + tokens(2), tokens(1), most]


def answers(
    llm: LLM, order: Sequence[int], together: bool, scale: int = 10
) -> dict[int, list[Any]]:
    """Return, by the number of its prompt, each answer's tokens, with all of its logprobs."""
    chosen = [{"prompt_token_ids": prompts(scale)[number]} for number in order]
    params = [SEEDED if number % 2 else GREEDY for number in order]
    outputs = (
        llm.generate(chosen, params, use_tqdm=False)
        if together
        else [
            llm.generate([prompt], [param], use_tqdm=False)[0]
            for prompt, param in zip(chosen, params, strict=True)
        ]
    )
    return {
        number: [
            output.outputs[0].token_ids,
            [
                {token: (item.logprob, item.rank) for token, item in row.items()}
                for row in output.outputs[0].logprobs or []
            ],
        ]
        for number, output in zip(order, outputs, strict=True)
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_every_batch_gives_the_same_bits(
    write: Callable[..., Any], open_llm: Callable[..., LLM], name: str
) -> None:
    model_type, config, settings = MODELS[name]
    directory = write(model_type, **{**LONG, **config}).directory
    check_batches(lambda **more: open_llm(directory, **{**more, **settings}))


def check_batches(open_engine: Callable[..., LLM], scale: int = 10) -> None:
    common = {"batch_invariant": True, "block_size": 16, "mamba_block_size": 16}
    large = open_engine(**common, max_num_batched_tokens=1024, max_num_seqs=8)
    expected = answers(large, [3, 0, 5, 1, 4, 2], True, scale)
    assert answers(large, range(6), False, scale) == expected, "from the cache, alone"
    chunks = open_engine(**common, max_num_batched_tokens=24, enable_prefix_caching=False)
    assert answers(chunks, [5, 4, 1, 0, 2, 3], True, scale) == expected, "in chunks"
    assert answers(chunks, range(6), False, scale) == expected, "in chunks, alone"


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_every_architecture(
    write: Callable[..., Any], open_llm: Callable[..., LLM], name: str
) -> None:
    """Those whose plugins have the flag, with prompts of at most 40 tokens, because many of these
    tiny models have no more positions than 64."""
    model_type, config = OWN[name]
    directory = write(model_type, **config).directory
    try:
        check_batches(lambda **more: open_llm(directory, **more), scale=1)
    except PluginUnsuitable as refusal:
        pytest.skip(str(refusal).splitlines()[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_stored_layout(
    write: Callable[..., Any], open_llm: Callable[..., LLM], case: str
) -> None:
    reference = write("llama", hidden_size=64, intermediate_size=96)
    quantize(reference, case)
    check_batches(lambda **more: open_llm(reference.directory, **more), scale=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", [{"num_threads": 2}, {"tensor_parallel_size": 2}], ids=str)
def test_threads_and_ranks(
    write: Callable[..., Any], open_llm: Callable[..., LLM], name: str, split: dict[str, int]
) -> None:
    """In processes of their own. One process computes with one number of threads."""
    model_type, config, settings = MODELS[name]
    directory = write(model_type, **{**LONG, **config}).directory
    own = {"distributed_executor_backend": "mp", **split, **settings}
    check_batches(lambda **more: open_llm(directory, **{**more, **own}))


def test_what_depends_on_the_batch_is_refused(
    write: Callable[..., Any], open_llm: Callable[..., LLM]
) -> None:
    directory = write("llama").directory
    refusal = (
        "attention 'cpu_paged' was asked for but is unsuitable.*lacks the flag batch_invariant"
    )
    with pytest.raises(PegboardError, match=refusal):
        open_llm(directory, batch_invariant=True, block_size=16, attention_backend="cpu_paged")
    other = write("helium", folder="helium", head_dim=16).directory
    with pytest.raises(PegboardError, match="(?s)no plugin of kind 'model'.*batch_invariant"):
        open_llm(other, batch_invariant=True)
