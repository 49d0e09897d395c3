"""Decoders whose tokens attend to all of the prompt, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_converted_models import results_of, write
from test_pooling_parity import declare
from test_token_results import normalized, states_of
from tiny_models import nightly, open_llm, random_prompts

from pegboard.errors import ConfigError, ModelError, PegboardError

GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9, "num_hidden_layers": 3}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
BOTH = {"use_bidirectional_attention": True}
LIMITS = {"max_model_len": 40, "max_num_batched_tokens": 80}
PROMPTS = (5, 17, 33)


@pytest.mark.parametrize("window", nightly([9, 8, 3], 8, 3))
def test_gemma_with_windows(window: int, tmp_path: Path) -> None:
    """As EmbeddingGemma. Windows are shorter than the prompts."""
    reference = write(tmp_path, "Gemma3TextModel", **{**GEMMA, **BOTH, "sliding_window": window})
    declare(tmp_path, "mean_tokens", "Pooling", "Normalize")
    prompts = random_prompts(PROMPTS)
    with open_llm(tmp_path, **LIMITS) as llm:
        assert not llm.llm_engine.plan.settings.engine.enable_chunked_prefill
        results = results_of(llm, prompts)
        (alone,) = results_of(llm, prompts[1:2])
    for prompt, result in zip([*prompts, prompts[1]], [*results, alone], strict=True):
        true = normalized(states_of(reference, prompt).mean(0))
        assert (result - true).abs().max() < 1e-5


@pytest.mark.parametrize(
    "architecture",
    nightly(["MistralModel", "Qwen2Model", "Qwen3Model"], "Qwen2Model", "Qwen3Model"),
)
def test_a_config_that_is_not_causal(architecture: str, tmp_path: Path) -> None:
    """Mistral has a window, which transformers lets reach so many tokens to each side."""
    more = {"head_dim": 8} if architecture == "Qwen3Model" else {}
    more |= {"sliding_window": 7} if architecture == "MistralModel" else {}
    reference = write(tmp_path, architecture, is_causal=False, **more)
    prompts = random_prompts(PROMPTS)
    with open_llm(tmp_path, **LIMITS) as llm:
        results = results_of(llm, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        assert (result - normalized(states_of(reference, prompt)[-1])).abs().max() < 1e-5


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_names_of_nvidia(head: str, tmp_path: Path) -> None:
    """Their configs do not say that the model is not causal, but name the pooling."""
    reference = write(tmp_path, f"Llama{head}", is_causal=False, num_labels=1)
    prompts = random_prompts(PROMPTS)
    overrides: dict[str, Any] = {"architectures": [f"LlamaBidirectional{head}"], "is_causal": None}
    with open_llm(tmp_path, **LIMITS, hf_overrides={**overrides, "pooling": "avg"}) as llm:
        results = results_of(llm, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        true = states_of(reference, prompt).mean(0)
        if head == "Model":
            assert (result - normalized(true)).abs().max() < 1e-5
        else:
            value = reference.model.score(true).detach()
            assert (result - value.sigmoid()).abs().max() < 1e-5
    with pytest.raises(ModelError, match="pooling is 'best'; expected avg, cls, last"):
        open_llm(tmp_path, **LIMITS, hf_overrides={**overrides, "pooling": "best"})


def test_what_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "gemma", "Gemma3ForCausalLM", **GEMMA, **BOTH)
    with pytest.raises(PegboardError, match="use_bidirectional_attention=True"):
        open_llm(tmp_path / "gemma", **LIMITS)
    with pytest.raises(ConfigError, match="enable_prefix_caching is not possible with this model"):
        open_llm(tmp_path / "gemma", **LIMITS, convert="embed", enable_prefix_caching=True)
    write(tmp_path / "mamba", "MambaModel", state_size=4, intermediate_size=64)
    with pytest.raises(ConfigError, match="layers whose tokens cannot see those after them"):
        open_llm(tmp_path / "mamba", **LIMITS, hf_overrides={"is_causal": False})
