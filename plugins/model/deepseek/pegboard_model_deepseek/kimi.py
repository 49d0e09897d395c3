"""Kimi Linear (Kimi Team 2025): Kimi delta attention in most layers, latent attention without
rotation in the others, and the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers import Build, Linear, Norm, StateLayer, read, size_of
from pegboard.layers.shards import scaled
from pegboard.ops import StateRows
from pegboard_model_deepseek.decoder import LatentDecoder
from pegboard_model_deepseek.deepseek import experts_block, router_rule
from pegboard_model_deepseek.shape import Shape, kinds, sparse_layers
from pegboard_models.parameters import Parameters
from pegboard_models.short_conv import ShortConv

NAMES = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
    "n_group": "num_expert_group",
}
"""What this architecture calls values of DeepSeek-V3's config."""


class KimiLinearModel(LatentDecoder):
    rotates = False

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        if read(config, "mla_use_nope", bool) is False:
            raise ModelError(
                "the checkpoint's config has mla_use_nope=False; this architecture is served "
                "without rotation only"
            )
        config = {
            **config,
            **{
                name: config[name_in_config]
                for name, name_in_config in NAMES.items()
                if name_in_config in config
            },
        }
        shape = Shape(config)
        self.is_linear = linear_layers(config, shape.num_layers)
        self.is_sparse = sparse_layers(config, shape.num_layers)
        super().__init__(config, build, shape, pairs=True)

    def attention(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        if self.is_linear[index]:
            return DeltaAttention(build, index, shape, config)
        return super().attention(build, index, shape, config)

    def feed_forward(
        self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]
    ) -> nn.Module:
        if not self.is_sparse[index]:
            return super().feed_forward(build, index, shape, config)
        num_experts = size_of(config, "n_routed_experts")
        rule = router_rule(config, num_experts, score="sigmoid", method="noaux_tc")
        block = build.at("block_sparse_moe")
        build.declared.aliases[build.at("mlp").path] = block.path  # transformers' name
        return experts_block(block, shape, config, num_experts, rule, names=("w1", "w3", "w2"))


class DeltaAttention(nn.Module):
    """[T, hidden] → [T, hidden]: the delta rule with a decay per channel, over convolved queries,
    keys and values (section 3). The decays and the gate of the result come from small vectors."""

    def __init__(self, build: Build, index: int, shape: Shape, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = shape.hidden_size
        eps = shape.eps
        heads, self.size, width = delta_sizes(config)
        inner = heads * self.size
        counts = heads, heads, self.size
        self.held, _ = build.tensor.heads(heads, heads)
        self.heads = self.held[1] - self.held[0]
        channels = scaled(self.held, self.size)
        names = ("q", "k", "v")
        parts = {f"{name}_proj": inner for name in names}
        self.qkv_proj = Linear(build, hidden, 3 * inner, parts=parts, split="rows", heads=counts)
        self.convs = [
            ShortConv(
                build.at(f"{name}_conv1d"),
                inner,
                width,
                bias=False,
                activates=True,
                held=[channels],
            )
            for name in names
        ]
        build.declared.aliases[build.at("forget_gate").path] = build.path  # transformers' name
        self.decay_down, self.decay_up = (
            Linear(build.at("f_a_proj"), hidden, self.size),
            Linear(build.at("f_b_proj"), self.size, inner, split="rows", heads=counts),
        )
        self.gate_down, self.gate_up = (
            Linear(build.at("g_a_proj"), hidden, self.size),
            Linear(build.at("g_b_proj"), self.size, inner, split="rows", heads=counts),
        )
        self.beta_proj = Linear(
            build.at("b_proj"), hidden, heads, split="rows", heads=(heads, heads, 1)
        )
        self.rates = Parameters(build, {"A_log": (1, 1, heads, 1)}, "float32")
        self.bias = Parameters(build, {"dt_bias": (inner,)}, "float32", held=[channels])
        self.norm = Norm(build.at("o_norm"), self.size, eps)
        self.o_proj = Linear(build.at("o_proj"), inner, hidden, split="columns", heads=counts)
        self.rule = build.kernels["gated_delta_rule"]
        held = self.heads * self.size
        state = KVTensor("state", (self.heads, self.size, self.size), "float32")
        inputs = [KVTensor(f"conv_{name}", (held, width - 1), build.dtype) for name in names]
        self.states = StateLayer(build, index, state, *inputs)

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        mixed = self.qkv_proj(hidden)
        steps = self.decay_up(self.decay_down(hidden))
        width = self.heads * self.size
        y = self.states(self._attended, width, mixed, steps, self.beta_proj(hidden))
        gate = self.gate_up(self.gate_down(hidden)).sigmoid()
        out: Tensor = self.o_proj(self.norm(self._heads(y)).flatten(1) * gate)
        return out

    def _attended(
        self,
        states: Mapping[str, Tensor],
        rows: StateRows,
        mixed: Tensor,
        steps: Tensor,
        beta: Tensor,
    ) -> Tensor:
        past = [states[name] for name in ("conv_q", "conv_k", "conv_v")]
        q, k, v = (
            self._heads(conv(x, state, rows))
            for conv, x, state in zip(self.convs, mixed.chunk(3, 1), past, strict=True)
        )
        steps = self._heads(steps)
        bias = self.bias["dt_bias"].view(self.heads, self.size)
        a_log = self.rates["A_log"].flatten()[slice(*self.held)]
        y: Tensor = self.rule(q, k, v, steps, bias, a_log, beta, states["state"], rows)
        return y.flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.heads, self.size))


def delta_sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the heads of Kimi delta attention, their channels, and the width of its
    convolutions."""
    linear = linear_config(config)
    names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if linear is not None:
        config = linear
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    heads, size, width = (size_of(config, name) for name in names)
    if min(heads, size) < 1 or width < 2:
        values = f"{names[0]}={heads}, {names[1]}={size} and {names[2]}={width}"
        raise ModelError(
            f"the checkpoint's config has {values}; expected positive numbers, and a width of at "
            "least 2"
        )
    return heads, size, width


def linear_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part of the config on Kimi delta attention, or None if it has none."""
    linear = config.get("linear_attn_config")
    if linear is not None and not isinstance(linear, Mapping):
        raise ModelError(
            f"the checkpoint's config has linear_attn_config={linear!r}; this architecture needs "
            "names with values"
        )
    return linear


def linear_layers(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return which layers have Kimi delta attention. `linear_attn_config` counts layers from 1."""
    linear = linear_config(config)
    if linear is None:
        return kinds(config, "layer_types", num_layers, "full_attention", "linear_attention")
    listed: list[Any] = [
        read(linear, name, list[str]) or [] for name in ("kda_layers", "full_attn_layers")
    ]
    pairs = [tuple(index in layers for layers in listed) for index in range(1, num_layers + 1)]
    if any(is_linear == is_full for is_linear, is_full in pairs):
        message = "kda_layers and full_attn_layers of linear_attn_config"
        raise ModelError(
            f"the checkpoint's config has {num_layers} layers; expected each of them once in "
            f"{message}, counted from 1"
        )
    return [is_linear for is_linear, _ in pairs]
