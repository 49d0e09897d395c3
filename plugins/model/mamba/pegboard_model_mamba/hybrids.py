"""Models that mix state layers with attention in one stack.

Bamba      Mamba-2, attention in some layers, half of each head's channels rotated (IBM et al. 2024)
Granite 4  Mamba-2, attention without positions in some layers, experts and a shared expert (IBM
2025) Jamba      Mamba, attention without positions in every eighth layer, experts in every second
(Lieber et al. 2024) Falcon-H1  Mamba-2 and attention side by side in every layer (Zuo et al. 2025)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Experts, Rope, Rotation, RouterRule, read, size_of
from pegboard_model_mamba.decoder import StateDecoder, attention, block, head_size
from pegboard_model_mamba.mixers import Mamba, Mamba2, Mamba2Shape, MambaShape
from pegboard_model_mamba.pure import step_limits, step_rank
from pegboard_models.blocks import ExpertsBlock, GatedMLP
from pegboard_models.decoder import Names, scaled

IS_ATTENTION = {
    "attention": True,
    "full_attention": True,
    "mamba": False,
    "linear_attention": False,
    "conv": False,
}


class HybridModel(StateDecoder):
    """A model whose layers have one token mixer and one feed-forward block each, both after a norm.
    A subclass says how they are built. factor: of what each of them adds to the residual."""

    state_name = "mamba"
    second_norm = "pre_ff_layernorm"
    final_norm = "final_layernorm"
    rotary_share = 0.0
    factor = 1.0

    def __init__(self, config: Mapping[str, Any], build: Build, **options: Any) -> None:
        hidden = size_of(config, "hidden_size")
        eps = read(config, "rms_norm_eps", float) or 1e-5
        kinds = self.attention_layers(config)

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            mixer: nn.Module
            if kinds[index]:
                mixer = self.attention(build.at("self_attn"), index, config, rope)
            else:
                mixer = self.state(build.at(self.state_name), index, config)
            second = self.feed_forward(build, index, config)
            parts = ("input_layernorm", mixer), (self.second_norm, second)
            return block(build, hidden, eps, *parts, factor=self.factor)

        rotary = int(head_size(config) * self.rotary_share)
        super().__init__(
            config,
            build,
            make,
            eps=eps,
            names=Names(norm=self.final_norm),
            rotary_dim=rotary,
            **options,
        )

    def attention_layers(self, config: Mapping[str, Any]) -> list[bool]:
        """Return for each layer whether it has attention."""
        return layer_kinds(config, "layer_types")

    def attention(
        self, build: Build, index: int, config: Mapping[str, Any], rope: Rope | None
    ) -> nn.Module:
        return attention(build, index, config, rope)

    def state(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        return Mamba2(build, index, mamba2_shape(config))

    def feed_forward(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        width = size_of(config, "intermediate_size")
        bias = bool(read(config, "mlp_bias", bool))
        return GatedMLP(build.at("feed_forward"), size_of(config, "hidden_size"), width, bias=bias)


class BambaModel(HybridModel):
    rotary_share = 0.5

    def attention_layers(self, config: Mapping[str, Any]) -> list[bool]:
        chosen: Any = read(config, "attn_layer_indices", list) or []
        return [index in chosen for index in range(size_of(config, "num_hidden_layers"))]


class GraniteHybridModel(HybridModel):
    second_norm = "post_attention_layernorm"
    final_norm = "norm"

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        self.factor = read(config, "residual_multiplier", float) or 1.0
        self.rotary_share = float(read(config, "position_embedding_type", str) == "rope")
        embed = read(config, "embedding_multiplier", float) or 1.0
        logits = read(config, "logits_scaling", float) or 1.0
        super().__init__(config, build, embed_scale=embed, logits_scale=1 / logits)

    def attention(
        self, build: Build, index: int, config: Mapping[str, Any], rope: Rope | None
    ) -> nn.Module:
        scale = read(config, "attention_multiplier", float) or 1.0
        return attention(build, index, config, rope, scale=scale)

    def feed_forward(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        hidden = size_of(config, "hidden_size")
        width = size_of(config, "shared_intermediate_size")
        shared = GatedMLP(
            build.at("shared_mlp"), hidden, width, names=("input_linear", "output_linear")
        )
        num_experts = read(config, "num_local_experts", int)
        block = build.at("block_sparse_moe")
        if not num_experts:
            return shared
        rule = RouterRule(size_of(config, "num_experts_per_tok"), renormalize=True)
        names = ("gate_linear", "up_linear", "output_linear")
        width = size_of(config, "intermediate_size")
        experts = Experts(
            block, num_experts, hidden, width, rule=rule, names=names, merged="input_linear"
        )
        return ExpertsBlock(block.at("router.layer"), experts, shared)


class JambaModel(HybridModel):
    def attention_layers(self, config: Mapping[str, Any]) -> list[bool]:
        period = read(config, "attn_layer_period", int) or 8
        offset = read(config, "attn_layer_offset", int)
        offset = 4 if offset is None else offset
        return [index % period == offset for index in range(size_of(config, "num_hidden_layers"))]

    def state(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        hidden = size_of(config, "hidden_size")
        shape = MambaShape(
            hidden=hidden,
            inner=hidden * (read(config, "mamba_expand", int) or 2),
            state=size_of(config, "mamba_d_state"),
            rank=step_rank(config, "mamba_dt_rank"),
            width=read(config, "mamba_d_conv", int) or 4,
            bias=bool(read(config, "mamba_proj_bias", bool)),
            conv_bias=read(config, "mamba_conv_bias", bool) is not False,
            norms="weights",
            eps=read(config, "rms_norm_eps", float) or 1e-6,
        )
        return Mamba(build, index, shape)

    def feed_forward(self, build: Build, index: int, config: Mapping[str, Any]) -> nn.Module:
        period = read(config, "expert_layer_period", int) or 2
        offset = read(config, "expert_layer_offset", int)
        num_experts = (
            read(config, "num_experts", int) or read(config, "num_local_experts", int) or 16
        )
        if num_experts == 1 or index % period != (1 if offset is None else offset):
            return super().feed_forward(build, index, config)
        block = build.at("feed_forward")
        rule = RouterRule(read(config, "num_experts_per_tok", int) or 2)
        sizes = size_of(config, "hidden_size"), size_of(config, "intermediate_size")
        return ExpertsBlock(
            block.at("router"), Experts(block.at("experts"), num_experts, *sizes, rule=rule)
        )


class FalconH1Model(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        hidden = size_of(config, "hidden_size")
        eps = read(config, "rms_norm_eps", float) or 1e-5
        factors = config.get("mlp_multipliers") or (1.0, 1.0)
        width = size_of(config, "intermediate_size")
        bias = bool(read(config, "mlp_bias", bool))

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            mlp = ScaledMLP(build.at("feed_forward"), hidden, width, factors, bias=bias)
            both = SideBySide(build, index, config, rope)
            parts = ("input_layernorm", both), ("pre_ff_layernorm", mlp)
            return block(build, hidden, eps, *parts)

        super().__init__(
            config,
            build,
            make,
            eps=eps,
            names=Names(norm="final_layernorm"),
            rotary_dim=head_size(config),
            embed_scale=read(config, "embedding_multiplier", float) or 1.0,
            logits_scale=read(config, "lm_head_multiplier", float) or 1.0,
        )


class ScaledMLP(GatedMLP):
    """factors: of gate and of the result."""

    def __init__(
        self, build: Build, hidden: int, width: int, factors: tuple[float, float], *, bias: bool
    ) -> None:
        super().__init__(build, hidden, width, bias=bias)
        gate, self.factor = factors
        pair = torch.tensor((gate, 1.0), dtype=getattr(torch, build.dtype), device=build.device)
        held = self.down_proj.in_features
        self.gate_factor = None if gate == 1.0 else pair.repeat_interleave(held)

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        both = self.gate_up_proj(hidden)
        if self.gate_factor is not None:
            both = both * self.gate_factor
        return scaled(self.down_proj(self.activation(both)), self.factor)


class SideBySide(nn.Module):
    """[T, hidden] → [T, hidden]: the sum of Mamba-2 and attention. The states are named by indices
    after those of all layers."""

    def __init__(
        self, build: Build, index: int, config: Mapping[str, Any], rope: Rope | None
    ) -> None:
        super().__init__()

        def factor(name: str) -> float:
            value = read(config, name, float)
            return 1.0 if value is None else value

        self.ssm_in = factor("ssm_in_multiplier")
        self.ssm_out = factor("ssm_out_multiplier")
        self.attention_in = factor("attention_in_multiplier")
        self.attention_out = factor("attention_out_multiplier")
        num_layers = size_of(config, "num_hidden_layers")
        scale = head_size(config) ** -0.5 * factor("key_multiplier")
        self.mamba = Mamba2(build.at("mamba"), num_layers + index, mamba2_shape(config))
        self.self_attn = attention(build.at("self_attn"), index, config, rope, scale=scale)

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        mixed = scaled(self.mamba.forward(scaled(hidden, self.ssm_in)), self.ssm_out)
        return mixed + scaled(
            self.self_attn.forward(scaled(hidden, self.attention_in), rotation), self.attention_out
        )


def mamba2_shape(config: Mapping[str, Any]) -> Mamba2Shape:
    """Return the shape of the Mamba-2 layers of Bamba, Granite and Falcon-H1. Only Falcon-H1's
    configs have mamba_d_ssm, mamba_rms_norm and ssm_multipliers."""
    hidden = size_of(config, "hidden_size")
    heads = size_of(config, "mamba_n_heads")
    inner = read(config, "mamba_d_ssm", int)
    bias = bool(read(config, "mamba_proj_bias", bool))
    is_falcon = "ssm_multipliers" in config or "mamba_rms_norm" in config
    norm = "before" if read(config, "mamba_norm_before_gate", bool) is not False else "after"
    factors = read(config, "ssm_multipliers", list[float]) or ()
    return Mamba2Shape(
        hidden=hidden,
        heads=heads,
        head_dim=(inner or hidden * (read(config, "mamba_expand", int) or 2)) // heads,
        groups=read(config, "mamba_n_groups", int) or 1,
        state=size_of(config, "mamba_d_state"),
        width=read(config, "mamba_d_conv", int) or 4,
        bias=bias,
        conv_bias=read(config, "mamba_conv_bias", bool) is not False,
        out_bias=bool(read(config, "projectors_bias", bool)) if is_falcon else bias,
        eps=read(config, "rms_norm_eps", float) or 1e-5,
        limits=step_limits(config),
        norm=("after" if not is_falcon else norm if read(config, "mamba_rms_norm", bool) else ""),
        factors=() if {*factors} == {1.0} else factors,
    )


def layer_kinds(config: Mapping[str, Any], name: str) -> list[bool]:
    """Return for each layer whether it has attention. Raises ModelError if the config does not say
    it."""
    kinds = read(config, name, list[str])
    if (
        kinds is None
        or len(kinds) != size_of(config, "num_hidden_layers")
        or not set(kinds) <= IS_ATTENTION.keys()
    ):
        message = f"expected one of {', '.join(IS_ATTENTION)} for each of num_hidden_layers"
        raise ModelError(f"the checkpoint's config has {name}={kinds!r}; {message}")
    return [IS_ATTENTION[kind] for kind in kinds]
