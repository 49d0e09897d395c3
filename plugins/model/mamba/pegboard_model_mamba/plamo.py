"""PLaMo 2 (Preferred Networks 2025): Mamba-2 whose steps, inputs and outputs are read from the
convolved channels and normalized, attention in some layers, and a norm before and after each
block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers import (
    Attention,
    Build,
    Linear,
    QKVLinear,
    Rope,
    Rotation,
    StateLayer,
    read,
    size_of,
)
from pegboard.layers.shards import scaled
from pegboard.ops import StateRows
from pegboard_model_mamba.decoder import StateDecoder
from pegboard_model_mamba.mixers import ones
from pegboard_model_mamba.qwen_next import in_groups
from pegboard_models.blocks import GatedMLP, PreNorm
from pegboard_models.decoder import Names
from pegboard_models.norms import OffsetNorm
from pegboard_models.parameters import Parameters
from pegboard_models.short_conv import ShortConv

NORMS = {
    "pre_mixer_norm": 1.0,
    "post_mixer_norm": 1 / 5,
    "pre_mlp_norm": 1.0,
    "post_mlp_norm": 5**-1.5,
}
"""The norms of a layer, and what the checkpoint subtracts from their weights."""


class Plamo2Model(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        eps = read(config, "rms_norm_eps", float) or 1e-6
        head_dim = read(config, "hidden_size_per_head", int) or 128

        hidden = size_of(config, "hidden_size")
        width = size_of(config, "intermediate_size")

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            arguments = (build.at("mixer"), index, config, head_dim, eps)
            mixer: nn.Module = (
                PlamoMamba(*arguments)
                if has_state(config, index)
                else PlamoAttention(*arguments, rope)
            )
            mlp = GatedMLP(build.at("mlp"), hidden, width, names=("gate_up_proj", "down_proj"))
            before, after, before_mlp, after_mlp = (
                OffsetNorm(build.at(name), hidden, eps, offset) for name, offset in NORMS.items()
            )
            return PreNorm((before, mixer, after), (before_mlp, mlp, after_mlp))

        names = Names(layers="layers.layers")
        super().__init__(
            config,
            build,
            make,
            eps=eps,
            names=names,
            rotary_dim=head_dim,
            is_tied=True,
            norm=OffsetNorm,
        )


def has_state(config: Mapping[str, Any], index: int) -> bool:
    """Return whether a layer has a state. One of every mamba_step layers has attention, or the last
    one if there are few."""
    step = read(config, "mamba_step", int) or 2
    num_layers = size_of(config, "num_hidden_layers")
    if read(config, "mamba_enabled", bool) is False:
        return False
    if step < 2:
        raise ModelError(f"the checkpoint's config has mamba_step={step}; expected at least 2")
    if num_layers <= step // 2:
        return index != num_layers - 1
    return index % step != step // 2


class PlamoMamba(nn.Module):
    """[T, hidden] → [T, hidden]. The first projection has each head's gate, then its channels."""

    def __init__(
        self, build: Build, index: int, config: Mapping[str, Any], head_dim: int, eps: float
    ) -> None:
        super().__init__()
        hidden, heads, state = (
            size_of(config, name) for name in ("hidden_size", "mamba_num_heads", "mamba_d_state")
        )
        width = read(config, "mamba_d_conv", int) or 4
        rank = max(64, hidden // 16)
        inner = heads * head_dim
        if min(heads, state) < 1 or width < 2:
            values = f"mamba_num_heads={heads}, mamba_d_state={state} and mamba_d_conv={width}"
            raise ModelError(
                f"the checkpoint's config has {values}; expected positive numbers, and a "
                "convolution of at least 2"
            )
        held, _ = build.tensor.heads(heads, heads)
        counts = heads, heads, head_dim
        self.heads = held[1] - held[0]
        self.inner = self.heads * head_dim
        self.eps = eps
        self.in_proj = Linear(
            build.at("in_proj"),
            hidden,
            2 * inner,
            split="rows",
            heads=(heads, heads, 2 * head_dim),
        )
        self.order = in_groups(build, self.heads, head_dim, head_dim)
        channels = [scaled(held, head_dim)]
        self.conv = ShortConv(
            build.at("conv1d"), inner, width, bias=False, activates=True, held=channels
        )
        self.sizes = {"B_norm_weight": state, "C_norm_weight": state, "dt_norm_weight": rank}
        self.read_proj = Linear(
            build.at("bcdt_proj"), inner, sum(self.sizes.values()), split="columns", heads=counts
        )
        self.norms = Parameters(build, {name: (size,) for name, size in self.sizes.items()})
        self.dt_proj = Linear(
            build.at("dt_proj"), rank, heads, split="rows", heads=(heads, heads, 1)
        )
        self.weights = Parameters(
            build, dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)), "float32", held=[held]
        )
        self.out_proj = Linear(build.at("out_proj"), inner, hidden, split="columns", heads=counts)
        self.scan, self.gated, self.rms_norm = (
            build.kernels[op] for op in ("chunked_scan", "gated_norm", "rms_norm")
        )
        tensor = KVTensor("state", (self.heads, head_dim, state), "float32")
        self.states = StateLayer(
            build, index, tensor, KVTensor("conv", (self.inner, width - 1), build.dtype)
        )

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        gate, x = self.in_proj(hidden).index_select(1, self.order).chunk(2, 1)
        x = self.states(self._convolved, self.inner, x)
        parts = self.read_proj(x).split(tuple(self.sizes.values()), 1)
        b, c, steps = (
            self.rms_norm(part, self.norms[name], self.eps)
            for name, part in zip(self.sizes, parts, strict=True)
        )
        y = self.states(self._scanned, self.inner, x, self.dt_proj(steps), b, c)
        out: Tensor = self.out_proj(self.gated(y, gate, None, 0.0, self.inner, True))
        return out

    def _convolved(self, states: Mapping[str, Tensor], rows: StateRows, x: Tensor) -> Tensor:
        return self.conv(x, states["conv"], rows)

    def _scanned(
        self,
        states: Mapping[str, Tensor],
        rows: StateRows,
        x: Tensor,
        steps: Tensor,
        b: Tensor,
        c: Tensor,
    ) -> Tensor:
        weights = self.weights
        limits = (0.0, float("inf"))
        x = x.unflatten(1, (self.heads, -1))
        b = b.unflatten(1, (1, -1))
        c = c.unflatten(1, (1, -1))
        y: Tensor = self.scan(
            x,
            steps,
            weights["dt_bias"],
            limits,
            weights["A_log"],
            b,
            c,
            weights["D"],
            states["state"],
            rows,
        )
        return y.flatten(1)


class PlamoAttention(nn.Module):
    """Grouped-query attention. Each head of queries and keys is normalized, with a weight of its
    own."""

    def __init__(
        self,
        build: Build,
        index: int,
        config: Mapping[str, Any],
        head_dim: int,
        eps: float,
        rope: Rope | None,
    ) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        heads = size_of(config, "num_attention_heads")
        kv_heads = read(config, "num_key_value_heads", int) or heads
        if heads % kv_heads:
            raise ModelError(
                f"the checkpoint's config has {heads} attention heads, not a multiple of "
                f"{kv_heads} key-value heads"
            )
        self.head_dim = head_dim
        self.eps = eps
        counts = (heads, kv_heads, head_dim)
        held, held_kv = build.tensor.heads(heads, kv_heads)
        self.qkv_proj = QKVLinear(build, hidden, *counts, names=("qkv_proj",))
        self.q_weight = Parameters(build, {"q_weight": (heads, head_dim)}, held=[held])
        self.k_weight = Parameters(build, {"k_weight": (kv_heads, head_dim)}, held=[held_kv])
        self.rms_norm = build.kernels["rms_norm"]
        self.plain = ones(build, head_dim)
        self.attention = Attention(build, index, heads, kv_heads, head_dim, rope=rope)
        self.o_proj = Linear(
            build.at("o_proj"), heads * head_dim, hidden, split="columns", heads=counts
        )

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        q = self._normalized(q, self.q_weight["q_weight"])
        k = self._normalized(k, self.k_weight["k_weight"])
        out: Tensor = self.o_proj(self.attention(q, k, v, rotation))
        return out

    def _normalized(self, heads: Tensor, weight: Tensor) -> Tensor:
        normalized = self.rms_norm(heads, self.plain, self.eps).flatten(1) * weight.flatten()
        return normalized.view(heads.shape)
