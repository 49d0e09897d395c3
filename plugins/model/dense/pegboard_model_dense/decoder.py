"""A decoder of attention and feed-forward blocks, built as its traits say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import (
    Activation,
    Attention,
    Build,
    Embedding,
    Head,
    LayerNorm,
    LayerStack,
    Linear,
    Norm,
    Rope,
)
from pegboard_model_dense.parts import (
    XIELU,
    AlibiAttention,
    ArrangedLinear,
    ArrangedQKV,
    FlatExperts,
    HeadsNorm,
    NormalizedHead,
    Places,
    Positions,
    Rotate,
    Rows,
    make_norm,
)
from pegboard_model_dense.traits import ExpertTraits, LayerTraits, RopeTraits, Traits
from pegboard_models.decoder import scaled
from pegboard_models.rope import scaled_rope

PLAIN_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    **{
        name: lambda x: functional.gelu(x, approximate="tanh")
        for name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    },
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
"""Activations of a block without a gate, by their Hugging Face names."""

Step = tuple[Any, ...]
"""What all layers of a pass share: the rotation of each rotary embedding, or the places if there
are position biases. The last element is the number of the pass."""


class Decoder(nn.Module):
    """[T] token ids → [T, vocab] logits, in the stages that core calls: embed, forward, logits.
    Subclasses define `traits`.

    Residual scale r (Granite, MiniCPM): instead of x + r · f(x), the model computes x/r + f(x),
    which needs no product. The embedding is divided by r, and as every block starts with a norm, an
    epsilon divided by r² makes the results the same.
    """

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        super().__init__()
        traits = self.traits(config)
        names = traits.names
        stream = traits.residual_scale
        if stream <= 0:
            raise ModelError(
                f"the checkpoint's config scales residuals by {stream}; this architecture needs a "
                "positive number"
            )
        if build.layers is not None and (traits.passes > 1 or traits.skips):
            raise ModelError("the layers of this architecture cannot be divided")
        factor = traits.embedding_scale / stream
        self.embedding_scale = factor
        self.embedding = Embedding(build.at(names.embedding), traits.vocab_size, traits.hidden_size)
        self.embedding_norm = None
        if names.embedding_norm:
            self.embedding_norm = LayerNorm(
                build.at(names.embedding_norm), traits.hidden_size, traits.eps
            )
        is_first = build.layers is None or build.layers.start == 0
        has_positions = names.positions and is_first
        self.positions = Positions(build.at(names.positions), traits) if has_positions else None
        self.ropes = [make_rope(build, rule, traits.max_positions) for rule in traits.ropes]
        self.places = Places(build, traits.max_positions) if traits.alibi else None
        taps: dict[int, Tensor] = {}
        is_folded = traits.norm.startswith("rms") and not traits.head_bias
        factor = traits.logits_scale if is_folded else 1.0
        self.layers = LayerStack(
            build.at(names.layers),
            len(traits.layers),
            lambda b, i: self.make_layer(b, i, traits, taps),
            make_norm(build.at(names.norm), traits.hidden_size, traits, stream, factor),
            unit=stream,
        )
        self.passes = traits.passes
        make_head = NormalizedHead if traits.normalized_head else Head
        tied = self.embedding if traits.is_tied else None
        self.head = make_head(
            build.at(names.head),
            traits.vocab_size,
            traits.hidden_size,
            tied=tied,
            bias=traits.head_bias,
        )
        self.logits_scale = 1.0 if is_folded else traits.logits_scale
        self.logits_cap = traits.logits_cap

    @staticmethod
    def traits(config: Mapping[str, Any]) -> Traits:
        """Read the traits from the checkpoint's config. Raises ModelError for values that the model
        cannot have."""
        raise NotImplementedError

    def make_layer(
        self, build: Build, index: int, traits: Traits, taps: dict[int, Tensor]
    ) -> nn.Module:
        """Return a layer. A model whose blocks are arranged in its own way overrides this. taps:
        see `Skip`."""
        own = traits.layers[index]
        feed_forward: nn.Module | None = None
        if own.experts is not None:
            feed_forward = ExpertsBlock(build, traits, own.experts)
        elif own.width:
            names = traits.names
            feed_forward = FeedForward(
                build.at(names.mlp) if names.mlp else build, traits, own.width, own.xielu
            )
        attention = (
            self.make_attention(build.at(traits.names.attention), index, traits)
            if own.num_kv_heads
            else None
        )
        blocks: Any = (attention, feed_forward)
        kinds = {"before": NormBefore, "after": NormAfter, "parallel": Parallel}
        layer: nn.Module = kinds[traits.order](build, traits, *blocks)
        starts = [(start, share) for start, to, share in traits.skips if to == index]
        if starts or any(start == index for start, _, _ in traits.skips):
            return Skip(layer, index, starts, taps)
        return layer

    def make_attention(self, build: Build, index: int, traits: Traits) -> nn.Module:
        """Return the attention of a layer, (hidden [T, hidden], step) → [T, hidden]. build: of its
        tensors."""
        return SelfAttention(build, index, traits, traits.layers[index], self.ropes)

    def embed(self, input_ids: Tensor) -> Tensor:
        hidden = scaled(self.embedding(input_ids), self.embedding_scale)
        return hidden if self.embedding_norm is None else self.embedding_norm(hidden)

    def forward(self, hidden: Tensor, positions: Tensor) -> Tensor:
        if self.positions is not None:
            hidden = hidden + self.positions(positions)
        if self.places is not None:
            step: Step = (self.places(positions),)
        else:
            step = tuple(rope(positions) for rope in self.ropes)
        for number in range(self.passes):
            hidden = self.layers(hidden, (*step, number))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = scaled(self.head(hidden), self.logits_scale)
        return (
            logits
            if self.logits_cap is None
            else torch.tanh(logits / self.logits_cap) * self.logits_cap
        )


def make_rope(build: Build, rule: RopeTraits, max_positions: int) -> Rope:
    style = "pairs" if rule.pairs else build.rope_style
    own = replace(build, rope_style=style)
    return scaled_rope(
        own, rule.dim, max_positions=max_positions, base=rule.base, scaling=rule.scaling
    )


class NormBefore(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). `residual` is the sum so far. Results
    may be normalized, too. A layer may lack a block (DeciLM)."""

    def __init__(
        self,
        build: Build,
        traits: Traits,
        attention: SelfAttention | None,
        feed_forward: FeedForward | None,
    ) -> None:
        super().__init__()
        names = traits.names
        size = traits.hidden_size

        def norm(name: str, block: object, offset: float = 1.0) -> Any:
            before = name in (names.before_attention, names.before_mlp)
            scale = traits.residual_scale if before else 1.0
            return (
                make_norm(build.at(name), size, traits, scale, offset=offset)
                if name and block is not None
                else None
            )

        self.attention = attention
        self.feed_forward = feed_forward
        self.before_attention = norm(names.before_attention, attention)
        self.after_attention = norm(names.after_attention, attention, traits.after_offsets[0])
        self.before_mlp = norm(names.before_mlp, feed_forward)
        self.after_mlp = norm(names.after_mlp, feed_forward, traits.after_offsets[1])

    def forward(
        self, hidden: Tensor, residual: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        if self.attention is not None:
            hidden, residual = self.before_attention.add(hidden, residual)
            hidden = self.attention.forward(hidden, step)
            hidden = hidden if self.after_attention is None else self.after_attention(hidden)
        if self.feed_forward is not None:
            hidden, residual = self.before_mlp.add(hidden, residual)
            hidden = self.feed_forward.forward(hidden)
            hidden = hidden if self.after_mlp is None else self.after_mlp(hidden)
        return hidden, residual


class NormAfter(nn.Module):
    """x + norm(attention(x)), then x + norm(feed_forward(x)) (OLMo 2, EXAONE 4)."""

    def __init__(
        self, build: Build, traits: Traits, attention: SelfAttention, feed_forward: FeedForward
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.after_attention = make_norm(
            build.at(traits.names.after_attention), traits.hidden_size, traits
        )
        self.after_mlp = make_norm(build.at(traits.names.after_mlp), traits.hidden_size, traits)

    def forward(self, hidden: Tensor, residual: None, step: Step) -> tuple[Tensor, None]:
        hidden = hidden + self.after_attention(self.attention.forward(hidden, step))
        return hidden + self.after_mlp(self.feed_forward.forward(hidden)), None


class Parallel(nn.Module):
    """x + attention(norm(x)) + feed_forward(norm(x)). If names.before_mlp is given, the
    feed-forward block has its own norm."""

    def __init__(
        self, build: Build, traits: Traits, attention: SelfAttention, feed_forward: FeedForward
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.before_attention = make_norm(
            build.at(traits.names.before_attention), traits.hidden_size, traits
        )
        name = traits.names.before_mlp
        self.before_mlp = make_norm(build.at(name), traits.hidden_size, traits) if name else None

    def forward(self, hidden: Tensor, residual: None, step: Step) -> tuple[Tensor, None]:
        normalized = self.before_attention(hidden)
        for_mlp = normalized if self.before_mlp is None else self.before_mlp(hidden)
        return hidden + self.attention.forward(normalized, step) + self.feed_forward.forward(
            for_mlp
        ), None


class Skip(nn.Module):
    """A layer whose input is mixed with the inputs of earlier layers (Solar). taps: the inputs that
    later layers need, by layer index, for one step."""

    def __init__(
        self, layer: nn.Module, index: int, starts: list[tuple[int, float]], taps: dict[int, Tensor]
    ) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.starts = starts
        self.taps = taps

    def forward(
        self, hidden: Tensor, residual: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        hidden = hidden if residual is None else hidden + residual
        self.taps[self.index] = hidden.clone()
        for start, share in self.starts:
            hidden = self.taps[start] * share + hidden * (1 - share)
        out: tuple[Tensor, Tensor | None] = self.layer.forward(hidden, None, step)
        return out


class SelfAttention(nn.Module):
    """Grouped-query attention with its projections. Queries and keys may be normalized before or
    after they are rotated. The results may have a gate."""

    def __init__(
        self, build: Build, index: int, traits: Traits, own: LayerTraits, ropes: list[Rope]
    ) -> None:
        super().__init__()
        names = traits.names
        heads = (traits.num_heads, own.num_kv_heads, traits.head_dim)
        if traits.num_heads % own.num_kv_heads:
            raise ModelError(
                f"{build.path}: {traits.num_heads} heads cannot share {own.num_kv_heads} heads of "
                "keys equally"
            )
        self.qkv = ArrangedQKV(build, traits, own.num_kv_heads)
        inner = traits.num_heads * traits.head_dim
        rows = Rows(None, traits.transposed)
        self.out = ArrangedLinear(
            build.at(names.out), inner, traits.hidden_size, rows, bias=traits.out_bias
        )
        self.gate = Linear(build.at(names.gate), traits.hidden_size, inner) if names.gate else None
        self.number = 0 if traits.alibi else own.rope
        rope = (
            None
            if self.number is None or traits.alibi or traits.qk_norm == "rotated"
            else ropes[self.number]
        )
        more: dict[str, Any] = {
            "scale": own.scale,
            "window": own.window,
            "soft_cap": traits.soft_cap,
            "rope": rope,
        }
        self.attention: list[Attention] = []  # one for each pass
        for number in range(traits.passes):
            place = number * len(traits.layers) + index
            if traits.alibi:
                self.attention.append(AlibiAttention(build, place, traits, own))
            else:
                self.attention.append(Attention(build, place, *heads, **more))
        self.rotate = (
            Rotate(build, ropes[own.rope])
            if own.rope is not None and traits.qk_norm == "rotated"
            else None
        )
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self.norms_all = traits.qk_norm == "all"
        if traits.qk_norm == "own":
            self.q_norm = HeadsNorm(build.at(names.q_norm), heads[0], traits.head_dim, traits.eps)
            self.k_norm = HeadsNorm(build.at(names.k_norm), heads[1], traits.head_dim, traits.eps)
        elif traits.qk_norm:
            sizes = [traits.head_dim * (count if self.norms_all else 1) for count in heads[:2]]
            self.q_norm = make_norm(build.at(names.q_norm), sizes[0], traits)
            self.k_norm = make_norm(build.at(names.k_norm), sizes[1], traits)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        q, k, v = self.qkv(hidden)
        rotation = None if self.number is None else step[self.number]
        if self.rotate is not None:
            q = self.rotate(q, rotation)
            k = self.rotate(k, rotation)
        if self.q_norm is not None and self.k_norm is not None:
            if self.norms_all:
                q = self.q_norm(q.flatten(1)).view(q.shape)
                k = self.k_norm(k.flatten(1)).view(k.shape)
            else:
                q = self.q_norm(q)
                k = self.k_norm(k)
        mixed = self.attention[step[-1]](q, k, v, rotation)
        out: Tensor = self.out(mixed if self.gate is None else mixed * self.gate(hidden).sigmoid())
        return out


class FeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x))) without a gate. xielu: see
    `LayerTraits`."""

    def __init__(
        self, build: Build, traits: Traits, width: int, xielu: tuple[float, ...] | None = None
    ) -> None:
        super().__init__()
        names = traits.names
        hidden = traits.hidden_size
        rows = Rows(None, traits.transposed)
        columns = width * (2 if traits.gated else 1)
        parts = dict.fromkeys(names.up, columns // len(names.up))
        self.up = ArrangedLinear(build, hidden, columns, rows, parts=parts, bias=traits.up_bias)
        self.down = ArrangedLinear(build.at(names.down), width, hidden, rows, bias=traits.down_bias)
        if traits.gated:
            self.activation: Callable[[Tensor], Tensor] = Activation(build, traits.activation)
        elif traits.activation == "xielu":
            self.activation = XIELU(build.at("act_fn"), width, xielu)
        elif traits.activation in PLAIN_ACTIVATIONS:
            self.activation = PLAIN_ACTIVATIONS[traits.activation]
        else:
            known = ", ".join(PLAIN_ACTIVATIONS)
            raise ModelError(
                f"{build.path}: unknown activation {traits.activation!r}; known without a gate: "
                f"{known}"
            )

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(hidden)))
        return out


class ExpertsBlock(nn.Module):
    """[T, hidden] → [T, hidden]: the chosen experts, and those that compute every token. build: of
    the layer."""

    def __init__(self, build: Build, traits: Traits, own: ExpertTraits) -> None:
        super().__init__()
        self.router = Linear(build.at(own.router), traits.hidden_size, own.count, is_router=True)
        self.experts = FlatExperts(
            build.at(own.modules),
            own.count,
            traits.hidden_size,
            own.width,
            rule=own.rule,
            activation=traits.activation,
            names=own.names,
            merged=own.merged,
            correction=build.at(own.correction).path if own.correction else None,
        )
        self.shared = (
            FeedForward(build.at(own.shared), traits, own.shared_width)
            if own.shared_width
            else None
        )

    def forward(self, hidden: Tensor, shared: Tensor | None = None) -> Tensor:
        """shared: [T, hidden], added to the sum; None = what the shared experts compute, if there
        are any."""
        if self.shared is not None:
            shared = self.shared.forward(hidden)
        out: Tensor = self.experts(hidden, self.router(hidden), shared)
        return out
