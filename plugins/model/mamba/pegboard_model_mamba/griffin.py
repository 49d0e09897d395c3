"""RecurrentGemma (Griffin, De et al. 2024): two recurrent blocks after each attention over a
window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers import Activation, Build, Linear, Rotation, StateLayer, read, size_of
from pegboard.layers.config import rope_parameters
from pegboard.ops import StateRows
from pegboard_model_mamba.decoder import attention, block, head_size, rope_of
from pegboard_models.blocks import GatedMLP
from pegboard_models.decoder import Decoder, DecoderSizes, Names
from pegboard_models.norms import OffsetNorm
from pegboard_models.parameters import Parameters
from pegboard_models.short_conv import ShortConv

DECAY = 8.0
"""c of equation 3."""
SMALLEST = 1e-30
"""Of a step of the scan, so that it can be divided by."""
KINDS = {"recurrent": False, "attention": True}


class GriffinSizes(DecoderSizes):
    """The values from a checkpoint's config. width: channels of a recurrent block. heads: of its
    gates. taps: of its convolution. has_attention: of each layer."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config, is_tied=True)
        self.width = read(config, "lru_width", int) or self.hidden_size
        self.heads = size_of(config, "num_attention_heads")
        self.taps = read(config, "conv1d_width", int) or 4
        self.activation = read(config, "hidden_activation", str) or "gelu_pytorch_tanh"
        kinds = read(config, "block_types", list[str]) or ["recurrent", "recurrent", "attention"]
        if not set(kinds) <= KINDS.keys() or self.width % self.heads:
            raise ModelError(
                f"the checkpoint's config has block_types={kinds}, lru_width={self.width} and "
                f"num_attention_heads={self.heads}; expected {' or '.join(KINDS)}, and a width "
                "that the heads divide"
            )
        self.has_attention = [KINDS[kinds[i % len(kinds)]] for i in range(self.num_layers)]


class RecurrentGemmaModel(Decoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        sizes = GriffinSizes(config)
        hidden = sizes.hidden_size
        inner = size_of(config, "intermediate_size") // 2
        window = read(config, "attention_window_size", int) or 2048
        factor = read(rope_parameters(config)[1], "partial_rotary_factor", float)
        factor = factor or read(config, "partial_rotary_factor", float) or 0.5
        config = {"max_position_embeddings": 8192, "num_key_value_heads": None, **config}
        rope = rope_of(build, config, int(head_size(config) * factor))

        def make(build: Build, index: int) -> nn.Module:
            place = build.at("temporal_block")
            mixer: nn.Module = (
                attention(place, index, config, rope, output_bias=True, window=window)
                if sizes.has_attention[index]
                else RecurrentBlock(place, index, sizes)
            )
            second = GatedMLP(build.at("mlp_block"), hidden, inner, sizes.activation, bias=True)
            parts = ("temporal_pre_norm", mixer), ("channel_pre_norm", second)
            return block(build, hidden, sizes.eps, *parts, norm=OffsetNorm)

        # the factor is rounded as in the published code
        scale = torch.tensor(hidden**0.5, dtype=torch.bfloat16).item()
        names = Names(norm="final_norm")
        super().__init__(
            build, make, sizes, norm=OffsetNorm, rope=rope, names=names, embed_scale=scale
        )
        self.cap = read(config, "logits_soft_cap", float) or 30.0

    def forward(self, hidden: Tensor, *positions: Tensor) -> Tensor:
        assert self.rope is not None
        is_first = (positions[0] == 0).unsqueeze(1)
        return self.layers(hidden, self.rope(*positions), is_first)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.tanh(super().logits(hidden) / self.cap) * self.cap


class RecurrentBlock(nn.Module):
    """[T, hidden] → [T, hidden]: a convolution and a real-gated linear recurrent unit, times a
    branch of its own (De et al. 2024, section 2.4). With a = exp(-c softplus(p) r), h ← a h +
    √(1 - a²) (i x), where the gates r and i are functions of x. The first token of a request is not
    multiplied by the root."""

    def __init__(self, build: Build, index: int, sizes: GriffinSizes) -> None:
        super().__init__()
        width = sizes.width
        self.width = width
        self.scan = build.kernels["selective_scan"]
        self.gate = Linear(build.at("linear_y"), sizes.hidden_size, width, bias=True)
        self.input = Linear(build.at("linear_x"), sizes.hidden_size, width, bias=True)
        self.conv = ShortConv(build.at("conv_1d"), width, sizes.taps, bias=True, activates=False)
        each = width // sizes.heads
        gates = {
            f"{name}_gate_{kind}": (sizes.heads, *shape)
            for name in ("input", "recurrent")
            for kind, shape in (("weight", (each, each)), ("bias", (each,)))
        }
        self.weights = Parameters(build.at("rg_lru"), {"recurrent_param": (width,), **gates})
        self.activation = Activation(build, sizes.activation)
        self.output = Linear(build.at("linear_out"), width, sizes.hidden_size, bias=True)
        self.ones = torch.ones(1, 1, device=build.device)
        self.scales = torch.zeros(width, 1, device=build.device)
        self.states = StateLayer(
            build,
            index,
            KVTensor("state", (width, 1), "float32"),
            KVTensor("conv", (width, sizes.taps - 1), build.dtype),
        )

    def forward(self, hidden: Tensor, rotation: Rotation | None, is_first: Tensor) -> Tensor:
        gate = self.gate(hidden)
        x = self.states(self._convolved, self.width, self.input(hidden))
        steps = self._gate(x, "recurrent") * softplus(self.weights["recurrent_param"].float())
        steps = (DECAY * steps).clamp_min(SMALLEST)
        root = (-torch.expm1(-2 * steps)).sqrt().masked_fill(is_first, 1.0)
        given = x.float() * self._gate(x, "input") * root / steps
        # the scan takes numbers whose softplus is the step
        before = steps + torch.log(-torch.expm1(-steps))
        mixed = self.states(self._scanned, self.width, given, before)
        out: Tensor = self.output(self.activation(torch.cat((gate, mixed.to(gate.dtype)), -1)))
        return out

    def _gate(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}_gate_weight"]
        heads = x.view(len(x), len(weight), -1)
        gates = torch.einsum("thi,hij->thj", heads, weight) + self.weights[f"{name}_gate_bias"]
        return gates.float().sigmoid().flatten(1)

    def _convolved(self, states: Mapping[str, Tensor], rows: StateRows, x: Tensor) -> Tensor:
        return self.conv(x, states["conv"], rows)

    def _scanned(
        self, states: Mapping[str, Tensor], rows: StateRows, x: Tensor, steps: Tensor
    ) -> Tensor:
        """Scan with one number per channel, b = c = 1, a = -1, and nothing that skips."""
        ones = self.ones.expand(len(x), 1).contiguous()
        y: Tensor = self.scan(
            x, steps, self.scales, ones, ones, self.scales[:, 0], states["state"], rows
        )
        return y
