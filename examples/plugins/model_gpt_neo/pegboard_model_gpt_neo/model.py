"""GPT-Neo (Black et al. 2021). T: tokens of a step, N: rows that need logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import (
    Attention,
    Build,
    Embedding,
    Head,
    LayerNorm,
    LayerStack,
    Linear,
    QKVLinear,
    read,
    size_of,
)

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
KINDS = ("global", "local")


class Sizes:
    """What a checkpoint's config says. Values that the model cannot have are refused by name."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.vocab = size_of(config, "vocab_size")
        self.hidden = size_of(config, "hidden_size")
        self.inner = read(config, "intermediate_size", int) or 4 * self.hidden
        self.num_heads = size_of(config, "num_heads")
        self.head_dim = self.hidden // self.num_heads
        self.max_positions = size_of(config, "max_position_embeddings")
        self.eps = read(config, "layer_norm_epsilon", float) or 1e-5
        self.is_tied = read(config, "tie_word_embeddings", bool) is not False
        window = read(config, "window_size", int) or 256
        self.windows = [window if kind == "local" else None for kind in kinds_of(config)]
        activation = read(config, "activation_function", str) or "gelu_new"
        if activation not in ACTIVATIONS:
            raise ModelError(f"activation_function={activation!r}; known: {', '.join(ACTIVATIONS)}")
        if self.hidden % self.num_heads:
            raise ModelError(
                f"hidden_size={self.hidden} is not a multiple of num_heads={self.num_heads}"
            )


def kinds_of(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of attention of each layer. attention_types: [[["global", "local"], 12]] are
    24 layers."""
    value: Any = config.get("attention_types")
    num_layers = size_of(config, "num_layers")
    try:
        kinds = [kind for pattern, count in value for _ in range(count) for kind in pattern]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != num_layers or not all(kind in KINDS for kind in kinds):
        known = ", ".join(KINDS)
        raise ModelError(f"attention_types={value!r} with {num_layers=}; known kinds: {known}")
    return kinds


class GPTNeo(nn.Module):
    """Implements `pegboard.interfaces.model.Model`."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        sizes = Sizes(config)
        at = build.at("transformer")
        self.tokens = Embedding(at.at("wte"), sizes.vocab, sizes.hidden)
        self.positions = Embedding(at.alone().at("wpe"), sizes.max_positions, sizes.hidden)
        self.is_first = build.stage.is_first  # of the stages that share out the layers
        self.layers = LayerStack(
            at.at("h"),
            len(sizes.windows),
            lambda at, index: Layer(at, index, sizes),
            LayerNorm(at.at("ln_f"), sizes.hidden, sizes.eps),
        )
        tied = self.tokens if sizes.is_tied else None
        self.head = Head(build.at("lm_head"), sizes.vocab, sizes.hidden, tied=tied)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] → [T, hidden]."""
        return self.tokens(input_ids)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden], [T] → [T, hidden]. The rows may have been given with the prompt, so the
        positions are added here and not in `embed`."""
        return self.layers(hidden + self.positions(positions) if self.is_first else hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocab] float32."""
        return self.head(hidden)


class Layer(nn.Module):
    """x + attention(norm(x)), and then x + feed_forward(norm(x)). residual: a part of x that the
    next norm adds; None = 0."""

    def __init__(self, build: Build, index: int, sizes: Sizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        heads = sizes.num_heads, sizes.num_heads, sizes.head_dim
        at = build.at("attn.attention")
        self.norm = LayerNorm(build.at("ln_1"), hidden, sizes.eps)
        self.qkv = QKVLinear(at, hidden, *heads)
        self.attention = Attention(at, index, *heads, scale=1.0, window=sizes.windows[index])
        self.out = Linear(at.at("out_proj"), hidden, hidden, bias=True)
        self.mlp_norm = LayerNorm(build.at("ln_2"), hidden, sizes.eps)
        self.up = Linear(build.at("mlp.c_fc"), hidden, sizes.inner, bias=True)
        self.down = Linear(build.at("mlp.c_proj"), sizes.inner, hidden, bias=True)

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, residual = self.norm.add(hidden, residual)
        attended = self.out(self.attention(*self.qkv(hidden), None))
        hidden, residual = self.mlp_norm.add(attended, residual)
        return self.down(functional.gelu(self.up(hidden), approximate="tanh")), residual
