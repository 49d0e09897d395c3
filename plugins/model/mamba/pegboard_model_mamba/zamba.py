"""Zamba2 (Glorioso et al. 2024). All layers have Mamba-2. Some of them first call one of a few
attention blocks, which also see the embedding of the token. The calls of a block share its weights,
but for low-rank additions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Attention, Build, Linear, Norm, QKVLinear, Rope, Rotation, read, size_of
from pegboard_model_mamba.decoder import StateDecoder
from pegboard_model_mamba.mixers import Mamba2, Mamba2Shape
from pegboard_models.decoder import Names

KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}


class Zamba2Model(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        if (act := read(config, "hidden_act", str) or "gelu") != "gelu":
            raise ModelError(
                f"the checkpoint's config has hidden_act={act!r}; this architecture is served "
                "with gelu"
            )
        if build.is_divided:
            raise ModelError("the layers of this architecture cannot be divided")
        hidden = size_of(config, "hidden_size")
        num_layers = size_of(config, "num_hidden_layers")
        eps = read(config, "rms_norm_eps", float) or 1e-5
        callers = calling_layers(config)
        blocks: list[SharedBlock] = []

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            if index not in callers:
                return MambaLayer(build, index, config, eps)
            turn = callers.index(index)
            if turn < (read(config, "num_mem_blocks", int) or 1):
                blocks.append(SharedBlock(build.at("shared_transformer"), config, eps))
            block = blocks[turn % len(blocks)]
            mamba = MambaLayer(build.at("mamba_decoder"), num_layers + index, config, eps)
            return CallingLayer(build, index, block, Additions(block, turn, config), mamba, rope)

        rotary = (
            2 * hidden // size_of(config, "num_attention_heads")
            if read(config, "use_mem_rope", bool)
            else 0
        )
        common = {**config, "hidden_act": "silu"}
        super().__init__(
            common,
            build,
            make,
            eps=eps,
            names=Names(norm="final_layernorm"),
            rotary_dim=rotary,
            is_tied=True,
        )

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        rotation = None if self.rope is None else self.rope(positions)
        return self.layers(hidden, rotation, hidden)


class MambaLayer(nn.Module):
    """x + Mamba-2(norm(x + t)). t: the result of the attention block; None = no block was
    called."""

    def __init__(self, build: Build, index: int, config: Mapping[str, Any], eps: float) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        self.norm = Norm(build.at("input_layernorm"), hidden, eps)
        heads = read(config, "n_mamba_heads", int) or 8
        bias = bool(read(config, "add_bias_linear", bool))
        least = read(config, "time_step_min", float)
        shape = Mamba2Shape(
            hidden=hidden,
            heads=heads,
            head_dim=int((read(config, "mamba_expand", float) or 2) * hidden) // heads,
            groups=read(config, "mamba_ngroups", int) or 1,
            state=read(config, "mamba_d_state", int) or 64,
            width=read(config, "mamba_d_conv", int) or 4,
            bias=bias,
            conv_bias=True,
            out_bias=bias,
            eps=1e-5,
            limits=(0.001 if least is None else least, math.inf),
        )
        self.mamba = Mamba2(build.at("mamba"), index, shape)

    def forward(
        self,
        x: Tensor,
        residual: None,
        rotation: Rotation | None,
        embedding: Tensor,
        t: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        return x + self.mamba.forward(self.norm(x if t is None else x + t)), None


class SharedBlock(nn.Module):
    """The weights of an attention block: attention over the stream and the embedding [T, 2 hidden],
    then a gated feed-forward block. build: at the layer that calls it first."""

    def __init__(self, build: Build, config: Mapping[str, Any], eps: float) -> None:
        super().__init__()
        self.build = build
        hidden = size_of(config, "hidden_size")
        self.heads = size_of(config, "num_attention_heads")
        self.kv_heads = read(config, "num_key_value_heads", int) or self.heads
        self.head_dim = 2 * hidden // self.heads
        width = read(config, "intermediate_size", int) or 4 * hidden
        if self.heads % self.kv_heads:
            values = (
                f"{self.heads} attention heads, not a multiple of {self.kv_heads} key-value heads"
            )
            raise ModelError(f"the checkpoint's config has {values}")
        counts = self.heads, self.kv_heads, self.head_dim
        bias = bool(read(config, "add_bias_linear", bool))
        part = build.at("self_attn")
        block = build.at("feed_forward")
        self.input_norm = Norm(build.at("input_layernorm"), 2 * hidden, eps)
        self.qkv_proj = QKVLinear(part, 2 * hidden, *counts)
        self.o_proj = Linear(
            part.at("o_proj"), self.heads * self.head_dim, hidden, split="columns", heads=counts
        )
        self.norm = Norm(build.at("pre_ff_layernorm"), hidden, eps)
        parts = {"gate_up_proj": (width, width)}
        self.gate_up_proj = Linear(block, hidden, 2 * width, parts=parts, bias=bias, split="rows")
        self.down_proj = Linear(block.at("down_proj"), width, hidden, bias=bias, split="columns")


class Additions(nn.Module):
    """What a calling layer adds to projections of the shared block: products of two low-rank
    matrices. turn: the number of calls of any block before it."""

    def __init__(self, of: SharedBlock, turn: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        rank = read(config, "adapter_rank", int) or 128
        width = read(config, "intermediate_size", int) or 4 * hidden
        part = of.build.at("self_attn")
        block = of.build.at(f"feed_forward.gate_up_proj_adapter_list.{turn}")
        self.first: Linear | None = None
        self.second: list[Linear] = []
        if read(config, "use_shared_attention_adapter", bool):
            names = [f"linear_{name}_adapter_list.{turn}" for name in "qkv"]
            self.first = Linear(
                part, 2 * hidden, 3 * rank, parts={f"{name}.0": rank for name in names}
            )
            heads = of.heads, of.kv_heads, of.head_dim
            self.second = [
                Linear(part.at(f"{name}.1"), rank, 2 * hidden, split="rows", heads=heads)
                for name in names
            ]
        self.gate_up = (
            Linear(block.at("0"), hidden, rank),
            Linear(block, rank, 2 * width, parts={"1": (width, width)}, split="rows"),
        )

    def to_heads(self, qkv: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
        if self.first is None:
            return qkv
        small: Sequence[Tensor] = self.first(x).chunk(3, 1)
        return [
            heads + second(part).view(heads.shape)
            for heads, second, part in zip(qkv, self.second, small, strict=True)
        ]

    def to_gate_up(self, both: Tensor, x: Tensor) -> Tensor:
        first, second = self.gate_up
        out: Tensor = both + second(first(x))
        return out


class CallingLayer(nn.Module):
    """A layer that calls a shared attention block before Mamba-2."""

    def __init__(
        self,
        build: Build,
        index: int,
        block: SharedBlock,
        additions: Additions,
        mamba: MambaLayer,
        rope: Rope | None,
    ) -> None:
        super().__init__()
        self.block = block
        self.additions = additions
        self.mamba = mamba
        part = build.at("shared_transformer.self_attn")
        hidden = block.o_proj.out_features
        scale = (block.head_dim / 2) ** -0.5
        self.attention = Attention(
            part, index, block.heads, block.kv_heads, block.head_dim, scale=scale, rope=rope
        )
        self.linear = Linear(build.at("linear"), hidden, hidden)

    def forward(
        self, x: Tensor, residual: None, rotation: Rotation | None, embedding: Tensor
    ) -> tuple[Tensor, None]:
        block = self.block
        seen = block.input_norm(torch.cat((x, embedding), 1))
        q, k, v = self.additions.to_heads(block.qkv_proj(seen), seen)
        mixed = block.norm(block.o_proj(self.attention(q, k, v, rotation)))
        gate, up = self.additions.to_gate_up(block.gate_up_proj(mixed), mixed).chunk(2, 1)
        t = self.linear(block.down_proj(nn.functional.gelu(gate) * up))
        return self.mamba.forward(x, None, rotation, embedding, t)


def calling_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the layers that call a block. Raises ModelError if the config does not say what each
    layer is."""
    kinds = (
        read(config, "layers_block_type", list[str]) or read(config, "layer_types", list[str]) or []
    )
    if len(kinds) != size_of(config, "num_hidden_layers") or not set(kinds) <= KINDS.keys():
        message = f"expected one of {', '.join(KINDS)} for each of num_hidden_layers"
        raise ModelError(f"the checkpoint's config has layers_block_type={kinds!r}; {message}")
    return [index for index, kind in enumerate(kinds) if KINDS[kind]]
