"""Every model that reads images, audio or video gives the same answers however its requests are
computed: with few blocks, computed again, from cached prefixes, and two for a prompt. In float32
and in bfloat16.

Other tests compare these models with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from media_families import FAMILIES, ITEMS, processor_of
from test_every_row import GREEDY, LIMITS, MOST_LIKELY, num_preemptions, same
from test_media_dtypes import OTHERS, SMALL
from tiny_media import Prompt, open_media_llm

from pegboard import LLM, SamplingParams
from pegboard.data.output import CompletionOutput, RequestOutput
from pegboard.engine.kv.plan import blocks_per_request
from pegboard_weights.hf_files import read_config, with_defaults

STEP = 2048
"""Tokens of a step, which takes whole items."""
SIZES = {"max_num_batched_tokens": STEP, "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 4}
WORDS = " ".join(f"w{number}" for number in range(8, 50))


def prompts_of(folder: Path, name: str) -> list[Prompt]:
    """Return a prompt with an item of each sort behind some words, one with two items, and one
    without any."""
    processor, modalities = processor_of(folder, with_defaults(read_config(folder)))
    options: dict[str, Any] = {"mm_processor_kwargs": SMALL} if "omni" in name else {}

    def prompt(first: int, *items: str) -> Prompt:
        marks = " w6 ".join(processor.placeholder(each).text for each in items)
        data = {each: [ITEMS[each]] * items.count(each) for each in items}
        return {
            **options,
            "prompt": f"w{first} {WORDS} {marks} w7",
            **({"multi_modal_data": data} if data else {}),
        }

    single = [prompt(number, each) for number, each in enumerate(modalities)]
    return [*single, prompt(5, modalities[0], modalities[0]), prompt(6)]


def answers(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, is_cached: bool = False
) -> list[RequestOutput]:
    if not is_cached:
        assert llm.reset_prefix_cache()
    return llm.generate(list(prompts), params, use_tqdm=False)


@contextmanager
def few_blocks(llm: LLM, num_tokens: int) -> Iterator[None]:
    """Leave free what one request of so many tokens and a third need."""
    assert llm.reset_prefix_cache()
    kv = llm.llm_engine.engine._live.kv
    needed = blocks_per_request(kv.plan, num_tokens, STEP)
    held = kv.pool.take(kv.pool.num_free - needed * 4 // 3)
    assert held is not None
    yield
    kv.pool.free(held)


def check_computed_again(
    llm: LLM, prompts: Sequence[Prompt], expected: Sequence[CompletionOutput], limit: float
) -> None:
    """All requests lose what they have computed in the middle of their outputs."""
    assert llm.reset_prefix_cache()
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, GREEDY)
    results: dict[str, CompletionOutput] = {}
    is_reset = False
    while engine.has_unfinished_requests():
        results |= {output.request_id: output.outputs[0] for output in engine.step()}
        if not is_reset and any(len(each.token_ids) > 3 for each in results.values()):
            is_reset = llm.reset_prefix_cache(reset_running_requests=True)
    assert is_reset
    for number, one in enumerate(expected):
        same(one, results[str(number)], limit)


@pytest.mark.sampled(15)
@pytest.mark.one_rank
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - OTHERS))
def test_row(tmp_path: Path, name: str) -> None:
    FAMILIES[name](tmp_path)
    prompts = prompts_of(tmp_path, name)
    for dtype, limit in LIMITS.items():
        with open_media_llm(tmp_path, dtype=dtype, block_size=16, **SIZES) as llm:
            alone = [answers(llm, [prompt], GREEDY)[0] for prompt in prompts]
            assert not any(output.num_cached_tokens for output in alone)
            expected = [output.outputs[0] for output in alone]
            together = answers(llm, prompts, GREEDY)
            again = answers(llm, prompts, GREEDY, is_cached=True)
            assert all(output.num_cached_tokens for output in again)
            for one, *others in zip(expected, together, again, strict=True):
                for other in others:
                    same(one, other.outputs[0], limit)
            before = num_preemptions(llm)
            longest = max(len(output.prompt_token_ids or ()) for output in alone)
            for params in (GREEDY, MOST_LIKELY):
                with few_blocks(llm, longest + 9):
                    outputs = answers(llm, prompts, params, is_cached=True)
                for one, output in zip(expected, outputs, strict=True):
                    for each in output.outputs:
                        same(one, each, limit)
            check_computed_again(llm, prompts, expected, limit)
            assert num_preemptions(llm) > before
