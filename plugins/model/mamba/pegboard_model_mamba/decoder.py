"""The decoder that all models of this package are: blocks that each add the results of their parts
to a residual stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import (
    Activation,
    Attention,
    Build,
    Embedding,
    Experts,
    Head,
    LayerStack,
    Linear,
    Norm,
    QKVLinear,
    Rope,
    Rotation,
    read,
    size_of,
)
from pegboard_models.rope import rope_parameters, scaled_rope


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls its modules."""

    root: str = "model"
    embedding: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"


class StateDecoder(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits.

    make(build, index) builds a layer, which is called like a `Block`. rotary_dim: channels of a
    head that are rotated; 0 = none. embed_scale, logits_scale: factors. is_tied: whether the head
    has the embedding's weights if the config does not say it. norm: of the layers' results.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        build: Build,
        make: Callable[[Build, int], nn.Module],
        *,
        eps: float,
        names: Names | None = None,
        rotary_dim: int = 0,
        embed_scale: float = 1.0,
        logits_scale: float = 1.0,
        is_tied: bool = False,
        norm: type[Norm] = Norm,
    ) -> None:
        super().__init__()
        if (act := read(config, "hidden_act", str) or "silu") != "silu":
            raise ModelError(
                f"the checkpoint's config has hidden_act={act!r}; this architecture is served "
                "with silu"
            )
        names = names or Names()
        vocab_size = size_of(config, "vocab_size")
        hidden = size_of(config, "hidden_size")
        inner = build.at(names.root)
        self.embed_scale = embed_scale
        self.logits_scale = logits_scale
        self.embed_tokens = Embedding(inner.at(names.embedding), vocab_size, hidden)
        self.rope: Rope | None = None
        if rotary_dim:
            base, scaling = rope_parameters(config)
            scaling = {
                name: value for name, value in scaling.items() if name != "partial_rotary_factor"
            }
            positions = read(config, "max_position_embeddings", int) or 2048
            self.rope = scaled_rope(
                inner, rotary_dim, max_positions=positions, base=base, scaling=scaling
            )
        self.layers = LayerStack(
            inner.at(names.layers),
            size_of(config, "num_hidden_layers"),
            make,
            norm(inner.at(names.norm), hidden, eps),
        )
        tied = read(config, "tie_word_embeddings", bool)
        is_tied = is_tied if tied is None else tied
        self.lm_head = Head(
            build.at("lm_head"), vocab_size, hidden, tied=self.embed_tokens if is_tied else None
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        return scaled(self.embed_tokens(input_ids), self.embed_scale)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.layers(hidden, None if self.rope is None else self.rope(positions))

    def logits(self, hidden: Tensor) -> Tensor:
        return scaled(self.lm_head(hidden), self.logits_scale)


class Block(nn.Module):
    """Parts that each follow a norm: (name of the norm, part). factor: of what each part adds to
    the residual. norm: the kind of norm."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        eps: float,
        parts: Sequence[tuple[str, nn.Module]],
        factor: float = 1.0,
        norm: type[Norm] = Norm,
    ) -> None:
        super().__init__()
        self.factor = factor
        self.parts = [(norm(build.at(name), hidden, eps), part.forward) for name, part in parts]

    def forward(
        self, hidden: Tensor, residual: Tensor | None, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        for norm, part in self.parts:
            hidden, residual = norm.add(hidden, residual)
            hidden = scaled(part(hidden, rotation), self.factor)
        assert residual is not None, "a block has at least one part"
        return hidden, residual


class SelfAttention(nn.Module):
    """Grouped-query attention. scale: factor of q·k. window: in tokens. norms: names of the norms
    of each head's query and key. output: name of the last projection."""

    def __init__(
        self,
        build: Build,
        index: int,
        config: Mapping[str, Any],
        *,
        rope: Callable[[], Rope | None] = lambda: None,
        scale: float | None = None,
        window: int | None = None,
        norms: tuple[str, str] | None = None,
        eps: float = 1e-6,
        output: str = "o_proj",
    ) -> None:
        super().__init__()
        hidden = size_of(config, "hidden_size")
        heads = size_of(config, "num_attention_heads")
        head_dim = head_size(config)
        kv_heads = read(config, "num_key_value_heads", int) or heads
        bias = bool(read(config, "attention_bias", bool))
        if heads % kv_heads:
            raise ModelError(
                f"the checkpoint's config has {heads} attention heads, not a multiple of "
                f"{kv_heads} key-value heads"
            )
        self.qkv_proj = QKVLinear(build, hidden, heads, kv_heads, head_dim, bias=bias)
        self.norms = [Norm(build.at(name), head_dim, eps) for name in norms or ()]
        self.attention = Attention(
            build, index, heads, kv_heads, head_dim, scale=scale, window=window, rope=rope()
        )
        self.o_proj = Linear(build.at(output), heads * head_dim, hidden, bias=bias)

    def forward(self, hidden: Tensor, rotation: Rotation | None) -> Tensor:
        q, k, v = self.qkv_proj(hidden)
        if self.norms:
            q = self.norms[0](q)
            k = self.norms[1](k)
        out: Tensor = self.o_proj(self.attention(q, k, v, rotation))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). names: of gate, up and down, or of the merged first
    matrix and down. factors: of gate and of the result."""

    def __init__(
        self,
        build: Build,
        hidden: int,
        width: int,
        *,
        names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        factors: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        *first, down = names
        self.gate_factor = None
        self.factor = factors[1]
        if factors[0] != 1.0:
            self.gate_factor = torch.tensor(
                (factors[0], 1.0), dtype=getattr(torch, build.dtype), device=build.device
            )
            self.gate_factor = self.gate_factor.repeat_interleave(width)
        parts = dict.fromkeys(first, width) if len(first) == 2 else None
        self.gate_up_proj = Linear(
            build if parts else build.at(first[0]), hidden, 2 * width, parts=parts, bias=bias
        )
        self.activation = Activation(build, "silu")
        self.down_proj = Linear(build.at(down), width, hidden, bias=bias)

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        both = self.gate_up_proj(hidden)
        if self.gate_factor is not None:
            both = both * self.gate_factor
        return scaled(self.down_proj(self.activation(both)), self.factor)


class ExpertsBlock(nn.Module):
    """[T, hidden] → [T, hidden]. router: the path of the matrix that chooses experts. shared:
    computes every token."""

    def __init__(self, router: Build, experts: Experts, shared: FeedForward | None = None) -> None:
        super().__init__()
        self.router = Linear(router, experts.hidden_size, experts.num_experts, is_router=True)
        self.experts = experts
        self.shared = shared

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        shared = None if self.shared is None else self.shared.forward(hidden)
        out: Tensor = self.experts(hidden, self.router(hidden), shared)
        return out


def head_size(config: Mapping[str, Any]) -> int:
    """Return the channels of an attention head."""
    return read(config, "head_dim", int) or size_of(config, "hidden_size") // size_of(
        config, "num_attention_heads"
    )


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor
