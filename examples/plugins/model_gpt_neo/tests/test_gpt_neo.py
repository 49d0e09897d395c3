"""The contract of models, with transformers as the other implementation, and the tokens of an
engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from pegboard_model_gpt_neo.model import GPTNeo
from torch import Tensor

from pegboard import LLM, SamplingParams
from pegboard.interfaces.model import Model
from pegboard.layers import Build
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_model import ModelContract

transformers = pytest.importorskip("transformers")

CONFIG: dict[str, Any] = {
    "architectures": ["GPTNeoForCausalLM"],
    "model_type": "gpt_neo",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "attention_types": [[["global"], 1], [["local", "global"], 1]],
    "window_size": 4,
    "max_position_embeddings": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
PROMPTS = [[7, 30, 11, 2, 30, 18, 5, 9, 33], [1], [4, 4, 4, 21]]
NUM_TOKENS = 12


def reference(**more: object) -> Any:
    """Return transformers' module with random weights, the same in each call. No norm is the
    identity and no bias is zero."""
    torch.manual_seed(0)
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**{**CONFIG, **more})).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                tensor.normal_(float("ln" in name and name.endswith("weight")), 0.2)
    return model


def test_contract() -> None:
    check_entry(installed_entry("model", "GPTNeoForCausalLM"))


class TestGPTNeo(ModelContract):
    config = CONFIG
    wrong_values = {
        "hidden_size": 30,
        "num_heads": "4",
        "vocab_size": None,
        "activation_function": "relu",
        "attention_types": [[["global"], 2]],
        "num_layers": 4,
    }

    def model(self, config: Mapping[str, Any], build: Build) -> Model:
        return GPTNeo(config, build)

    def checkpoint(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in reference().named_parameters()}

    def logits(self, weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        model = reference()
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            return model(ids[None]).logits[0]


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_an_engine_gives_the_tokens_of_transformers(tmp_path: Path, is_tied: bool) -> None:
    model = reference(tie_word_embeddings=is_tied)
    model.save_pretrained(tmp_path)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 32}
    # prompts are computed in chunks of 5 tokens
    with LLM(
        str(tmp_path), dtype="float32", max_num_batched_tokens=5, max_num_seqs=3, **settings
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
