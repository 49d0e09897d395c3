"""Two engines that share out experts answer as one engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_experts_parity import ARCHITECTURES as EXPERTS
from test_latent_parity import ARCHITECTURES as LATENT
from test_state_parity import ARCHITECTURES as STATES
from tiny_models import make_model

from pegboard import LLM, AsyncLLM, SamplingParams
from pegboard.errors import PegboardError

CASES = {
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "biases": EXPERTS["gpt_oss"],
    "weights of inputs": EXPERTS["llama4"],
    "shared experts": LATENT["deepseek_v3"],
    "states": STATES["qwen3_next"],
}
PROMPTS = [[3 + (7 * i + 5 * j) % 120 for j in range(1 + 4 * i)] for i in range(8)]
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 1 << 24,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 40,
    "num_threads": 1,
}
TWO = {**COMMON, "data_parallel_size": 2, "enable_expert_parallel": True}


def expected(path: Path) -> list[list[int]]:
    """What one engine answers."""
    llm = LLM(str(path), **COMMON)
    try:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    finally:
        llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


async def answers(llm: AsyncLLM, rank: int | None = None) -> list[list[int]]:
    """What the engines answer to all prompts at the same time. rank: the only engine asked."""

    async def answer(prompt: list[int]) -> list[int]:
        name = f"{rank} {len(prompt)}"
        request = {"prompt_token_ids": prompt}
        outputs = llm.generate(request, GREEDY, name, data_parallel_rank=rank)
        return [list(output.outputs[0].token_ids) async for output in outputs][-1]

    return await asyncio.gather(*map(answer, PROMPTS))


def with_engines(path: Path, use: Callable[[AsyncLLM], Any], **more: Any) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(path), **{**TWO, **more})
        try:
            await use(llm)
        finally:
            llm.shutdown()

    asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_two_engines_answer_as_one(tmp_path: Path, name: str) -> None:
    """Also if only one of them has requests."""
    kind, values = CASES[name]
    make_model(kind, **values).save_pretrained(tmp_path)
    want = expected(tmp_path)

    async def use(llm: AsyncLLM) -> None:
        for rank in (None, 0, 1):
            assert await answers(llm, rank) == want

    with_engines(tmp_path, use)


@pytest.mark.slow
def test_two_engines_of_two_ranks(tmp_path: Path) -> None:
    make_model("mixtral", num_local_experts=4, num_experts_per_tok=2).save_pretrained(tmp_path)
    want = expected(tmp_path)

    async def use(llm: AsyncLLM) -> None:
        for rank in (None, 1):
            assert await answers(llm, rank) == want

    with_engines(tmp_path, use, tensor_parallel_size=2, all2all_backend="naive")


def test_requests_end_and_weights_change(tmp_path: Path) -> None:
    """Engines pause, read other weights and go on, also while requests run, and are aborted."""
    model = make_model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    model.save_pretrained(tmp_path / "first")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2).add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(tmp_path / "second")
    first, second = expected(tmp_path / "first"), expected(tmp_path / "second")
    assert first != second
    endless = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, detokenize=False)

    async def use(llm: AsyncLLM) -> None:
        await llm.pause_generation()
        await llm.resume_generation()
        assert await answers(llm) == first
        open_ = llm.generate({"prompt_token_ids": [5]}, endless, "open", data_parallel_rank=0)
        await anext(open_)
        await llm.update_weights(str(tmp_path / "second"))
        async for output in open_:
            assert output.outputs[0].finish_reason in (None, "abort", "length")
        assert await answers(llm) == second
        left = llm.generate({"prompt_token_ids": [6]}, endless, "left", data_parallel_rank=1)
        await anext(left)
        await left.aclose()
        assert await answers(llm, 0) == second

    with_engines(tmp_path / "first", use)


@pytest.mark.parametrize(
    ("kind", "values", "settings", "message"),
    [
        (
            "mixtral",
            {"num_local_experts": 1, "num_experts_per_tok": 1},
            {},
            "1 heads, channels or experts .* among 2 ranks",
        ),
        ("llama", {}, {}, "has no experts; remove enable_expert_parallel"),
        ("mixtral", {}, {"all2all_backend": "pplx"}, "all2all_backend is 'pplx'"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    tmp_path: Path, kind: str, values: Any, settings: dict[str, Any], message: str
) -> None:
    make_model(kind, **values).save_pretrained(tmp_path)

    async def use(llm: AsyncLLM) -> None:
        await llm.start()

    with pytest.raises(PegboardError, match=message):
        with_engines(tmp_path, use, **settings)
