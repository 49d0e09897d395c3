"""Decoders that make vectors and classes: checkpoints without a head for text, or with another one,
compared with transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_pooling_parity import declare
from tiny_media import make_tokenizer
from tiny_models import COMMON, SIZES, Reference, nightly, open_llm, random_prompts

from pegboard import LLM, SamplingParams
from pegboard.errors import ConfigError, ModelError, PegboardError

LABELS = 3
LIMITS = {"max_model_len": 64}
PLAIN = {"num_key_value_heads": None}
GPT2 = {**PLAIN, "intermediate_size": None, "n_positions": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaModel": {},
    "MistralModel": {},
    "Qwen2Model": {},
    "Qwen3Model": {"head_dim": 8},
    "Gemma2Model": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "Gemma3TextModel": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 9},
    "GPT2Model": GPT2,
    "GPTNeoXModel": PLAIN,
    "OPTModel": {**PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "BloomModel": PLAIN,
    "MambaModel": {"state_size": 4, "intermediate_size": 64},
    "StableLmModel": {},
    "LlamaForSequenceClassification": {},
    "Qwen3ForSequenceClassification": {"head_dim": 8},
    "GPT2ForSequenceClassification": GPT2,
    "JambaForSequenceClassification": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
    "CohereModel": {"logit_scale": 0.3},
}
"""Architectures whose checkpoints lack the first part of each name, or have a head `score`. Some
scale the logits of text, which classes must not be."""
RARE = ("MistralModel", "Qwen2Model", "Qwen3Model", "Gemma2Model", "GPTNeoXModel", "OPTModel")
RARE += ("BloomModel", "MambaModel", "CohereModel", "Qwen3ForSequenceClassification")


def write(folder: Path, architecture: str, **values: Any) -> Reference:
    """Write a random checkpoint of any class of transformers."""
    kind = getattr(transformers, architecture)
    chosen = {**COMMON, **SIZES, **CONFIGS.get(architecture, {}), **values}
    chosen = {"num_labels": LABELS, **chosen}
    config = kind.config_class(
        **{name: value for name, value in chosen.items() if value is not None}
    )
    torch.manual_seed(7)
    model = kind(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return Reference(folder, model)


def true_of(reference: Reference, prompt: list[int]) -> torch.Tensor:
    """Return what transformers makes of a prompt: a normalized state, or probabilities."""
    with torch.no_grad():
        output = reference.model(torch.tensor([prompt]))
    if hasattr(output, "logits"):
        probabilities: torch.Tensor = output.logits[0].softmax(-1)
        return probabilities
    state: torch.Tensor = output.last_hidden_state[0, -1]
    return state / state.norm()


def results_of(llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    if llm.llm_engine.plan.pooling.makes == "classify":
        classes = llm.classify(prompts, use_tqdm=False)
        return [torch.tensor(output.outputs.probs) for output in classes]
    vectors = llm.embed(prompts, use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in vectors]


@pytest.mark.parametrize("architecture", nightly(CONFIGS, *RARE))
def test_results_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    reference = write(tmp_path, architecture)
    prompts = random_prompts((5, 17, 33))
    with open_llm(reference.directory, **LIMITS, mamba_block_size=8) as llm:
        for prompt, result in zip(prompts, results_of(llm, prompts), strict=True):
            assert (result - true_of(reference, prompt)).abs().max() < 1e-5


def test_a_head_of_two_layers(tmp_path: Path) -> None:
    """As reward models have it. There is one value."""
    reference = write(tmp_path, "Qwen2ForSequenceClassification", num_labels=1)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    generator = torch.Generator().manual_seed(1)
    width = SIZES["hidden_size"]
    for name, shape in (
        ("score.0.weight", (width, width)),
        ("score.0.bias", (width,)),
        ("score.2.weight", (1, width)),
        ("score.2.bias", (1,)),
    ):
        tensors[name] = torch.randn(shape, generator=generator) * 0.3
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = random_prompts((5, 17))
    with open_llm(tmp_path, **LIMITS) as llm:
        results = results_of(llm, prompts)
    for prompt, result in zip(prompts, results, strict=True):
        with torch.no_grad():
            state = reference.model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
            inner = (tensors["score.0.weight"] @ state + tensors["score.0.bias"]).relu()
            true = tensors["score.2.weight"] @ inner + tensors["score.2.bias"]
        assert (result - true.sigmoid()).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("config", "make"),
    [
        pytest.param(
            {"classifier_from_token": ["w3", "w9"], "is_original_qwen3_reranker": True},
            lambda logits: (logits[9] - logits[3]).sigmoid()[None],
            id="two ways",
        ),
        pytest.param(
            {"classifier_from_token": ["w5"], "method": "no_post_processing"},
            lambda logits: logits[5].sigmoid()[None],
            id="one token",
        ),
        pytest.param(
            {"classifier_from_token": ["w3", "w9", "w20"]},
            lambda logits: logits[[3, 9, 20]].softmax(-1),
            id="classes",
        ),
    ],
)
def test_values_that_are_logits_of_tokens(
    config: dict[str, Any], make: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """As Qwen3-Reranker and rerankers from Gemma score. The logits are scaled as those of text."""
    reference = write(tmp_path, "CohereForCausalLM", num_labels=2)
    make_tokenizer(["<image>"], "<image>").save_pretrained(tmp_path)
    overrides = {"architectures": ["CohereForSequenceClassification"], **config}
    with open_llm(tmp_path, **LIMITS, hf_overrides=overrides, skip_tokenizer_init=False) as llm:
        (result,) = results_of(llm, [[7, 8, 30]])
        true = make(reference.model(torch.tensor([[7, 8, 30]])).logits[0, -1].detach())
        assert (result - true).abs().max() < 1e-5
        if len(true) == 1:
            (scored,) = llm.score("w7 w8", "w30", use_tqdm=False)
            assert scored.prompt_token_ids == [7, 8, 30]
            assert abs(scored.outputs.score - float(true)) < 1e-5


def test_what_makes_a_model_pool(tmp_path: Path) -> None:
    """The user's settings, or the files of sentence-transformers."""
    reference = write(tmp_path, "LlamaForCausalLM")
    prompts = random_prompts((9,))
    with torch.no_grad():
        state = reference.model.model(torch.tensor(prompts)).last_hidden_state[0, -1]
    with open_llm(tmp_path, **LIMITS, convert="embed") as llm:
        assert (results_of(llm, prompts)[0] - state / state.norm()).abs().max() < 1e-5
    declare(tmp_path, "lasttoken", "Pooling", "Normalize")
    with open_llm(tmp_path, **LIMITS) as llm:
        assert (results_of(llm, prompts)[0] - state / state.norm()).abs().max() < 1e-5
    for settings in ({"runner": "generate"}, {"convert": "none"}):
        with open_llm(tmp_path, **LIMITS, **settings) as llm:
            assert llm.llm_engine.plan.pooling is None
    with pytest.raises(ModelError, match=r"has no head for classes; expected a tensor score\.w"):
        open_llm(tmp_path, **LIMITS, convert="classify")
    with pytest.raises(ConfigError, match="convert 'embed' has no effect on runner 'generate'"):
        open_llm(tmp_path, **LIMITS, convert="embed", runner="generate")


def test_what_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "base", "LlamaModel")
    for settings, message in (
        ({"runner": "generate"}, "LlamaModel generates no text"),
        ({"convert": "none"}, "no installed model plugin serves LlamaModel itself"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_llm(tmp_path / "base", **LIMITS, **settings)
    write(tmp_path / "classes", "LlamaForCausalLM")
    make_tokenizer(["<image>"], "<image>").save_pretrained(tmp_path / "classes")
    for config, message in (
        ({"classifier_from_token": "yes"}, "expected a list of tokens"),
        ({"classifier_from_token": ["w1"], "method": "best"}, "method is 'best'"),
        (
            {"classifier_from_token": ["w1"], "method": "from_2_way_softmax"},
            "takes two tokens in classifier_from_token",
        ),
        ({"classifier_from_token": ["nothing"]}, "'nothing' is not one token"),
    ):
        with pytest.raises(PegboardError, match=message):
            open_llm(
                tmp_path / "classes",
                **LIMITS,
                convert="classify",
                hf_overrides=config,
                skip_tokenizer_init=False,
            )


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "LlamaModel", "LlamaForSequenceClassification"]
)
def test_model_impl_chooses_whose_code_runs(architecture: str, tmp_path: Path) -> None:
    """Also under vLLM's names for transformers' code."""
    reference = write(tmp_path, architecture)
    (prompt,) = random_prompts((17,))
    name = {"architectures": ["TransformersForCausalLM"]}
    ways = [{"model_impl": "transformers"}, {"model_impl": "vllm"}]
    if architecture == "LlamaForCausalLM":
        ways.append({"hf_overrides": name})
    for settings in ways:
        with open_llm(tmp_path, **LIMITS, runner="auto", **settings) as llm:
            used = type(llm.apply_model(lambda model: model)[0]).__module__
            assert ("transformers" in used) == (settings != {"model_impl": "vllm"})
            if architecture == "LlamaForCausalLM":
                params = SamplingParams(temperature=0, max_tokens=4)
                (answer,) = llm.generate([prompt], params, use_tqdm=False)
                tokens = answer.outputs[0].token_ids
                logits = reference.model(torch.tensor([[*prompt, *tokens]])).logits[0]
                assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
            else:
                (result,) = results_of(llm, [prompt])
                assert (result - true_of(reference, prompt)).abs().max() < 1e-5


def test_own_code_that_is_not_installed(tmp_path: Path) -> None:
    write(tmp_path, "DiffLlamaForCausalLM")
    with pytest.raises(ConfigError, match="has code of its own for DiffLlamaForCausalLM"):
        open_llm(tmp_path, **LIMITS, model_impl="vllm")
