"""What is tried with random weights on the host before a model is served: whether its tokens mix
only in attention, and what its head reads."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from pegboard.errors import ModelError
from pegboard_model_transformers.model import make_buffers, with_bare_head

TRIAL = "pegboard_trial"
TRIED_ROWS = 4
"""Tokens of the prompt that is tried."""


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
        part = module if isinstance(module, Pooled) else copy.deepcopy(module)
        tried._modules[name] = on_host(part)
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


def check_tokens(model: Any) -> None:
    """Raise ModelError if a token's state depends on others in other ways than attention, or on the
    number of tokens, because prompts of a step would affect each other. The same for one that
    depends on its id in other ways than its embedding. One layer is tried, and attention returns
    each token's own values."""
    name = type(model).__name__
    inner = model.base_model
    tried = copy.deepcopy(inner)
    width = inner.get_input_embeddings().embedding_dim
    table = nn.Embedding(4 * TRIED_ROWS, width)
    tried.set_input_embeddings(table)
    for path, layers in list(tried.named_modules()):
        if isinstance(layers, nn.ModuleList) and len(layers) == model.config.num_hidden_layers:
            tried.set_submodule(path, nn.ModuleList([layers[0]] * len(layers)))
    on_host(tried)
    make_buffers(tried, "cpu")
    for module in tried.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = TRIAL
    ids = torch.arange(3 * TRIED_ROWS, 4 * TRIED_ROWS)[None]  # the first ids are often special
    states = table(ids).detach()
    positions = torch.arange(TRIED_ROWS)[None] % 2 + TRIED_ROWS
    with torch.no_grad():
        try:
            whole = tried(input_ids=ids, position_ids=positions).last_hidden_state
            parts = [
                tried(inputs_embeds=states[:, i : i + 1], position_ids=positions[:, i : i + 1])
                for i in range(TRIED_ROWS)
            ]
        except Exception as error:  # modeling code can raise anything
            raise ModelError(
                f"{name} cannot be tried with random weights: {type(error).__name__}: {error}"
            ) from error
    alone = torch.cat([part.last_hidden_state for part in parts], 1)
    if not torch.allclose(whole, alone, rtol=1e-3, atol=1e-4):
        raise ModelError(
            f"{name} mixes the states of tokens outside its attention, or does more with tokens "
            "than to look up their embeddings, so prompts of a step would affect each other; it "
            "needs its own model plugin"
        )


def _own_values(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of a token to itself alone: value [B, K, T, Dv] → [B, T, H, Dv]."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


AttentionInterface.register(TRIAL, _own_values)


def on_host(module: nn.Module) -> nn.Module:
    """Give a module on the meta device random weights on the host, in float32."""
    module.to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(1)
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            tensor.data.normal_(0, 0.1, generator=generator)
    return module
