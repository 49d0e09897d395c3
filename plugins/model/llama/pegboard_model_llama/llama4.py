"""The text model of Llama 4 (Meta 2025, Scout and Maverick):

attention      most layers attend within chunks and rotate queries and keys, which may be
normalized; the others attend to all
               tokens, do not rotate, and scale the queries of late tokens (Nakanishi 2025,
               "Scalable-Softmax")
feed-forward   in some layers or all, experts whose inputs are scaled, and one that computes every
token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Build,
    Experts,
    Norm,
    Rope,
    Rotation,
    RouterRule,
    read,
    size_of,
)
from pegboard_model_llama.llama import Shape, mlp
from pegboard_models.blocks import ExpertsBlock, PreNorm
from pegboard_models.decoder import Decoder
from pegboard_models.lateness import LateAttention, Lateness
from pegboard_models.norms import PlainNorm
from pegboard_models.rope import rope_parameters, scaled_rope


class Llama4Shape(Shape):
    """The values from a checkpoint's config. rotates, has_experts: of each layer. chunk: in tokens.
    tuning: (positions per step, strength) of the factors of late queries, or None."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__({"rms_norm_eps": 1e-5, **config})
        every = read(config, "no_rope_layer_interval", int) or 4
        rotates: Any = read(config, "no_rope_layers", list) or [
            (i + 1) % every for i in range(self.num_layers)
        ]
        if len(rotates) < self.num_layers:
            raise ModelError(
                f"no_rope_layers has {len(rotates)} entries for {self.num_layers} layers"
            )
        self.rotates = [bool(each) for each in rotates]
        types = read(config, "layer_types", list[str])
        types = types or [
            "chunked_attention" if each else "full_attention" for each in self.rotates
        ]
        if not {"chunked_attention", "full_attention"}.issuperset(types):
            raise ModelError(
                f"layer_types is {types}; expected chunked_attention or full_attention for each "
                "layer"
            )
        chunk = read(config, "attention_chunk_size", int)
        if chunk is not None and chunk < 1:
            raise ModelError(
                f"the checkpoint's config has attention_chunk_size={chunk}; expected a positive "
                "number of tokens"
            )
        self.chunks = [chunk if kind == "chunked_attention" else None for kind in types]
        step = read(config, "interleave_moe_layer_step", int) or 1
        chosen: Any = read(config, "moe_layers", list)
        self.with_experts = range(step - 1, self.num_layers, step) if chosen is None else chosen
        self.dense_size = size_of(config, "intermediate_size_mlp")
        self.num_experts = read(config, "num_experts", int) or size_of(config, "num_local_experts")
        self.top_k = size_of(config, "num_experts_per_tok")
        self.normalizes = read(config, "use_qk_norm", bool) is not False
        self.tuning: tuple[int, float] | None = None
        if read(config, "attn_temperature_tuning", bool) is not False:
            scale = read(config, "attn_scale", float)
            self.tuning = read(config, "floor_scale", int) or 8192, 0.1 if scale is None else scale


class Llama4Layers:
    """The layers of a model, and what they get in each step."""

    def __init__(self, config: Mapping[str, Any], build: Build, shape: Llama4Shape) -> None:
        base, scaling = rope_parameters({"rope_theta": 500_000.0, **config})
        in_pairs = replace(build, rope_style="pairs")
        rope = scaled_rope(
            in_pairs, shape.heads[2], max_positions=shape.max_positions, base=base, scaling=scaling
        )
        if shape.normalizes and rope.magnitude != 1.0:
            raise ModelError(
                "the checkpoint normalizes rotated queries and keys, which its rotary scaling "
                "makes longer"
            )
        self.shape = shape
        self.rope = rope
        self.lateness = (
            Lateness(build, shape.tuning, shape.max_positions, shift=1)
            if shape.tuning and not all(shape.rotates)
            else None
        )

    def layer(self, build: Build, index: int) -> nn.Module:
        """Return a layer of the stack."""
        shape = self.shape
        hidden = shape.hidden_size
        block = build.at("feed_forward")
        is_dense = index not in shape.with_experts
        return PreNorm(
            (
                Norm(build.at("input_layernorm"), hidden, shape.eps),
                ScaledAttention(build.at("self_attn"), index, shape, self.rope),
            ),
            (
                Norm(build.at("post_attention_layernorm"), hidden, shape.eps),
                mlp(block, shape, shape.dense_size) if is_dense else experts(block, shape),
            ),
        )

    def step(self, positions: Tensor) -> tuple[Rotation, Tensor | None]:
        """Return what layers get besides the hidden states."""
        factors = None if self.lateness is None else self.lateness(positions)
        return self.rope(positions), factors


class Llama4Model(Decoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        shape = Llama4Shape(config)
        parts = Llama4Layers(config, build, shape)
        super().__init__(build, parts.layer, shape, rope=parts.rope)
        self.step = parts.step

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, *self.step(positions))


class ScaledAttention(LateAttention):
    """The model normalizes queries and keys after their rotation, which does not change their
    length, so they are normalized before it. Layers that do not rotate scale the queries of late
    tokens."""

    def __init__(self, build: Build, index: int, shape: Llama4Shape, rope: Rope) -> None:
        rotates = shape.rotates[index]
        super().__init__(
            build,
            index,
            shape.hidden_size,
            shape.heads,
            rope=rope if rotates else None,
            bias=shape.qkv_bias,
            output_bias=shape.output_bias,
            chunk=shape.chunks[index],
        )
        if rotates and shape.normalizes:
            self.q_norm = self.k_norm = PlainNorm(build, shape.heads[2], shape.eps)
        self.rotates = rotates

    def forward(
        self, hidden: Tensor, rotation: Rotation | None, factors: Tensor | None = None
    ) -> Tensor:
        return super().forward(hidden, rotation, None if self.rotates else factors)


def experts(build: Build, shape: Llama4Shape) -> ExpertsBlock:
    """Return a block in which the scores of the chosen experts are factors of their inputs."""
    return ExpertsBlock(
        build.at("router"),
        Experts(
            build.at("experts"),
            shape.num_experts,
            shape.hidden_size,
            shape.intermediate_size,
            rule=RouterRule(shape.top_k, score="sigmoid"),
            activation=shape.activation,
            is_transposed=True,
            weighs_input=True,
        ),
        mlp(build.at("shared_expert"), shape),
    )
