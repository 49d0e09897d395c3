"""Layers and their feed-forward blocks. A layer is built as Layer(build, architecture, attention,
feed_forward) and called as `LayerStack` says; the step is a `Step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Activation, Build
from pegboard_model_dense.architecture import Architecture, ExpertSizes
from pegboard_model_dense.attention import Step
from pegboard_model_dense.experts import FlatExperts
from pegboard_model_dense.rows import ArrangedLinear, Rows
from pegboard_models import blocks
from pegboard_models.blocks import ExpertsBlock, PreNorm

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


def pre_norm(
    build: Build,
    model: Architecture,
    attention: nn.Module | None,
    feed_forward: nn.Module | None,
) -> PreNorm:
    """Return x + attention(norm(x)), then x + feed_forward(norm(x)). Results may be normalized,
    too. A layer may lack a block (DeciLM)."""
    names = model.names
    eps = model.eps / model.residual_scale**2  # the sum is the model's, divided by the scale

    def part(block: nn.Module | None, before: str, after: str, norm: Any) -> list[Any]:
        if block is None:
            return []
        first = model.norm(build.at(before), model.hidden_size, eps)
        last = [norm(build.at(after), model.hidden_size, model.eps)] if after else []
        return [(first, block, *last)]

    first, second = model.after_norms
    return PreNorm(
        *part(attention, names.before_attention, names.after_attention, first),
        *part(feed_forward, names.before_mlp, names.after_mlp, second),
    )


class PostNorm(blocks.PostNorm):
    """x + norm(attention(x)), then x + norm(feed_forward(x))."""

    def __init__(
        self, build: Build, model: Architecture, attention: nn.Module, feed_forward: nn.Module
    ) -> None:
        names = model.names
        after_attention, after_mlp = (
            model.norm(build.at(name), model.hidden_size, model.eps)
            for name in (names.after_attention, names.after_mlp)
        )
        super().__init__((attention, after_attention), (feed_forward, after_mlp))


class Parallel(nn.Module):
    """x + attention(norm(x)) + feed_forward(norm(x)). If names.before_mlp is given, the
    feed-forward block has its own norm."""

    def __init__(
        self, build: Build, model: Architecture, attention: nn.Module, feed_forward: nn.Module
    ) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
        self.before_attention, self.before_mlp = (
            model.norm(build.at(name), model.hidden_size, model.eps) if name else None
            for name in (model.names.before_attention, model.names.before_mlp)
        )

    def forward(self, hidden: Tensor, residual: None, step: Step) -> tuple[Tensor, None]:
        normalized = self.before_attention(hidden)
        for_mlp = normalized if self.before_mlp is None else self.before_mlp(hidden)
        mixed = self.attention.forward(normalized, step)
        return hidden + mixed + self.feed_forward.forward(for_mlp), None


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x))."""

    num_first = 2

    def __init__(self, build: Build, model: Architecture, width: int) -> None:
        super().__init__()
        names = model.names
        hidden = model.hidden_size
        rows = Rows(None, model.transposed)
        columns = self.num_first * width
        parts = dict.fromkeys(names.up, (width,) * (self.num_first // len(names.up)))
        self.up = ArrangedLinear(
            build, hidden, columns, rows, parts=parts, bias=model.up_bias, split="rows"
        )
        down = build.at(names.down)
        self.down = ArrangedLinear(down, width, hidden, rows, bias=model.down_bias, split="columns")
        self.activation = self.make_activation(build, model.activation)

    def make_activation(self, build: Build, name: str) -> Any:
        """Return the activation of the first projection's results."""
        return Activation(build, name)

    def forward(self, hidden: Tensor, *step: Step) -> Tensor:
        out: Tensor = self.down(self.activation(self.up(hidden)))
        return out


class PlainMLP(GatedMLP):
    """down(activation(up(x)))."""

    num_first = 1

    def make_activation(self, build: Build, name: str) -> Any:
        if name in PLAIN_ACTIVATIONS:
            return PLAIN_ACTIVATIONS[name]
        known = ", ".join(PLAIN_ACTIVATIONS)
        raise ModelError(
            f"{build.path}: unknown activation {name!r}; known without a gate: {known}"
        )


def experts_block(build: Build, model: Architecture, sizes: ExpertSizes) -> ExpertsBlock:
    """Return the chosen experts, and those that compute every token. build: of the layer."""
    experts = FlatExperts(
        build.at(sizes.modules),
        sizes.count,
        model.hidden_size,
        sizes.width,
        rule=sizes.rule,
        activation=model.activation,
        names=sizes.names,
        merged=sizes.merged,
        correction=build.at(sizes.correction).path if sizes.correction else None,
    )
    shared = (
        model.mlp(build.at(sizes.shared), model, sizes.shared_width) if sizes.shared_width else None
    )
    return ExpertsBlock(build.at(sizes.router), experts, shared)
