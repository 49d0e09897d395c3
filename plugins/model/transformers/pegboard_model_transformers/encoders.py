"""Encoders, run with transformers' modules on Pegboard's attention, linear layers and embedding.

loading   The base model, or the one with a head for classes. Attention is declared after a trial
          run, in which its masks must let tokens attend to those after them.
step      embed → the base model's forward over inputs_embeds [1, T, width] of all prompts. The
          attention layer keeps prompts apart, and positions are those in the prompt
classes   the head of transformers, over the rows that the pooler has made

Both are tried with random weights before: see `trial`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from pegboard.errors import ModelError
from pegboard.layers import Build
from pegboard_model_transformers.model import (
    built_on_meta,
    declare_model,
    first_position,
    parsed_config,
    refuse_attention,
    refuse_config,
    with_bare_head,
)
from pegboard_model_transformers.probe import PROBE
from pegboard_model_transformers.trial import Pooled, check_head, check_tokens, pooler_of

TYPES = "token_type_embeddings"
"""The name of the module with a vector for each type of tokens, which is added to the token's."""


class TransformersEncoder(nn.Module):
    """[T] token ids → [T, hidden], the states after the last layer. It has no head: `logits`
    returns its input."""

    mapping: Any = MODEL_MAPPING

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        if build.rope_style != "halves":
            raise ModelError(
                "the checkpoint stores rotary channels as pairs, but transformers' modules need "
                "halves; use a safetensors checkpoint"
            )
        dtype = getattr(torch, build.dtype)
        model = make_encoder(self.mapping, config, dtype)
        apart = self.parts_of_head(model, config)
        check_tokens(model)
        both_ways = replace(build, sees_all=True)
        self.embedding, notes = declare_model(both_ways, model, dtype, apart)
        self.model = model
        self.inner = model.base_model
        self.first_position = first_position(notes, build.max_positions)

    def parts_of_head(self, model: Any, config: Mapping[str, Any]) -> list[str]:
        """Return the paths of the modules that compute the rows of the pooler. Removes what
        computes vectors of its own, which no checkpoint of sentence-transformers uses."""
        if isinstance(getattr(model, "pooler", None), nn.Module):
            model.pooler = None
        return []

    def embed(self, input_ids: Tensor) -> Tensor:
        rows: Tensor = self.embedding(input_ids)
        return rows

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self.first_position:
            positions = positions + self.first_position
        final: Tensor = self.inner(
            inputs_embeds=hidden[None], position_ids=positions[None]
        ).last_hidden_state
        return final[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class TransformersClasses(TransformersEncoder):
    """The same with a head for classes of prompts. It also reads pairs, whose token types are an
    input, if there are any."""

    mapping = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    of_tokens = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__(config, build)
        modules = self.inner.named_modules()
        self.types: Any = next((each for name, each in modules if name.endswith(TYPES)), None)
        if self.types is not None and self.types.num_embeddings > 1:
            build.declared.inputs.append("token_types")
        self.head = with_bare_head(self.model, Pooled(pooler_of(self.model)))

    def parts_of_head(self, model: Any, config: Mapping[str, Any]) -> list[str]:
        pools_mean = not self.of_tokens and config.get("classifier_pooling") == "mean"
        check_head(model, "all" if self.of_tokens else "mean" if pools_mean else "first")
        base = model.base_model_prefix
        return [f"{base}.pooler", *(name for name, _ in model.named_children() if name != base)]

    def embed(self, input_ids: Tensor, *types: Tensor) -> Tensor:
        rows = super().embed(input_ids)
        for each in types:
            table = self.types.weight
            rows = rows + each.unsqueeze(1) * (table[1] - table[0])
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(inputs_embeds=hidden[:, None]).logits
        return logits.flatten(1).float()


class TransformersTokenClasses(TransformersClasses):
    """The same with a head for the classes of each token."""

    mapping = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
    of_tokens = True


def make_encoder(mapping: Any, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return a model on the meta device. mapping: transformers' classes by config class. Raises
    ModelError if there is none, or if its attention cannot be replaced."""
    parsed = parsed_config(config)
    for name in config.get("architectures") or ():
        if name.endswith("ForMaskedLM"):
            raise ModelError(
                f"{name} computes logits of words, which transformers' code is not used for; set "
                "model_impl to 'auto'"
            )
    kind = mapping.get(type(parsed), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    if kind is None or parsed.is_encoder_decoder:
        raise ModelError(
            f"transformers has no encoder of model_type {parsed.model_type!r} for this task"
        )
    refuse_attention(kind)
    refuse_config(parsed, kind.__name__)
    model = built_on_meta(kind, parsed, dtype, attn_implementation=PROBE)
    return model
