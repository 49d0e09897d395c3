"""What the methods build their layers from. Drafts are tested in tests/parity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pegboard_draft_mtp import source
from pegboard_draft_mtp.source import FAMILIES

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.weight_loader import Checkpoint, TensorEntry
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_parts import tiny_checkpoint

METHODS = {family.method: name for name, family in FAMILIES.items()}
CONFIG = {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 32}


def checkpoint(architecture: str, path: str = "target", **values: Any) -> Checkpoint:
    """Return a checkpoint that has the layers. values: of its config."""
    config = {**CONFIG, "num_nextn_predict_layers": 1, **values}
    return replace(tiny_checkpoint(Path(path)), config=config, architectures=(architecture,))


def with_tensors(target: Checkpoint, *names: str) -> Checkpoint:
    entry: Any = object.__new__(TensorEntry)
    return replace(target, tensors=dict.fromkeys(names, entry))


@pytest.mark.parametrize("method", ["mtp", *METHODS])
def test_contract(method: str) -> None:
    check_entry(installed_entry("draft", method))


@pytest.mark.parametrize("method", METHODS)
def test_the_target_is_read_as_its_layers(method: str) -> None:
    """By the method's own name and by `mtp`. The target itself stays as it is."""
    target = checkpoint(METHODS[method])
    family = FAMILIES[METHODS[method]]
    for make in (source.mtp, getattr(source, method)):
        draft = make(target, None)
        assert draft.checkpoint.architectures == (family.architecture,)
        assert draft.checkpoint.config["architectures"] == [family.architecture]
        assert draft.checkpoint.path == target.path and draft.taps == ()
    assert target.architectures == (METHODS[method],)


@pytest.mark.parametrize("method", METHODS)
def test_other_targets_are_refused(method: str) -> None:
    other = next(name for name in FAMILIES if name != METHODS[method])
    advice = f"{METHODS[method]}; target has {other}; use the method mtp or"
    with pytest.raises(ConfigError, match=f"{method} needs a model of {advice}"):
        getattr(source, method)(checkpoint(other), None)


@pytest.mark.parametrize("method", ["mtp", "mimo_mtp"])
def test_models_without_such_layers_are_refused(method: str) -> None:
    words = "target has LlamaForCausalLM; use another method"
    with pytest.raises(ConfigError, match=words):
        getattr(source, method)(checkpoint("LlamaForCausalLM"), None)
    with pytest.raises(ConfigError, match="target has no architecture"):
        source.mtp(replace(checkpoint("x"), architectures=()), None)


@pytest.mark.parametrize("count", [None, 0, -1, "1", 1.0, [1], True])
def test_configs_without_such_layers_are_refused(count: Any) -> None:
    target = checkpoint("DeepseekV3ForCausalLM", num_nextn_predict_layers=count)
    with pytest.raises(ModelError, match="num_nextn_predict_layers=.*another method"):
        source.mtp(target, None)


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_without_their_tensors_are_refused(name: str) -> None:
    prefix = FAMILIES[name].tensors.format(2)
    target = checkpoint(name)
    source.mtp(with_tensors(target, "model.norm.weight", f"{prefix}x.weight"), None)
    with pytest.raises(ModelError, match=f"no tensors {prefix}.*left out"):
        source.mtp(with_tensors(target, "model.norm.weight", "model.layers.1.x"), None)


def test_another_checkpoint_of_the_same_model() -> None:
    target = checkpoint("MiMoForCausalLM", num_nextn_predict_layers=0)
    draft = checkpoint("MiMoForCausalLM", "draft")
    assert source.mtp(target, draft).checkpoint.path == Path("draft")
    for values in ({"hidden_size": 16}, {"vocab_size": 33}, {"num_hidden_layers": 3}):
        other = checkpoint("MiMoForCausalLM", "draft", **values)
        with pytest.raises(ModelError, match="draft has .* leave out spec_model"):
            source.mtp(target, other)
    with pytest.raises(ModelError, match="draft is a model of LlamaForCausalLM"):
        source.mtp(target, checkpoint("LlamaForCausalLM", "draft"))
