"""Every architecture that generates text, with what an engine does beside computing: requests that
are preempted, prefixes from the cache, and two answers to a prompt, in float32 and in bfloat16.
The tokens are those of the same engine with each request alone, which the other tests compare with
transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_default_dtype import FALLBACK, OWN
from test_fallback_parity import UNKNOWN
from test_gemma3n_parity import CASES as GEMMA_3N
from tiny_models import open_llm, random_prompts

from pegboard import LLM, SamplingParams
from pegboard.data.output import CompletionOutput
from pegboard.engine.kv.plan import blocks_per_request

Write = Callable[..., Any]
Row = Callable[[Write, Path], Path]
"""Writes a checkpoint, and returns its folder."""


def written(model_type: str, config: dict[str, Any]) -> Row:
    return lambda write, folder: write(model_type, **config).directory


ROWS: dict[str, Row] = {
    **{name: written(*row) for name, row in OWN.items()},
    **{f"gemma3n, {name}": written("gemma3n_text", row) for name, row in GEMMA_3N.items()},
}
THROUGH_TRANSFORMERS: dict[str, Row] = {name: written(*row) for name, row in FALLBACK.items()}
CASES = [*((name, True) for name in ROWS), *((name, False) for name in THROUGH_TRANSFORMERS)]

PROMPTS = random_prompts((44, 3, 46, 45))
COMMON = {"max_tokens": 9, "logprobs": 2, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(temperature=0, **COMMON)
MOST_LIKELY = {"temperature": 1.0, "top_k": 1}
SEED = 5


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("name", "own"), CASES)
def test_row(write: Write, tmp_path: Path, name: str, own: bool) -> None:
    directory = (ROWS if own else THROUGH_TRANSFORMERS)[name](write, tmp_path)
    settings = {} if own else UNKNOWN
    for dtype in ("float32", "bfloat16"):
        with open_llm(
            directory,
            dtype=dtype,
            block_size=16,
            mamba_block_size=16,
            max_model_len=64,
            max_num_batched_tokens=24,
            max_num_seqs=4,
            **settings,
        ) as llm:
            check_preempted(llm)
            check_prefixes(llm)
            check_two_answers(llm)


def answers(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams, is_cached: bool = False
) -> list[Any]:
    if not is_cached:
        assert llm.reset_prefix_cache()
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def alone(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> CompletionOutput:
    (output,) = answers(llm, [prompt], params)
    assert not output.num_cached_tokens
    return output.outputs[0]


def same(one: CompletionOutput, other: CompletionOutput) -> None:
    assert list(one.token_ids) == list(other.token_ids)


@contextmanager
def few_blocks(llm: LLM) -> Iterator[None]:
    """Leave free what one request and a half need."""
    kv = llm.llm_engine.engine._live.kv
    needed = blocks_per_request(kv.plan, 64, 24)
    held = kv.pool.take(kv.pool.num_free - needed * 3 // 2)
    yield
    kv.pool.free(held)


def check_preempted(llm: LLM) -> None:
    expected = [alone(llm, prompt) for prompt in PROMPTS]
    before = llm.llm_engine.engine.stats()["num_preemptions_total"]
    assert llm.reset_prefix_cache()
    with few_blocks(llm):
        outputs = answers(llm, PROMPTS, GREEDY, is_cached=True)
    for one, output in zip(expected, outputs, strict=True):
        same(one, output.outputs[0])
    assert llm.llm_engine.engine.stats()["num_preemptions_total"] > before


def check_prefixes(llm: LLM) -> None:
    first = PROMPTS[2]
    second = [*first[:37], *range(50, 58)]
    expected = [alone(llm, prompt) for prompt in (first, second)]
    (filling,) = answers(llm, [first], GREEDY)
    assert not filling.num_cached_tokens
    outputs = [answers(llm, [prompt], GREEDY, is_cached=True)[0] for prompt in (first, second)]
    for one, output in zip(expected, outputs, strict=True):
        assert output.num_cached_tokens
        same(one, output.outputs[0])


def check_two_answers(llm: LLM) -> None:
    for prompt in PROMPTS[:2]:
        one = alone(llm, prompt)
        (output,) = answers(llm, [prompt], SamplingParams(n=2, **MOST_LIKELY, **COMMON))
        for each in output.outputs:
            same(one, each)
        expected = [
            alone(llm, prompt, SamplingParams(seed=SEED + index, **COMMON)) for index in range(2)
        ]
        (output,) = answers(llm, [prompt], SamplingParams(n=2, seed=SEED, **COMMON))
        for wanted, each in zip(expected, output.outputs, strict=True):
            same(wanted, each)
