"""How the parts of a layer follow each other, and the parts that many models share.

Each part is called as part(hidden [T, hidden], *step) and returns [T, hidden]. The step is what the
decoder gives to all layers, usually the rotation of its positions. Only attention reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Activation,
    Attention,
    Build,
    Experts,
    Linear,
    QKVLinear,
    Rope,
    Rotation,
    read,
    size_of,
)
from pegboard_models.decoder import scaled
from pegboard_models.norms import HeadNorm, heads_held


class PreNorm(nn.Module):
    """x + factor · part(norm(x)), for one part after the other. parts: (norm, part), or (norm,
    part, norm of its result). `residual` is the sum so far."""

    def __init__(self, *parts: tuple[nn.Module, ...], factor: float = 1.0) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleList(part) for part in parts)
        self.factor = factor
        self.steps: list[Any] = [
            (norm, part.forward, after[0] if after else None) for norm, part, *after in parts
        ]

    def forward(
        self, hidden: Tensor, residual: Tensor | None, *step: Any
    ) -> tuple[Tensor, Tensor | None]:
        for norm, part, after in self.steps:
            hidden, residual = norm.add(hidden, residual)
            hidden = part(hidden, *step)
            hidden = scaled(hidden if after is None else after(hidden), self.factor)
        return hidden, residual


class PostNorm(nn.Module):
    """x + norm(part(x)), for one part after the other (OLMo 2, EXAONE 4, Chameleon). parts: (part,
    norm of its result)."""

    def __init__(self, *parts: tuple[nn.Module, nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ModuleList(part) for part in parts)
        self.steps: list[Any] = [(part.forward, norm) for part, norm in parts]

    def forward(self, hidden: Tensor, residual: None, *step: Any) -> tuple[Tensor, None]:
        for part, norm in self.steps:
            hidden = hidden + norm(part(hidden, *step))
        return hidden, None


class SelfAttention(nn.Module):
    """Grouped-query attention with its projections. heads: number of query heads, of KV heads, and
    their channels. norm: of queries and keys, before they are rotated; None = they are not
    normalized. names: of these norms. qkv: see `QKVLinear`. limit: queries, keys and values are
    limited to ± this before; None = they are not. output: name of the last projection. width: of
    the inputs; None = hidden. more: of `Attention`."""

    def __init__(
        self,
        build: Build,
        index: int,
        hidden: int,
        heads: tuple[int, int, int],
        *,
        rope: Rope | None = None,
        bias: bool = False,
        norm: HeadNorm | None = None,
        names: tuple[str, str] = ("q_norm", "k_norm"),
        qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj"),
        limit: float | None = None,
        output: str = "o_proj",
        output_bias: bool | None = None,
        width: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(build, width or hidden, *heads, bias=bias, names=qkv)
        self.limit = limit
        self.q_norm = self.k_norm = None
        if norm is not None:
            of_queries, of_keys = heads_held(build, *heads[:2])
            self.q_norm = norm(build.at(names[0]), of_queries, heads[2])
            self.k_norm = norm(build.at(names[1]), of_keys, heads[2])
        self.attention = Attention(build, index, *heads, rope=rope, **more)
        output_bias = bias if output_bias is None else output_bias
        inner = heads[0] * heads[2]
        self.o_proj = Linear(
            build.at(output), inner, hidden, bias=output_bias, split="columns", heads=heads
        )

    def forward(self, hidden: Tensor, rotation: Rotation | None, *step: Any) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        if self.limit is not None:
            q, k, v = (part.clamp(-self.limit, self.limit) for part in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        out: Tensor = self.o_proj(self.attention(q, k, v, rotation))
        return out


def heads_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the number of query heads, of KV heads, and their channels. Raises ModelError if they
    do not fit."""
    heads = size_of(config, "num_attention_heads")
    kv_heads = read(config, "num_key_value_heads", int) or heads
    if heads < 1 or heads % kv_heads:
        raise ModelError(
            f"{heads} attention heads cannot share {kv_heads} heads of keys and values equally"
        )
    return heads, kv_heads, read(config, "head_dim", int) or size_of(config, "hidden_size") // heads


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), SwiGLU with silu. names: of gate, up and down, or of the
    merged first matrix and down."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        width: int,
        activation: str = "silu",
        *,
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
    ) -> None:
        super().__init__()
        *first, down = names
        parts = dict.fromkeys(first, (width,) * (2 // len(first)))
        self.gate_up_proj = Linear(build, hidden, 2 * width, parts=parts, bias=bias, split="rows")
        self.activation = Activation(build, activation)
        self.down_proj = Linear(build.at(down), width, hidden, bias=bias, split="columns")

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return out


class ExpertsBlock(nn.Module):
    """The chosen experts. router: build of the matrix that scores them. shared: a part that
    computes every token, whose result is added. shared_gate: build of a projection to one number a
    token, by whose sigmoid that result is multiplied."""

    def __init__(
        self,
        router: Build,
        experts: Experts,
        shared: nn.Module | None = None,
        shared_gate: Build | None = None,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        size = experts.hidden_size
        self.router = Linear(router, size, experts.num_experts, bias=bias, is_router=True)
        self.experts = experts
        self.shared = shared
        self.shared_gate = None if shared_gate is None else Linear(shared_gate, size, 1)

    def forward(self, hidden: Tensor, *step: Any) -> Tensor:
        inputs = [hidden, self.router(hidden)]
        if self.shared is not None:
            inputs.append(self.shared.forward(hidden))
        if self.shared_gate is not None:
            inputs.append(self.shared_gate(hidden))
        out: Tensor = self.experts(*inputs)
        return out
