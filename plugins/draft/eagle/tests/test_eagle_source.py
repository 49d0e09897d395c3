"""Which heads are read, and for which model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pegboard_draft_eagle.source import eagle, eagle3

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_testing.fake_parts import tiny_checkpoint


def head(tmp_path: Any, architecture: str = "LlamaForCausalLM", **config: Any) -> Checkpoint:
    whole = tiny_checkpoint(tmp_path)
    return replace(whole, architectures=(architecture,), config={"hidden_size": 32, **config})


@pytest.mark.parametrize(
    ("method", "name", "known"),
    [
        (eagle, "LlamaForCausalLM", "EagleLlamaForCausalLM"),
        (eagle, "EagleLlamaForCausalLM", "EagleLlamaForCausalLM"),
        (eagle, "Llama4ForCausalLM", "EagleLlama4ForCausalLM"),
        (eagle, "MiniCPMForCausalLM", "EagleMiniCPMForCausalLM"),
        (eagle, "EagleMistralLarge3ForCausalLM", "EagleMistralLarge3ForCausalLM"),
        (eagle3, "LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
        (eagle3, "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3"),
    ],
)
def test_names_of_architectures(tmp_path: Any, method: Any, name: str, known: str) -> None:
    target = head(tmp_path, num_hidden_layers=8)
    source = method(target, head(tmp_path, name))
    assert source.checkpoint.architectures == (known,)
    assert source.checkpoint.config["architectures"] == [known]
    assert source.checkpoint.config["target_hidden_size"] == target.config["hidden_size"]
    assert source.taps == (() if method is eagle else (2, 4, 5))
    with pytest.raises(ConfigError, match="set spec_model"):
        method(target, None)


def test_depths_of_a_head(tmp_path: Any) -> None:
    target = head(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelError, match="this one has 4 layers; name the layers"):
        eagle3(target, head(tmp_path))
    key = "eagle_aux_hidden_state_layer_ids"
    named = head(tmp_path, eagle_config={key: [1, 2, 3]})
    assert eagle3(target, named).taps == (1, 2, 3)
    with pytest.raises(ModelError, match="expected a list of layers"):
        eagle3(target, head(tmp_path, eagle_config={key: "1"}))


def test_a_head_for_another_model(tmp_path: Any) -> None:
    target = head(tmp_path)
    size = target.config["hidden_size"]
    with pytest.raises(ModelError, match=f"of size {size + 1}, and those of .* have {size}"):
        eagle(target, head(tmp_path, hidden_size=size + 1))
