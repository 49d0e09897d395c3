"""Every architecture that generates text, with what an engine does beside computing: requests that
are preempted, prefixes from the cache, and two answers to a prompt, in float32 and in bfloat16.
The tokens are those of the same engine with each request alone, which the other tests compare with
transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import pytest
from test_default_dtype import FALLBACK, OWN
from test_dense_families import FORMULAS, TWINS, write_formulas, write_jais, write_ouro, write_twin
from test_fallback_parity import NARROW, UNKNOWN
from test_formulas import MODELS, Plamo2, write_model
from test_gemma3n_parity import CASES as GEMMA_3N
from test_griffin_parity import CONFIGS as GRIFFIN
from test_latent_parity import kimi_of, pangu_of
from test_mistral_format import write as write_params
from test_rwkv_parity import CONFIGS as RWKV
from test_state_parity import ARCHITECTURES as STATES
from tiny_models import open_llm, random_prompts

from pegboard import LLM, SamplingParams
from pegboard.data.output import CompletionOutput
from pegboard.engine.kv.plan import blocks_per_request

Write = Callable[..., Any]
Prompts = Sequence[list[int]]
Row = Callable[[Write, Path], Any]
"""Writes a checkpoint to its own folder, or to this one. Returns its reference."""


def written(model_type: str, config: dict[str, Any]) -> Row:
    return lambda write, folder: write(model_type, **config)


def twin(name: str) -> Row:
    return lambda write, folder: write_twin(write, name, folder)


def formulas(name: str) -> Row:
    return lambda write, folder: write_formulas(name, folder)


def formulas_of(name: str, model: Callable[[], Any]) -> Row:
    return lambda write, folder: write_model(name, model(), folder)


MISTRAL = "MistralLarge3ForCausalLM"
"""Its checkpoint is in Mistral's own format."""
ROWS: dict[str, Row] = {
    **{name: written(*row) for name, row in OWN.items()},
    **{f"gemma3n, {name}": written("gemma3n_text", row) for name, row in GEMMA_3N.items()},
    **{name: twin(name) for name in TWINS},
    **{name: formulas(name) for name in FORMULAS},
    **{name: formulas_of(name, model) for name, model in MODELS.items()},
    "Plamo2ForCausalLM": formulas_of("Plamo2ForCausalLM", Plamo2),
    "JAISLMHeadModel": lambda write, folder: write_jais(folder),
    "OuroForCausalLM": lambda write, folder: write_ouro(folder),
    "kimi_linear": lambda write, folder: kimi_of(write, max_position_embeddings=512),
    **{name: written("recurrent_gemma", config) for name, config in GRIFFIN.items()},
    **{name: written("rwkv", config) for name, config in RWKV.items()},
    MISTRAL: lambda write, folder: write_params(folder, "latent attention"),
    "pangu": lambda write, folder: pangu_of(write, sandwich=False),
    "pangu, more norms": lambda write, folder: pangu_of(write, sandwich=True),
}
THROUGH_TRANSFORMERS: dict[str, Row] = {name: written(*row) for name, row in FALLBACK.items()}
CASES = [*((name, True) for name in ROWS), *((name, False) for name in THROUGH_TRANSFORMERS)]
"""(name, whether the model has code of its own; otherwise transformers' modules run)"""

LARGE_BLOCKS = {
    *STATES,
    *GRIFFIN,
    *RWKV,
    "DeciLMForCausalLM",
    "kimi_linear",
    "mimo_v2_flash, sinks in some layers",
}
"""Blocks of all groups have equal bytes. Beside states, and beside layers with more heads, those of
a layer hold up to 80 tokens, so the texts are longer."""
FLOAT32_ONLY = {"mimo_v2_flash, sinks in some layers"}
"""In bfloat16, tokens that are drawn differ: other rounding in another batch moves the
probabilities that a draw falls between. The most likely tokens are equal."""
CHUNK = 24
NUM_PROMPTS = 4
COMMON = {"max_tokens": 9, "logprobs": 2, "ignore_eos": True, "detokenize": False}
GREEDY = SamplingParams(temperature=0, **COMMON)
MOST_LIKELY = SamplingParams(n=2, temperature=1.0, top_k=1, **COMMON)
SEED = 5
LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
"""Type → how far logprobs may differ. Those of recorded models have the same bits in every batch.
Torch's products round bfloat16 in their own way for each number of rows."""


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "own"), CASES)
def test_row(write: Write, tmp_path: Path, name: str, own: bool) -> None:
    reference = (ROWS if own else THROUGH_TRANSFORMERS)[name](write, tmp_path / "row")
    settings: dict[str, Any] = {"max_model_len": 64} if own else {"max_model_len": 64, **UNKNOWN}
    if name in LARGE_BLOCKS:
        settings = {"max_model_len": 320, "hf_overrides": {"max_position_embeddings": 512}}
    if name == MISTRAL:
        settings["load_format"] = "mistral"
    if name in NARROW:
        settings["attention_backend"] = "cpu_paged"
    for dtype, limit in LIMITS.items():
        if name in FLOAT32_ONLY and dtype != "float32":
            continue
        with open_llm(
            reference.directory,
            dtype=dtype,
            block_size=16,
            mamba_block_size=16,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=NUM_PROMPTS,
            **settings,
        ) as llm:
            prompts = prompts_for(llm)
            expected = [alone(llm, prompt) for prompt in prompts]
            check_few_blocks(llm, prompts, expected, limit)
            check_computed_again(llm, prompts, expected, limit)
            check_prefixes(llm, prompts, expected, limit)
            check_two_answers(llm, prompts, expected, limit)


def size_of_blocks(llm: LLM) -> int:
    return max(group.block_size for group in llm.llm_engine.engine._live.kv.plan.groups)


def prompts_for(llm: LLM) -> list[list[int]]:
    """Return prompts of nearly three blocks, so that each needs one more for its outputs, and a
    short one."""
    size = 3 * size_of_blocks(llm)
    return random_prompts((size - 4, 3, size - 2, size - 3))


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


def same(one: CompletionOutput, other: CompletionOutput, limit: float) -> None:
    """The tokens are equal. If one was chosen by less than `limit`, the rest may differ."""
    tokens = zip(one.token_ids, other.token_ids, strict=True)
    for position, (token, another) in enumerate(tokens):
        row = {key: value.logprob for key, value in one.logprobs[position].items()}
        if token != another and abs(row[token] - row.get(another, -inf)) < limit:
            return
        assert token == another, f"output {position} is {another}, alone it is {token}"
        assert abs(row[token] - other.logprobs[position][token].logprob) < limit


def num_preemptions(llm: LLM) -> int:
    count: int = llm.llm_engine.engine.stats()["num_preemptions_total"]
    return count


@contextmanager
def few_blocks(llm: LLM, num_tokens: int) -> Iterator[None]:
    """Leave free what one request of so many tokens and a half need."""
    assert llm.reset_prefix_cache()
    kv = llm.llm_engine.engine._live.kv
    needed = blocks_per_request(kv.plan, num_tokens, CHUNK)
    held = kv.pool.take(kv.pool.num_free - needed * 3 // 2)
    assert held is not None
    yield
    kv.pool.free(held)


def holds_only_states(llm: LLM) -> bool:
    """Whether a request needs no more blocks for its outputs, so that it waits for its first one
    but is never preempted."""
    groups = llm.llm_engine.engine._live.kv.plan.groups
    return all(group.spec.unit == "request" for group in groups)


def check_few_blocks(
    llm: LLM, prompts: Prompts, expected: Sequence[CompletionOutput], limit: float
) -> None:
    """Of single answers and of pairs that share their prompts."""
    before = num_preemptions(llm)
    for params in (GREEDY, MOST_LIKELY):
        with few_blocks(llm, len(prompts[2]) + 9):
            outputs = answers(llm, prompts, params, is_cached=True)
        for one, output in zip(expected, outputs, strict=True):
            for each in output.outputs:
                same(one, each, limit)
    assert num_preemptions(llm) > before or holds_only_states(llm)


def check_computed_again(
    llm: LLM, prompts: Prompts, expected: Sequence[CompletionOutput], limit: float
) -> None:
    """All requests lose what they have computed, some of them in the middle of their outputs."""
    assert llm.reset_prefix_cache()
    engine = llm.llm_engine
    before = num_preemptions(llm)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
    results: dict[str, CompletionOutput] = {}
    num_resets = 0
    while engine.has_unfinished_requests():
        results |= {output.request_id: output.outputs[0] for output in engine.step()}
        longest = max((len(each.token_ids) for each in results.values()), default=0)
        if num_resets < 2 and longest > 4 * num_resets:
            assert llm.reset_prefix_cache(reset_running_requests=True)
            num_resets += 1
    for number, one in enumerate(expected):
        same(one, results[str(number)], limit)
    assert num_preemptions(llm) > before + 1


def check_prefixes(
    llm: LLM, prompts: Prompts, expected: Sequence[CompletionOutput], limit: float
) -> None:
    """The whole prompt, and another with the same first tokens, after the first."""
    first = prompts[2]
    second = [*first[: 2 * size_of_blocks(llm) + 5], *range(50, 58)]
    changed = alone(llm, second)
    (filling,) = answers(llm, [first], GREEDY)
    assert not filling.num_cached_tokens
    for prompt, one in ((first, expected[2]), (second, changed)):
        (output,) = answers(llm, [prompt], GREEDY, is_cached=True)
        assert output.num_cached_tokens
        same(one, output.outputs[0], limit)


def check_two_answers(
    llm: LLM, prompts: Prompts, expected: Sequence[CompletionOutput], limit: float
) -> None:
    """The most likely tokens twice, and those that separate requests draw from the seed and from
    the next one."""
    outputs = answers(llm, prompts, MOST_LIKELY)
    for one, output in zip(expected, outputs, strict=True):
        for each in output.outputs:
            same(one, each, limit)
    for prompt in prompts[:2]:
        drawn = [
            alone(llm, prompt, SamplingParams(seed=SEED + index, **COMMON)) for index in range(2)
        ]
        assert list(drawn[0].token_ids) != list(drawn[1].token_ids)
        (output,) = answers(llm, [prompt], SamplingParams(n=2, seed=SEED, **COMMON))
        for one, each in zip(drawn, output.outputs, strict=True):
            same(one, each, limit)
