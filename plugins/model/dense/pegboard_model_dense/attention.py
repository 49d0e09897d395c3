"""Grouped-query attention with its projections."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Attention, Build, Layer, Linear, Rope, Rotation
from pegboard_model_dense.architecture import Architecture, LayerSizes
from pegboard_model_dense.positions import AlibiAttention
from pegboard_model_dense.rows import ArrangedLinear, Rows
from pegboard_models.norms import heads_held

Step = tuple[Any, ...]
"""What all layers need in a step: the rotation of each rotary embedding, or the positions for
biases, and the number of the pass."""


class SelfAttention(nn.Module):
    """Grouped-query attention with its projections. Queries and keys may be normalized before or
    after they are rotated. The results may have a gate."""

    def __init__(
        self, build: Build, index: int, model: Architecture, sizes: LayerSizes, ropes: list[Rope]
    ) -> None:
        super().__init__()
        names = model.names
        heads = (model.num_heads, sizes.num_kv_heads, model.head_dim)
        if model.num_heads % sizes.num_kv_heads:
            raise ModelError(
                f"{build.path}: {model.num_heads} heads cannot share {sizes.num_kv_heads} heads of "
                "keys equally"
            )
        if model.alibi and build.sees_all:
            raise ModelError(f"{build.path}: biases of scores need attention that is causal")
        self.build = build
        self.qkv = model.qkv(build, model, sizes.num_kv_heads)
        inner = model.num_heads * model.head_dim
        rows = Rows(None, model.transposed)
        self.out = ArrangedLinear(
            build.at(names.out),
            inner,
            model.hidden_size,
            rows,
            bias=model.out_bias,
            split="columns",
            heads=heads,
        )
        self.gate = None
        if names.gate:
            gate = build.at(names.gate)
            self.gate = Linear(gate, model.hidden_size, inner, split="rows", heads=heads)
        self.number = 0 if model.alibi else sizes.rope
        rope = None if self.number is None or model.alibi else self.rotates(ropes[self.number])
        more: dict[str, Any] = {
            "scale": sizes.scale,
            "window": sizes.window,
            "soft_cap": model.soft_cap,
            "rope": rope,
        }
        self.attention: list[Attention] = []  # one for each pass
        for number in range(model.passes):
            place = number * len(model.layers) + index
            if model.alibi:
                self.attention.append(AlibiAttention(build, place, model, sizes))
            else:
                self.attention.append(Attention(build, place, *heads, **more))
        self.q_norm = self.k_norm = None
        if model.head_norm is not None:
            of_queries, of_keys = heads_held(build, *heads[:2])
            kind = (model.head_dim, model.norm, model.eps)
            self.q_norm = model.head_norm(build.at(names.q_norm), of_queries, *kind)
            self.k_norm = model.head_norm(build.at(names.k_norm), of_keys, *kind)

    def rotates(self, rope: Rope) -> Rope | None:
        """Return the rope with which attention rotates queries and keys."""
        return rope

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        q, k, v = self.qkv(hidden)
        rotation = None if self.number is None else step[self.number]
        q, k = self.normalized(q, k, rotation)
        mixed = self.attention[step[-1]](q, k, v, rotation)
        out: Tensor = self.out(mixed if self.gate is None else mixed * self.gate(hidden).sigmoid())
        return out

    def normalized(self, q: Tensor, k: Tensor, rotation: Any) -> tuple[Tensor, Tensor]:
        """Return queries and keys before attention rotates them."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class RotatedFirst(SelfAttention):
    """Each query and key is normalized after its rotation."""

    def rotates(self, rope: Rope) -> None:
        self.rotate = Rotate(self.build, rope)

    def normalized(self, q: Tensor, k: Tensor, rotation: Any) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None and self.k_norm is not None
        return self.q_norm(self.rotate(q, rotation)), self.k_norm(self.rotate(k, rotation))


class Rotate(Layer):
    """(x [T, heads, D], rotation) → x with its channels rotated, for models that normalize what was
    rotated. Otherwise `Attention` rotates. Recordings rotate only within attention, so such a model
    is not recorded."""

    def __init__(self, build: Build, rope: Rope) -> None:
        super().__init__(build)
        self.pairs = rope.pairs

    def bind(self) -> None:
        rope = self.build.kernels["rope"]
        pairs = self.pairs

        def forward(x: Tensor, rotation: Rotation) -> Tensor:
            rotated: Tensor = rope(x, *rotation, pairs)
            return rotated

        self.forward = forward
