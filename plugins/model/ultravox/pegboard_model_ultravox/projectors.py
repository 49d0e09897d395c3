"""What makes rows of several features of the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, Linear, Norm, read, size_of
from pegboard_model_ultravox.sizes import STACK
from pegboard_models.language import text_config
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.whisper_encoder import EncoderLayer
from pegboard_models.whisper_sizes import WhisperSizes

EPS = 1e-6
INNER = 4096
"""The width between the two matrices, if the config does not say."""


def projector_of(
    build: Build, config: Mapping[str, Any], sizes: WhisperSizes
) -> Callable[[Tensor], Tensor]:
    """Build ([rows of a chunk, features · width]) → [rows, hidden]. Raises ModelError."""
    depth = read(config, "num_projector_layers", int) or 0
    stack = read(config, "stack_factor", int) or STACK
    build = build.alone()
    out_features = size_of(text_config(config), "hidden_size")
    if depth < 0:
        raise ModelError(
            f"the checkpoint's config has num_projector_layers={depth}; expected a whole number "
            "from 0 on. Correct it"
        )
    if depth:
        return TransformerProjector(build, sizes, stack, depth, out_features)
    return FeedForwardProjector(build, config, stack * sizes.hidden_size, out_features)


class FeedForwardProjector(nn.Module):
    """Two matrices with an activation between them, and two norms: before the first one, and before
    or after the second one (projector_ln_mid)."""

    def __init__(
        self, build: Build, config: Mapping[str, Any], in_features: int, out_features: int
    ) -> None:
        super().__init__()
        inner = read(config, "hidden_size", int) or INNER
        name = read(config, "projector_act", str) or "swiglu"
        if name == "swiglu" and inner % 2:
            raise ModelError(
                f"the checkpoint's config has hidden_size={inner} with projector_act='swiglu'; "
                "expected an even number. Correct it"
            )
        self.activation = swiglu if name == "swiglu" else activation_of(name)
        width = inner // 2 if name == "swiglu" else inner
        self.first_norm = Norm(build.at("ln_pre"), in_features, EPS)
        self.first = Linear(build.at("linear_1"), in_features, inner)
        self.last = Linear(build.at("linear_2"), width, out_features)
        self.is_between = bool(read(config, "projector_ln_mid", bool))
        self.last_norm = (
            Norm(build.at("ln_mid"), width, EPS)
            if self.is_between
            else Norm(build.at("ln_post"), out_features, EPS)
        )

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.activation(self.first(self.first_norm(features)))
        rows: Tensor = (
            self.last(self.last_norm(hidden))
            if self.is_between
            else self.last_norm(self.last(hidden))
        )
        return rows


def swiglu(x: Tensor) -> Tensor:
    """([n, 2 · size]) → [n, size]: the first half times the SiLU of the second one."""
    value, gate = x.chunk(2, -1)
    return functional.silu(gate) * value


class TransformerProjector(nn.Module):
    """Layers of Whisper's encoder, whose rows attend to those of their chunk, between two
    matrices."""

    def __init__(
        self, build: Build, sizes: WhisperSizes, stack: int, depth: int, out_features: int
    ) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.first_norm = Norm(build.at("ln_pre"), stack * width, EPS)
        self.first = Linear(build.at("linear_in"), stack * width, width, bias=True)
        shape = (sizes.max_positions, width)
        self.positions = Parameters(build.at("embed_positions"), {"weight": shape})
        layers = build.at("layers")
        self.layers = nn.ModuleList(EncoderLayer(layers.at(index), sizes) for index in range(depth))
        self.last_norm = Norm(build.at("ln_post"), width, EPS)
        self.last = Linear(build.at("linear_out"), width, out_features, bias=True)

    def forward(self, features: Tensor) -> Tensor:
        count = len(features)
        hidden = self.first(self.first_norm(features)) + self.positions["weight"][:count]
        for layer in self.layers:
            hidden = layer.forward(hidden, [count])
        rows: Tensor = self.last(self.last_norm(hidden))
        return rows
