"""The layer of Qwen3-Next that predicts one token more, alone: the engine has no drafts for models
whose layers have states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pegboard_model_mamba.prediction import Qwen3NextMTP
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE
from tiny_predictors import block_of
from torch import Tensor

from pegboard import LLM
from pegboard.errors import ConfigError
from pegboard_testing.fake_build import fake_build, load_layers

HIDDEN = 32
CONFIG = {
    "head_dim": 16,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


class Target:
    """A model whose embedding and head are shared."""

    def __init__(self, table: Tensor, head: Tensor) -> None:
        self.table = table
        self.head = head

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.table[input_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of one text, [T, heads · size]."""
    queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, enable_gqa=True
    )
    return out.transpose(0, 1).flatten(1)


@pytest.fixture
def reference(write: Callable[..., Any]) -> Any:
    return write("qwen3_next", **CONFIG)


@pytest.fixture
def tensors(reference: Any) -> dict[str, Tensor]:
    """Those of the prediction, in the published layout."""
    stored = load_file(reference.directory / "model.safetensors")
    at = "model.layers.0."
    layer = {name.replace(at, "mtp.layers.0."): x for name, x in stored.items() if at in name}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    parts = {f"mtp.{name}.weight": torch.randn(HIDDEN) * 0.2 for name in norms}
    return {**layer, **parts, "mtp.fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) * 0.2}


def test_states_and_logits_are_those_of_the_formula(
    reference: Any, tensors: dict[str, Tensor]
) -> None:
    model = reference.model
    table = model.model.embed_tokens.weight.data
    head = model.lm_head.weight.data
    config = {**model.config.to_dict(), **CONFIG}
    build = fake_build(stored=tensors.keys(), target=Target(table, head))
    prediction = Qwen3NextMTP(config, build)
    build.attention[0] = attend
    assert load_layers(build.declared.layers, tensors) == tensors.keys()
    ids = torch.randint(3, VOCAB_SIZE, (9,))
    given = torch.randn(9, HIDDEN)
    states = prediction(prediction.embed(ids, prediction.start(given)), torch.arange(9))

    def normed(x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        return x * scale * (1 + tensors[f"mtp.{name}.weight"])

    halves = [normed(table[ids], "pre_fc_norm_embedding"), normed(given, "pre_fc_norm_hidden")]
    joined = torch.cat(halves, -1) @ tensors["mtp.fc.weight"].T
    with torch.no_grad():
        out = block_of(model, model.model.layers[0])(joined[None])[0]
    expected = normed(out, "norm")
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prediction.logits(states), expected @ head.T, rtol=1e-4, atol=1e-3)


def test_the_engine_refuses_it(
    write: Callable[..., Any], tensors: dict[str, Tensor], open_llm: Callable[..., LLM]
) -> None:
    types = ["linear_attention", "full_attention"]
    target = write(
        "qwen3_next", "target", **{**CONFIG, "num_hidden_layers": 2, "layer_types": types}
    )
    path = target.directory / "model.safetensors"
    save_file({**load_file(path), **tensors}, path, {"format": "pt"})
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    with pytest.raises(ConfigError, match="layers with states, .*remove spec_method"):
        open_llm(target.directory, speculative_config=drafts)
