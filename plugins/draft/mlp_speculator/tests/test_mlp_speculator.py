"""The source of MLP speculators: its values, and what does not fit a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pegboard_draft_mlp_speculator.source import source

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry

TARGET = {"hidden_size": 32, "vocab_size": 100}
CONFIG = {"emb_dim": 32, "inner_dim": 48, "vocab_size": 100, "n_predict": 3}


def checkpoint(config: dict[str, Any], name: str = "head") -> Checkpoint:
    return Checkpoint(
        format="safetensors",
        path=Path(name),
        config=config,
        architectures=(),
        tensors={},
        tokenizer=TokenizerPayload("hf"),
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("draft", "mlp_speculator"), ("model", "MLPSpeculatorPreTrainedModel")]
)
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, name))


@pytest.mark.parametrize(
    "config", [CONFIG, {**CONFIG, "inner_dim": 0}, {**CONFIG, "emb_dim": None}]
)
def test_values(config: dict[str, Any]) -> None:
    if config["emb_dim"] is None:
        config = {**config, "hidden_size": 32}
        del config["emb_dim"]
    speculator = source(checkpoint({"text_config": TARGET}), checkpoint(config)).checkpoint
    assert speculator.architectures == ("MLPSpeculatorPreTrainedModel",)
    assert speculator.config["emb_dim"] == 32
    assert speculator.config["inner_dim"] == (config["inner_dim"] or 32)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"emb_dim": 64}, "head reads hidden states of size 64, and target has 32"),
        ({"vocab_size": 90}, "head has a vocabulary of size 90, and target has 100"),
        ({"n_predict": None}, "n_predict=None, and an MLP speculator needs a whole number above 0"),
        ({"n_predict": 0}, "n_predict=0"),
        ({"emb_dim": "32"}, "emb_dim='32'"),
        ({"inner_dim": -4}, "inner_dim=-4"),
    ],
)
def test_speculators_that_do_not_fit(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        source(checkpoint(TARGET, "target"), checkpoint({**CONFIG, **changed}))


def test_no_speculator() -> None:
    with pytest.raises(ConfigError, match="the method mlp_speculator needs a head: set spec_model"):
        source(checkpoint(TARGET), None)
