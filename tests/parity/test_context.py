"""Models whose tokens are shared out among ranks compute what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_kv_connectors import PROMPTS, generate
from test_kv_connectors import settings as connector
from test_ranks import HEADS, LATENT, MODELS
from test_state_parity import ARCHITECTURES as STATES
from tiny_models import check_cached, check_parity, divide, nightly, open_llm, random_prompts

from pegboard import SamplingParams
from pegboard.errors import ConfigError, ModelError

Write = Callable[..., Any]
pytestmark = pytest.mark.one_rank  # they divide models themselves

ONE_KEY = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1}
TWO_KEYS = {**ONE_KEY, "num_key_value_heads": 2, "head_dim": 8}
CAPPED = {**TWO_KEYS, "sliding_window": 9}
WINDOWS = {**CAPPED, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
HYBRID = {**STATES["bamba"][1], "num_attention_heads": 4, "num_key_value_heads": 1}
CASES: dict[str, tuple[str, dict[str, Any], int, int, int, int]] = {
    "one KV head": ("llama", ONE_KEY, 2, 2, 1, 1),
    "one KV head, four ranks": ("llama", ONE_KEY, 4, 4, 1, 1),
    "two KV heads, four ranks": ("llama", TWO_KEYS, 4, 2, 1, 1),
    "windows, capped scores": ("gemma2", CAPPED, 4, 2, 1, 1),
    "windows": ("gemma3_text", WINDOWS, 4, 2, 1, 1),
    "latents": ("deepseek_v3", LATENT, 2, 2, 1, 1),
    "rows": ("llama", HEADS, 1, 1, 2, 1),
    "rows of three ranks": ("llama", HEADS, 1, 1, 3, 1),
    "rows with windows": ("gemma3_text", WINDOWS, 1, 1, 2, 1),
    "rows of experts": (*MODELS["experts"], 1, 1, 2, 1),
    "rows of latents": ("deepseek_v3", LATENT, 1, 1, 2, 1),
    "rows and heads": ("llama", HEADS, 2, 1, 2, 1),
    "rows and KV heads": ("llama", ONE_KEY, 2, 2, 2, 1),
    "rows in stages": ("llama", HEADS, 1, 1, 2, 2),
    "KV heads in stages": ("llama", ONE_KEY, 2, 2, 1, 3),
}


def sizes(keys: int, rows: int, run: int = 1) -> dict[str, int]:
    return {
        "decode_context_parallel_size": keys,
        "prefill_context_parallel_size": rows,
        "cp_kv_cache_interleave_size": run,
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", nightly([1, 4], 1))
@pytest.mark.parametrize("name", CASES)
def test_threads(write: Write, monkeypatch: pytest.MonkeyPatch, name: str, run: int) -> None:
    """Prompts, alone and in chunks, requests that are preempted, and common prefixes."""
    kind, values, ranks, keys, rows, stages = CASES[name]
    divide(monkeypatch, ranks, stages, **sizes(keys, rows, run))
    reference = write(kind, **values)
    check_parity(reference, lengths=(6, 17, 1), max_model_len=64)
    check_cached(reference, (32, 20, 32), max_model_len=64, max_num_batched_tokens=9)


def test_layers_with_states(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share out the tokens of the attention layers, and hold heads of the others."""
    divide(monkeypatch, 2, **sizes(2, 1))
    check_parity(write("bamba", **HYBRID), lengths=(6, 17, 1), max_model_len=64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(
            "one KV head", {"tensor_parallel_size": 2, **sizes(2, 1)}, marks=pytest.mark.slow
        ),
        ("latents", {"tensor_parallel_size": 2, **sizes(2, 1, 2)}),
        ("rows", sizes(1, 2)),
    ],
)
def test_processes(write: Write, name: str, settings: dict[str, Any]) -> None:
    """Blocks of 16 are those of the compiled attention."""
    kind, values, *_ = CASES[name]
    reference = write(kind, **values)
    check_parity(reference, lengths=(6, 33), max_model_len=64, block_size=16, **settings)
    check_cached(reference, (32, 40, 32), max_model_len=64, block_size=16, **settings)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["one KV head", "rows"])
def test_tokens_of_one_rank(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str, stored: str
) -> None:
    """With a cache of 8 bits, of which a share fits few requests, drafts, and samples."""
    kind, values, ranks, keys, rows, _ = CASES[name]
    directory = write(kind, dtype=torch.float32, **values).directory
    prompts = [{"prompt_token_ids": ids} for ids in random_prompts((7, 11, 5, 9))]
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=50, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=0.7, top_k=5, seed=4, n=2, max_tokens=9, detokenize=False),
        SamplingParams(temperature=0.0, max_tokens=50, logprobs=2, detokenize=False),
    ]
    settings: dict[str, Any] = {
        "kv_cache_dtype": stored,
        "block_size": 16,
        "num_gpu_blocks_override": 7,
        "max_model_len": 64,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    answers = []
    for is_divided in (False, True):
        if is_divided:
            divide(monkeypatch, ranks, **sizes(keys, rows, 4))
        with open_llm(directory, **settings) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([[each.token_ids for each in out.outputs] for out in outputs])
            assert llm.llm_engine.engine.stats()["num_preemptions_total"] or is_divided
    assert answers[0] == answers[1]


def test_the_same_memory_holds_more_tokens(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write("llama", **ONE_KEY).directory
    settings = {"num_gpu_blocks_override": 12, "max_model_len": 16}
    plans = []
    for keys in (1, 2):
        divide(monkeypatch, 2, **sizes(keys, 1))
        with open_llm(directory, **settings) as llm:
            plans.append(llm.llm_engine.engine._live.kv.plan)
    whole, shared = plans
    assert whole.num_blocks == shared.num_blocks and whole.block_bytes == shared.block_bytes
    assert shared.groups[0].block_size == 2 * whole.groups[0].block_size
    assert whole.identity != shared.identity


@pytest.mark.parametrize("name", ["one KV head", "rows"])
def test_each_rank_saves_and_loads_its_part(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """A second engine loads the prefixes that a first one has saved."""
    kind, values, ranks, keys, rows, _ = CASES[name]
    directory = write(kind, **values).directory
    with open_llm(directory) as llm:
        expected, _ = generate(llm, PROMPTS)
    divide(monkeypatch, ranks, **sizes(keys, rows))
    for is_second in (False, True):
        with open_llm(directory, **connector(tmp_path)) as llm:
            tokens, num_saved = generate(llm, PROMPTS)
        assert tokens == expected and bool(num_saved) == is_second


@pytest.mark.parametrize(
    ("model", "ranks", "settings", "words"),
    [
        (("llama", ONE_KEY), 3, sizes(2, 1), "does not divide tensor_parallel_size=3"),
        (("llama", ONE_KEY), 3, sizes(3, 1), "8 heads with 1 KV heads, divided among 3 ranks"),
        (("llama", HEADS), 2, sizes(2, 1), "the same KV head"),
        (("llama", HEADS), 1, sizes(1, 2, 3), "does not divide block_size=4"),
        (MODELS["experts, sinks"], 1, sizes(1, 2), "has sinks"),
        (("bamba", STATES["bamba"][1]), 1, sizes(1, 2), "layers with states"),
        (("llama", HEADS), 1, {**sizes(1, 2), "enable_lora": True}, "max_loras"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
    model: tuple[str, dict[str, Any]],
    ranks: int,
    settings: dict[str, Any],
    words: str,
) -> None:
    kind, values = model
    divide(monkeypatch, ranks)
    with pytest.raises((ConfigError, ModelError), match=words):
        open_llm(write(kind, **values).directory, **settings)
