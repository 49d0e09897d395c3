"""Decoders that make vectors or classes: which architecture computes the hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pegboard.config.schema import EngineConfig
from pegboard.errors import ConfigError
from pegboard.interfaces.pooler import Convert
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.plugins.defaults import implementations
from pegboard.plugins.registry import Registry

CONVERTED: Mapping[str, Convert] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "classify",
    "ForProcessRewardModel": "classify",
    "ForRewardModel": "classify",
    "RewardModel": "classify",
    "ForTextEncoding": "embed",
    "EmbeddingModel": "embed",
    "TextModel": "embed",
    "Model": "embed",
}
"""How the name of an architecture ends → what its checkpoint is for. The first that fits counts."""
TEXT = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How the names of architectures end that generate text."""
BOTH_WAYS = "Bidirectional"
"""Before such an end, in the names of architectures whose tokens attend to all of the prompt."""
OF_CLASSES = frozenset({"classifier", "token_classifier"})
"""Flags of models that have a head for classes."""
SENTENCES = "modules.json"
"""The file that sentence-transformers writes."""


def with_decoder(
    registry: Registry, engine: EngineConfig, checkpoint: Checkpoint
) -> tuple[Checkpoint, Convert | None]:
    """Return the checkpoint with the names of the architectures that may compute its hidden states,
    after its own names, and what takes the place of their head for text; None = nothing.

    An installed architecture of just this name comes first, and decides itself what it makes.
    If `model_impl` names other code, the names are those of it. Raises ConfigError if
    `convert` or `model_impl` rules out what is needed.
    """
    installed = registry.names("model")
    names = checkpoint.architectures
    convert: Convert | None = None
    for name in names:
        end = next((end for end in CONVERTED if name.endswith(end)), None)
        if name in installed or end is None or name.endswith(TEXT):
            continue
        convert = CONVERTED[end]
        base = name.removesuffix(end).removesuffix(BOTH_WAYS)
        names = (*names, *(base + text for text in TEXT))
    if convert is not None and engine.convert == "none":
        raise ConfigError(
            f"convert 'none': no installed model plugin serves {checkpoint.architectures[0]} "
            "itself; use convert 'auto', which takes the hidden states of a model of text"
        )
    if engine.convert in ("embed", "classify"):
        convert = engine.convert
    if convert is None and pools_anyway(engine, checkpoint):
        convert = "embed"
    if others := implementations(engine.model_impl):
        names = (_other(registry, checkpoint.config, names, others),)
    elif engine.model_impl == "vllm" and not set(names) & set(installed):
        raise ConfigError(
            f"model_impl 'vllm': no installed model plugin has code of its own for {names[0]}; use "
            "'auto' or 'transformers'"
        )
    return replace(checkpoint, architectures=names), convert


def _other(
    registry: Registry, config: Mapping[str, Any], names: Sequence[str], others: Sequence[str]
) -> str:
    """Return which of `others` (see `implementations`) takes the place of a model of these
    names."""
    if "vision_config" in config:
        return others[1]
    winner = registry.choose("model", Need(), keys=names).winner if names else None
    flags = registry.spec(winner).flags if winner is not None else frozenset()
    return others[2 + len(flags & OF_CLASSES)] if "encoder" in flags else others[0]


def sees_all(checkpoint: Checkpoint) -> bool:
    """Return whether each token of a decoder attends to all of its prompt, if it makes vectors or
    classes. The name is that of the config, whatever code computes it."""
    config = checkpoint.config
    names = config.get("architectures") or checkpoint.architectures
    return (
        config.get("is_causal") is False
        or config.get("use_bidirectional_attention") is True
        or BOTH_WAYS in names[0]
    )


def pools_anyway(engine: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return whether a model of text is asked for vectors: by the user, or by the files of
    sentence-transformers."""
    if engine.runner == "auto":
        return engine.convert == "auto" and (checkpoint.path / SENTENCES).is_file()
    return engine.runner == "pooling"
