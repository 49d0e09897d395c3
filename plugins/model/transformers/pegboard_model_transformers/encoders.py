"""Encoders, run with transformers' modules on Pegboard's attention, linear layers and embedding.

loading   The base model, or the one with a head for classes. Attention is declared after a trial run,
          in which its masks must let tokens attend to those after them.
step      embed → the base model's forward over inputs_embeds [1, T, width] of all prompts. The
          attention layer keeps prompts apart, and positions are those in the prompt
classes   the head of transformers, over the rows that the pooler has made. It is tried with random
          weights before: its result must depend on nothing else
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
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
    parsed_config,
    refuse_attention,
    refuse_config,
    with_bare_head,
)
from pegboard_model_transformers.probe import PROBE, Notes

TYPES = "token_type_embeddings"
"""The name of the module with a vector for each type of tokens, which is added to the token's."""
TRIED_ROWS = 4
"""Tokens of the prompt with which a head is tried."""


class TransformersEncoder(nn.Module):
    """[T] token ids → [T, hidden], the states after the last layer. It has no head: `logits`
    returns its input."""

    mapping: Any = MODEL_MAPPING

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        model = make_encoder(self.mapping, config, getattr(torch, build.dtype))
        apart = self.parts_of_head(model, config)
        both_ways = replace(build, sees_all=True)
        dtype = getattr(torch, build.dtype)
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
        self.types = next((each for name, each in modules if name.endswith(TYPES)), None)
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


class PooledHidden(BaseModelOutputWithPooling):
    """An output of a base model that holds only what a head reads. Every other field is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Pooled(nn.Module):
    """Replaces the base model of a head: returns its inputs as the last states, and what the base
    model's pooler makes of the first one. pooler: None = it has none."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> PooledHidden:
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return PooledHidden(last_hidden_state=inputs_embeds, pooler_output=pooled)


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


def first_position(notes: Notes, longest: int | None) -> int:
    """Return the row of the table of positions that position 0 has: those before it are for
    padding. longest: the most tokens of a prompt; None = not known. Raises ModelError if there are
    not so many rows."""
    rows = [
        (0 if table.padding_idx is None else table.padding_idx + 1, table.num_embeddings)
        for table in notes.places
    ]
    if len({first for first, _ in rows}) > 1:
        raise ModelError(f"{notes.name} looks up positions in several ways; it cannot be served")
    for first, count in rows:
        if (longest or 0) > count - first:
            raise ModelError(
                f"the model has positions for {count - first} tokens; set max_model_len to at most "
                f"{count - first}"
            )
    return rows[0][0] if rows else 0


def pooler_of(model: Any) -> nn.Module | None:
    """Return the base model's module that makes a vector of the first state, or None."""
    pooler = getattr(model.base_model, "pooler", None)
    return pooler if isinstance(pooler, nn.Module) else None


def check_head(model: Any, reads: str) -> None:
    """Raise ModelError unless the head computes from the rows that the pooler makes. It is tried on
    the host with random weights. reads: which states of a prompt give a row: the "first" one, their
    "mean", or "all", each of which then has its own result."""
    tried = with_bare_head(model, Pooled(copy.deepcopy(pooler_of(model))))
    for name, module in tried._modules.items():
        tried._modules[name] = on_host(
            module if isinstance(module, Pooled) else copy.deepcopy(module)
        )
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, TRIED_ROWS, model.config.hidden_size, generator=generator)
    rows = {"first": states[:, :1], "mean": states.mean(1, keepdim=True)}.get(reads)
    with torch.no_grad():
        try:
            whole = tried(inputs_embeds=states).logits
            if rows is None:
                parts = tried(inputs_embeds=states.transpose(0, 1)).logits.transpose(0, 1)
            else:
                parts = tried(inputs_embeds=rows).logits
        except Exception as error:  # modeling code can raise anything
            raise ModelError(
                f"the head of {type(model).__name__} cannot be computed without its base model: "
                f"{type(error).__name__}: {error}"
            ) from error
    if whole.shape != parts.shape or not torch.allclose(whole, parts, atol=1e-5):
        raise ModelError(
            f"the head of {type(model).__name__} reads other states than {reads}; it needs its own "
            "model plugin"
        )


def on_host(module: nn.Module) -> nn.Module:
    """Give a module on the meta device random weights on the host, in float32."""
    module.to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(1)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.1, generator=generator)
    return module
