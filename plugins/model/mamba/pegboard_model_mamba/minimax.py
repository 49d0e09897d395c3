"""MiniMax-Text-01 and MiniMax-M1 (MiniMax 2025): lightning attention, softmax attention in every
eighth layer, and experts.

Lightning attention is linear attention in which the past fades by the same factor in every step: S
← exp(-s) S + v kᵀ, y = S q, with a fixed rate s per head (Qin et al. 2024). This is the scan of
Mamba-2 with steps of length 1 and no skip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers import (
    Build,
    Experts,
    Linear,
    Norm,
    Rope,
    Rotation,
    RouterRule,
    StateLayer,
    read,
    size_of,
)
from pegboard.ops import StateRows
from pegboard_model_mamba.decoder import StateDecoder, attention, head_size
from pegboard_model_mamba.hybrids import layer_kinds
from pegboard_model_mamba.qwen_next import in_groups
from pegboard_models.blocks import ExpertsBlock
from pegboard_models.decoder import scaled
from pegboard_models.norms import Heads, all_heads

OLDER_KINDS = {0: "linear_attention", 1: "full_attention"}


class MiniMaxModel(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        if read(config, "postnorm", bool) is False or read(config, "shared_intermediate_size", int):
            values = (
                f"postnorm={config.get('postnorm')}, "
                f"shared_intermediate_size={config.get('shared_intermediate_size')}"
            )
            raise ModelError(
                f"the checkpoint's config has {values}; served are postnorm=true and no shared "
                "experts"
            )
        hidden = size_of(config, "hidden_size")
        eps = read(config, "rms_norm_eps", float) or 1e-5
        older = read(config, "attn_type_list", list[int])
        named = (
            config
            if older is None
            else {**config, "layer_types": [OLDER_KINDS.get(kind, str(kind)) for kind in older]}
        )
        kinds = layer_kinds(named, "layer_types")
        rule = RouterRule(size_of(config, "num_experts_per_tok"), renormalize=True)
        window = read(config, "sliding_window", int) or None
        num_experts = size_of(config, "num_local_experts")
        width = size_of(config, "intermediate_size")

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            part = build.at("self_attn")
            block = build.at("block_sparse_moe")
            mixer: nn.Module
            if kinds[index]:
                plain = {**config, "attention_bias": False}
                mixer = attention(part, index, plain, rope, window=window)
            else:
                mixer = LightningAttention(part, index, config)
            experts = Experts(
                block.at("experts"), num_experts, hidden, width, rule=rule, names=("w1", "w3", "w2")
            )
            parts = {
                "input_layernorm": mixer,
                "post_attention_layernorm": ExpertsBlock(block.at("gate"), experts),
            }
            first = factors(config, "full" if kinds[index] else "linear", "_attention", "_attn")
            return PostNormBlock(build, hidden, eps, parts, (first, factors(config, "mlp")))

        rotary = read(config, "rotary_dim", int) or head_size(config)
        super().__init__(
            {"rope_theta": 1_000_000.0, **config}, build, make, eps=eps, rotary_dim=rotary
        )


class LightningAttention(nn.Module):
    """[T, hidden] → [T, hidden]: linear attention whose results are normalized and have a gate.
    qkv_proj has a head's query, key and value below each other."""

    def __init__(self, build: Build, index: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        heads = size_of(config, "num_attention_heads")
        size = head_size(config)
        inner = heads * size
        held, _ = build.tensor.heads(heads, heads)
        self.heads = held[1] - held[0]
        self.inner = self.heads * size
        counts = (heads, heads, size)
        self.qkv_proj = Linear(
            build.at("qkv_proj"), hidden, 3 * inner, split="rows", heads=(heads, heads, 3 * size)
        )
        self.order = in_groups(build, self.heads, size, size, size)
        self.norm = all_heads(build.at("norm"), Heads(heads, held), size)
        self.output_gate = Linear(
            build.at("output_gate"), hidden, inner, split="rows", heads=counts
        )
        self.out_proj = Linear(build.at("out_proj"), inner, hidden, split="columns", heads=counts)
        rates = decay_rates(heads, index, size_of(config, "num_hidden_layers"))[slice(*held)]
        rates = rates.to(build.device)
        self.log_rates = rates.log()
        self.none = torch.zeros_like(rates)
        self.scan = build.kernels["chunked_scan"]
        self.states = StateLayer(
            build, index, KVTensor("state", (self.heads, size, size), "float32")
        )

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        mixed = nn.functional.silu(self.qkv_proj(hidden)).index_select(1, self.order)
        q, k, v = (x.unflatten(1, (self.heads, -1)) for x in mixed.split(self.inner, 1))
        steps = hidden[:, : self.heads]  # any numbers: the limits make 1 of them
        y = self.states(self._scanned, self.inner, v, steps, k, q)
        y = self.norm(y.unflatten(1, (self.heads, -1))).flatten(1)
        out: Tensor = self.out_proj(y * self.output_gate(hidden).sigmoid())
        return out

    def _scanned(
        self,
        states: Mapping[str, Tensor],
        rows: StateRows,
        v: Tensor,
        steps: Tensor,
        k: Tensor,
        q: Tensor,
    ) -> Tensor:
        y: Tensor = self.scan(
            v, steps, self.none, (1.0, 1.0), self.log_rates, k, q, self.none, states["state"], rows
        )
        return y.flatten(1)


class PostNormBlock(nn.Module):
    """Parts that each follow a norm. The residual is the result of that norm: x ← a h + b part(h),
    h = norm(x). parts: by the names of their norms. factors: (a, b) of each."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        eps: float,
        parts: Mapping[str, nn.Module],
        factors: tuple[tuple[float, float], ...],
    ) -> None:
        super().__init__()
        norms = (Norm(build.at(name), hidden, eps) for name in parts)
        self.parts = list(
            zip(norms, (part.forward for part in parts.values()), factors, strict=True)
        )

    def forward(
        self, hidden: Tensor, residual: None, rotation: Rotation | None
    ) -> tuple[Tensor, None]:
        for norm, part, (kept, added) in self.parts:
            hidden = norm(hidden)
            hidden = scaled(hidden, kept) + scaled(part(hidden, rotation), added)
        return hidden, None


def decay_rates(heads: int, index: int, num_layers: int) -> Tensor:
    """Return the decay rates of the heads of a layer, float32 [heads]: those of ALiBi (Press et al.
    2022), smaller in later layers."""
    powers = torch.arange(1, heads + 1, dtype=torch.float32) * (-8 / heads * math.log(2))
    return powers.exp() * (1 - index / (num_layers - 1 + 1e-5) + 1e-5)


def factors(
    config: Mapping[str, Any], kind: str, older: str = "", newer: str = ""
) -> tuple[float, float]:
    """Return the factors of the residual and of what is added to it. MiniMax and transformers named
    them differently."""

    def factor(name: str) -> float:
        value = read(config, f"layernorm_{kind}{older}_{name}", float)
        value = read(config, f"{kind}{newer}_{name}_factor", float) if value is None else value
        return 1.0 if value is None else value

    return factor("alpha"), factor("beta")
