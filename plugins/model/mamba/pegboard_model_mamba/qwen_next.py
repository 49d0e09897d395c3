"""Qwen3-Next (Qwen Team 2025): gated delta networks, gated attention in every fourth layer, and
experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers import (
    Attention,
    Build,
    Experts,
    Linear,
    Rope,
    Rotation,
    RouterRule,
    StateLayer,
    read,
    size_of,
)
from pegboard.layers.shards import Span, scaled, stacked
from pegboard.ops import StateRows
from pegboard_model_mamba.decoder import StateDecoder, block, head_size
from pegboard_model_mamba.hybrids import layer_kinds
from pegboard_models.blocks import ExpertsBlock, GatedMLP, PreNorm, heads_of
from pegboard_models.norms import OffsetNorm
from pegboard_models.parameters import Parameters
from pegboard_models.short_conv import ShortConv


class Qwen3NextModel(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        eps = read(config, "rms_norm_eps", float) or 1e-6
        num_layers = size_of(config, "num_hidden_layers")
        every = read(config, "full_attention_interval", int) or 4
        if config.get("layer_types") is None:
            kinds = [(index + 1) % every == 0 for index in range(num_layers)]
        else:
            kinds = layer_kinds(config, "layer_types")

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            mixer: nn.Module
            if kinds[index]:
                mixer = GatedAttention(build.at("self_attn"), index, config, rope)
            else:
                mixer = GatedDeltaNet(build.at("linear_attn"), index, config)
            return layer_of(build, index, config, mixer)

        super().__init__(
            config, build, make, eps=eps, rotary_dim=rotary_dim(config), norm=OffsetNorm
        )


def rotary_dim(config: Mapping[str, Any]) -> int:
    """Return how many channels of a head are rotated."""
    rope: Any = config.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or read(config, "partial_rotary_factor", float)
    return int(head_size(config) * (share or 0.25))


def layer_of(build: Build, index: int, config: Mapping[str, Any], mixer: nn.Module) -> PreNorm:
    """Return a layer. mixer: its first part."""
    return block(
        build,
        size_of(config, "hidden_size"),
        read(config, "rms_norm_eps", float) or 1e-6,
        ("input_layernorm", mixer),
        ("post_attention_layernorm", feed_forward(build.at("mlp"), index, config)),
        norm=OffsetNorm,
    )


class GatedDeltaNet(nn.Module):
    """[T, hidden] → [T, hidden]: the gated delta rule over convolved queries, keys and values, with
    a gate (Yang et al. 2024). The checkpoint's projections have all channels of the first key head
    first, then those of the second."""

    def __init__(self, build: Build, index: int, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        width = size_of(config, "linear_conv_kernel_dim")
        groups = size_of(config, "linear_num_key_heads")
        heads = size_of(config, "linear_num_value_heads")
        self.size = size_of(config, "linear_key_head_dim")
        self.head_dim = size_of(config, "linear_value_head_dim")
        self.eps = read(config, "rms_norm_eps", float) or 1e-6
        if heads % groups:
            message = f"the checkpoint's config has linear_num_value_heads={heads}"
            raise ModelError(f"{message}; expected a multiple of linear_num_key_heads={groups}")
        keys = groups * self.size
        inner = heads * self.head_dim
        share = GroupShare(heads, groups, *build.tensor.heads(heads, groups))
        self.heads = share.num_heads
        self.groups = share.num_groups
        self.inner = self.heads * self.head_dim
        self.sizes = self.groups * self.size, self.groups * self.size, self.inner
        self.in_proj = Linear(build.at("in_proj_qkvz"), hidden, 2 * keys + 2 * inner)
        rows = share.sections(self.size, self.size, each=(self.head_dim, self.head_dim))
        self.in_proj.hold({self.in_proj.build.path: rows})
        self.steps_proj = Linear(build.at("in_proj_ba"), hidden, 2 * heads)
        self.steps_proj.hold({self.steps_proj.build.path: share.sections(each=(1, 1))})
        repeats = self.heads // self.groups
        shared = repeats * self.head_dim
        self.order = in_groups(build, self.groups, self.size, self.size, shared, shared)
        self.steps_order = in_groups(build, self.groups, repeats, repeats)
        held_keys = keys, scaled(share.held_groups, self.size)
        channels = [held_keys, held_keys, (inner, scaled(share.held, self.head_dim))]
        self.conv = ShortConv(
            build.at("conv1d"),
            2 * keys + inner,
            width,
            bias=False,
            activates=True,
            held=stacked(channels),
        )
        self.weights = Parameters(
            build, dict.fromkeys(("A_log", "dt_bias"), (heads,)), "float32", held=[share.held]
        )
        self.norm = Parameters(build.at("norm"), {"weight": (self.head_dim,)})
        self.out_proj = Linear(
            build.at("out_proj"),
            inner,
            hidden,
            split="columns",
            heads=(heads, groups, self.head_dim),
        )
        self.rule = build.kernels["gated_delta_rule"]
        self.gated = build.kernels["gated_norm"]
        state = KVTensor("state", (self.heads, self.head_dim, self.size), "float32")
        self.states = StateLayer(
            build, index, state, KVTensor("conv", (sum(self.sizes), width - 1), build.dtype)
        )

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        projected = self.in_proj(hidden).index_select(1, self.order)
        beta, steps = self.steps_proj(hidden).index_select(1, self.steps_order).chunk(2, 1)
        mixed, gate = projected.split((sum(self.sizes), self.inner), 1)
        y = self.states(self._attended, self.inner, mixed, steps, beta)
        out: Tensor = self.out_proj(
            self.gated(y, gate, self.norm["weight"], self.eps, self.head_dim, False)
        )
        return out

    def _attended(
        self,
        states: Mapping[str, Tensor],
        rows: StateRows,
        mixed: Tensor,
        steps: Tensor,
        beta: Tensor,
    ) -> Tensor:
        q, k, v = self.conv(mixed, states["conv"], rows).split(self.sizes, 1)
        q = q.unflatten(1, (self.groups, -1))
        k = k.unflatten(1, (self.groups, -1))
        v = v.unflatten(1, (self.heads, -1))
        weights = self.weights
        y: Tensor = self.rule(
            q, k, v, steps, weights["dt_bias"], weights["A_log"], beta, states["state"], rows
        )
        return y.flatten(1)


@dataclass(frozen=True)
class GroupShare:
    """The heads that this rank holds of `heads`, and the groups of which it holds heads."""

    heads: int
    groups: int
    held: Span
    held_groups: Span

    @property
    def num_heads(self) -> int:
        return self.held[1] - self.held[0]

    @property
    def num_groups(self) -> int:
        return self.held_groups[1] - self.held_groups[0]

    def sections(self, *shared: int, each: Sequence[int]) -> list[tuple[int, Span]]:
        """Return the sections of a projection (see `Linear.hold`) that has, group by group, some
        channels of the whole group, and then some of each of its heads."""
        repeats = self.heads // self.groups
        sections: list[tuple[int, Span]] = []
        for group in range(self.groups):
            start, stop = (min(max(head - group * repeats, 0), repeats) for head in self.held)
            is_held = start < stop
            sections += [(size, (0, size * is_held)) for size in shared]
            sections += [(size * repeats, (size * start, size * stop)) for size in each]
        return sections


class GatedAttention(nn.Module):
    """Attention whose results are multiplied by the sigmoid of a gate. q_proj has a head's query,
    then its gate."""

    def __init__(
        self, build: Build, index: int, config: Mapping[str, Any], rope: Rope | None
    ) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        heads, kv_heads, head_dim = counts = heads_of(config)
        bias = bool(read(config, "attention_bias", bool))
        self.heads = heads
        sizes = 2 * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
        self.qkv_proj = Linear(build, hidden, sum(sizes), parts=parts, bias=bias)
        held, held_kv = build.tensor.heads(heads, kv_heads)
        spans = scaled(held, 2 * head_dim), scaled(held_kv, head_dim), scaled(held_kv, head_dim)
        self.qkv_proj.hold(
            {
                f"{build.path}.{name}": [(rows, span)]
                for (name, rows), span in zip(parts.items(), spans, strict=True)
            }
        )
        inner = (held[1] - held[0]) * head_dim
        shared = (held_kv[1] - held_kv[0]) * head_dim
        self.sizes = inner, inner, shared, shared
        first = in_groups(build, held[1] - held[0], head_dim, head_dim)
        self.order = torch.cat(
            (first, torch.arange(2 * inner, sum(self.sizes), device=first.device))
        )
        eps = read(config, "rms_norm_eps", float) or 1e-6
        self.q_norm, self.k_norm = (
            OffsetNorm(build.at(name), head_dim, eps) for name in ("q_norm", "k_norm")
        )
        self.attention = Attention(build, index, heads, kv_heads, head_dim, rope=rope)
        self.o_proj = Linear(
            build.at("o_proj"),
            heads * head_dim,
            hidden,
            bias=bias,
            split="columns",
            heads=counts,
        )
        self.head_dim = head_dim

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        q, gate, k, v = self.qkv_proj(hidden).index_select(1, self.order).split(self.sizes, 1)
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in (q, k, v))
        mixed = self.attention(self.q_norm(q), self.k_norm(k), v, rotation)
        out: Tensor = self.o_proj(mixed * gate.sigmoid())
        return out


def feed_forward(build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
    """Return the feed-forward block of a layer: experts, or a dense one if the config says so."""
    hidden = size_of(config, "hidden_size")
    num_experts = read(config, "num_experts", int) or 0
    dense: Any = read(config, "mlp_only_layers", list) or []
    if (
        index in dense
        or not num_experts
        or (index + 1) % (read(config, "decoder_sparse_step", int) or 1)
    ):
        return GatedMLP(build, hidden, size_of(config, "intermediate_size"))
    rule = RouterRule(
        size_of(config, "num_experts_per_tok"),
        renormalize=read(config, "norm_topk_prob", bool) is not False,
    )
    experts = Experts(
        build.at("experts"),
        num_experts,
        hidden,
        size_of(config, "moe_intermediate_size"),
        rule=rule,
    )
    width = size_of(config, "shared_expert_intermediate_size")
    shared = GatedMLP(build.at("shared_expert"), hidden, width)
    return ExpertsBlock(build.at("gate"), experts, shared, build.at("shared_expert_gate"))


def in_groups(build: Build, groups: int, *sizes: int) -> Tensor:
    """Return the order that puts the channels of all groups' first parts first, then those of the
    second parts, and so on. Each of the groups has parts of these sizes."""
    channels = torch.arange(groups * sum(sizes), device=build.device).view(groups, -1)
    return torch.cat([part.flatten() for part in channels.split(sizes, 1)])
