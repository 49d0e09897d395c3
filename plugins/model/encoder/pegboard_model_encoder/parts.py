"""Parts that encoders share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Attention, Build, Layer, Linear, QKVLinear, Rope, Rotation, read
from pegboard.layers.build import PlainTensor

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "sigmoid": torch.sigmoid,
}
"""Activations by their Hugging Face names."""
OPS = {"silu": "silu_mul", "swish": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}
"""The ops that compute some of them together with the product."""


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return an activation by its Hugging Face name. Raises ModelError if it is not known."""
    if name not in ACTIVATIONS:
        raise ModelError(f"unknown activation {name!r:.60}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def head_size(hidden: int, heads: int) -> int:
    """Return the channels of a head. Raises ModelError if the heads have no equal share."""
    if heads < 1 or hidden % heads:
        raise ModelError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    return hidden // heads


def refuse(config: Mapping[str, Any], **only: Any) -> None:
    """Raise ModelError for values of the config that mean another computation. only: the value of
    each key that is supported. A key that the config lacks is right, and so is None."""
    for name, value in only.items():
        if config.get(name) not in (None, value):
            raise ModelError(
                f"the checkpoint's config has {name}={config[name]!r:.60}; only {value!r} is "
                "supported"
            )


class GatedActivation(Layer):
    """[T, 2F] → [T, F]: activation(gate) · other. The gate is the first half of the columns, or,
    with `is_last`, the second."""

    def __init__(self, build: Build, kind: str, *, is_last: bool = False) -> None:
        super().__init__(build)
        self.activation = activation_of(kind)
        self.op = None if is_last else OPS.get(kind)
        self.is_last = is_last

    def bind(self) -> None:
        if self.op is not None:
            self.forward = self.build.kernels[self.op]
            return
        activation = self.activation
        is_last = self.is_last

        def forward(x: Tensor) -> Tensor:
            half = x.shape[-1] // 2
            first = x[:, :half]
            second = x[:, half:]
            return activation(second) * first if is_last else activation(first) * second

        self.forward = forward


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)). names: of gate and up, or of the one module that has both;
    the last one is `down`. biases: whether the first matrices have one, and the last one."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        width: int,
        activation: str,
        *,
        names: tuple[str, ...],
        biases: tuple[bool, bool],
        gate_is_last: bool = False,
    ) -> None:
        super().__init__()
        *first, down = names
        parts = dict.fromkeys(first, (width,) * (2 // len(first)))
        self.both = Linear(build, hidden, 2 * width, parts=parts, bias=biases[0], split="rows")
        self.activation = GatedActivation(build, activation, is_last=gate_is_last)
        self.down = Linear(build.at(down), width, hidden, bias=biases[1], split="columns")

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.activation(self.both(x)))
        return result


class RotatedAttention(nn.Module):
    """Attention in both directions, with rotated queries and keys. qkv, out: names of the
    projections. window: see `AttentionLayer`."""

    def __init__(
        self,
        build: Build,
        index: int,
        hidden: int,
        num_heads: int,
        rope: Rope,
        *,
        qkv: tuple[str, ...],
        out: str,
        biases: tuple[bool, bool],
        window: int | None = None,
    ) -> None:
        super().__init__()
        heads = num_heads, num_heads, head_size(hidden, num_heads)
        self.qkv = QKVLinear(build, hidden, *heads, bias=biases[0], names=qkv)
        self.attention = Attention(build, index, *heads, encoder=True, rope=rope, window=window)
        self.out = Linear(
            build.at(out), hidden, hidden, bias=biases[1], split="columns", heads=heads
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        result: Tensor = self.out(self.attention(*self.qkv(x), rotation))
        return result


class TokenTypes(Layer):
    """A table of token types [num_types, width]. Every token gets the vector of type 0; `change`
    says what type 1 adds to it."""

    def __init__(self, build: Build, num_types: int, width: int) -> None:
        super().__init__(build)
        self.shape = (num_types, width)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.table = PlainTensor({name: (0, self.shape[0])}, self.shape, self.build)
        return [WantedWeight(name, self.shape)] if self.shape[0] else []

    def accept(self, piece: WeightPiece) -> None:
        self.table.accept(piece)

    def bind(self) -> None:
        if not self.shape[0]:
            self.forward = lambda hidden: hidden
            return
        first = self.table.data[0]
        self.forward = lambda hidden: hidden + first

    def change(self, types: Tensor) -> Tensor:
        """Return what the second token type adds to the first: types [T] of 0 or 1 → [T,
        hidden]."""
        return types.unsqueeze(1) * (self.table.data[1] - self.table.data[0])


def check_positions(build: Build, longest: int) -> None:
    """Raise ModelError if a step may have a position that the model does not have. longest: in
    tokens."""
    if (build.max_positions or 0) > longest:
        raise ModelError(
            f"the model has positions for {longest} tokens; set max_model_len to at most {longest}"
        )


def flag_of(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a value that is true or false."""
    value = read(config, name, bool)
    return default if value is None else value


def number_of(config: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number."""
    value = read(config, name, float)
    return default if value is None else value
