"""The source of Medusa heads: its names, its values, and what does not fit a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pegboard_draft_medusa.source import new_name, source

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry, TokenizerPayload
from pegboard_testing.contract_generic import check_entry, installed_entry

TARGET = {"hidden_size": 32, "vocab_size": 100}
SIZES = {"blocks.0.layers.0.weight": (32, 32), "lm_heads.0.weight": (100, 32)}


def checkpoint(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]], name: str = "head"
) -> Checkpoint:
    return Checkpoint(
        format="safetensors",
        path=Path(name),
        config=config,
        architectures=(),
        tensors={
            key: TensorEntry(key, shape, "float32", "model.safetensors", 0, 4)
            for key, shape in shapes.items()
        },
        tokenizer=TokenizerPayload("hf"),
    )


def heads_of(
    config: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None
) -> Checkpoint:
    target = checkpoint(TARGET, {}, "target")
    return source(target, checkpoint(config, SIZES if shapes is None else shapes)).checkpoint


@pytest.mark.parametrize(("kind", "name"), [("draft", "medusa"), ("model", "MedusaModel")])
def test_contract(kind: str, name: str) -> None:
    check_entry(installed_entry(kind, name))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.0.linear.weight", "blocks.0.layers.0.weight"),
        ("medusa_heads.2.1.linear.bias", "blocks.2.layers.1.bias"),
        ("1.1.weight", "lm_heads.1.weight"),
        ("medusa_heads.1.2.weight", "lm_heads.1.weight"),
        ("blocks.0.layers.0.weight", "blocks.0.layers.0.weight"),
        ("token_map", "token_map"),
    ],
)
def test_names_of_both_layouts(old: str, new: str) -> None:
    assert new_name(old) == new


def test_a_config_of_fasterdecoding() -> None:
    """It has no sizes, and may have values of the model. The tensors are found in the file under
    their old names."""
    shapes = {"0.0.linear.weight": (32, 32), "0.1.weight": (100, 32)}
    config = {"medusa_num_heads": 1, "medusa_num_layers": 1, "num_hidden_layers": 32}
    heads = heads_of(config, shapes)
    assert heads.architectures == ("MedusaModel",)
    values = {name: heads.config[name] for name in ("num_heads", "num_hidden_layers", "head_size")}
    assert values == {"num_heads": 1, "num_hidden_layers": 1, "head_size": 100}
    assert {name: entry.key for name, entry in heads.tensors.items()} == {
        "blocks.0.layers.0.weight": "0.0.linear.weight",
        "lm_heads.0.weight": "0.1.weight",
    }


def test_sizes_of_a_target_with_a_text_config() -> None:
    target = checkpoint({"text_config": TARGET}, {}, "target")
    heads = source(target, checkpoint({"num_heads": 1, "hidden_size": 32}, SIZES)).checkpoint
    assert heads.config["vocab_size"] == heads.config["truncated_vocab_size"] == 100


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_heads": 1, "hidden_size": 64}, "head reads hidden states of size 64, and target"),
        (
            {"num_heads": 1, "vocab_size": 90},
            "has a vocabulary of size 90, and target has 100",
        ),
        ({}, "head: its config has num_heads=None, and Medusa needs a whole number above 0"),
        ({"num_heads": "3"}, "num_heads='3'"),
        ({"num_heads": True}, "num_heads=True"),
        ({"num_heads": 1, "num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_heads": 1, "truncated_vocab_size": -1}, "truncated_vocab_size=-1"),
        ({"num_heads": 1, "truncated_vocab_size": 101}, "expected at most the smaller number"),
        ({"num_heads": 1, "truncated_vocab_size": 50}, "needs the tensor token_map"),
    ],
)
def test_heads_that_do_not_fit(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        heads_of(config)


def test_no_heads() -> None:
    with pytest.raises(ConfigError, match="the method medusa needs a head: set spec_model"):
        source(checkpoint(TARGET, {}), None)
