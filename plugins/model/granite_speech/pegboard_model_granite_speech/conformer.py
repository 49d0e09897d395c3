"""A conformer (Gulati et al. 2020) whose attention stays within blocks and adds embeddings of
distances (Shaw et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_model_granite_speech.sizes import EncoderSizes
from pegboard_models.parameters import Parameters

EPS = 1e-5


class Conformer(nn.Module):
    """([frames, mel bins] of each item) → features [frames, hidden] of each. In the middle, the
    features get what they sound like added."""

    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        build = build.alone()
        hidden = sizes.hidden_size
        self.middle = sizes.num_layers // 2
        self.first = Linear(build.at("input_linear"), sizes.input_size, hidden, bias=True)
        layers = build.at("layers")
        self.layers = nn.ModuleList(Block(layers.at(i), sizes) for i in range(sizes.num_layers))
        self.label = Linear(build.at("out"), hidden, sizes.num_labels, bias=True)
        self.from_label = Linear(build.at("out_mid"), sizes.num_labels, hidden, bias=True)

    def forward(self, items: Sequence[Tensor]) -> list[Tensor]:
        lengths = [len(item) for item in items]
        dtype = getattr(torch, self.first.build.dtype)
        hidden = self.first(torch.cat([*items]).to(dtype))
        for index, layer in enumerate(self.layers, 1):
            hidden = layer.forward(hidden, lengths)
            if index == self.middle:
                hidden = hidden + self.from_label(self.label(hidden).softmax(-1))
        return [*hidden.split(lengths)]


class Block(nn.Module):
    """Half a feed-forward layer, attention, a convolution, and the other half."""

    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        self.before = FeedForward(build.at("ff1"), sizes)
        self.attention = BlockAttention(build.at("attn"), sizes)
        self.convolution = Convolution(build.at("conv"), sizes)
        self.after = FeedForward(build.at("ff2"), sizes)
        self.norm = LayerNorm(build.at("post_norm"), sizes.hidden_size, EPS)

    def forward(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """[frames of all items, hidden] → the same. lengths: of the items, in frames."""
        hidden = hidden + 0.5 * self.before.forward(hidden)
        hidden = hidden + self.attention.forward(hidden, lengths)
        hidden = hidden + self.convolution.forward(hidden, lengths)
        return self.norm(hidden + 0.5 * self.after.forward(hidden))


class FeedForward(nn.Module):
    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        self.norm = LayerNorm(build.at("pre_norm"), hidden, EPS)
        self.up = Linear(build.at("up_proj"), hidden, sizes.intermediate_size, bias=True)
        self.down = Linear(build.at("down_proj"), sizes.intermediate_size, hidden, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(self.norm(hidden))))


class BlockAttention(nn.Module):
    """Frames of an item attend to those of their block, whose last one may be shorter."""

    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        self.num_heads = sizes.num_heads
        self.context = sizes.context
        self.max_distance = sizes.max_distance
        self.scale = sizes.head_dim**-0.5
        width = sizes.num_heads * sizes.head_dim
        hidden = sizes.hidden_size
        self.norm = LayerNorm(build.at("pre_norm"), hidden, EPS)
        self.query = Linear(build.at("to_q"), hidden, width)
        self.key_value = Linear(build.at("to_kv"), hidden, 2 * width)
        self.out = Linear(build.at("to_out"), width, hidden, bias=True)
        shape = (2 * sizes.max_distance + 1, sizes.head_dim)
        self.distances = Parameters(build.at("rel_pos_emb"), {"weight": shape})

    def forward(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        x = self.norm(hidden)
        parts = torch.cat([self.query(x), self.key_value(x)], 1)
        places = torch.arange(self.context, device=parts.device)
        table = self.distances["weight"][places[:, None] - places + self.max_distance]
        mixed: list[Tensor] = []
        for item in parts.split([*lengths]):
            whole = len(item) - len(item) % self.context
            if whole:
                blocks = item[:whole].unflatten(0, (-1, self.context))
                mixed.append(self.mixed(blocks, table))
            if whole < len(item):
                mixed.append(self.mixed(item[whole:][None], table))
        return self.out(torch.cat(mixed))

    def mixed(self, blocks: Tensor, table: Tensor) -> Tensor:
        """[blocks, frames, 3 · width] → [blocks · frames, width]. table: the embedding of the
        distance of two frames [context, context, channels of a head]."""
        frames = blocks.shape[1]
        split = blocks.unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = split.unbind()
        bias = torch.einsum("bhqd,qkd->bhqk", query, table[:frames, :frames]) * self.scale
        rows = functional.scaled_dot_product_attention(query, key, value, bias, scale=self.scale)
        return rows.transpose(1, 2).flatten(2).flatten(0, 1)


class Convolution(nn.Module):
    """A gate, a convolution of each channel along an item, and a norm with stored statistics."""

    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        hidden = sizes.hidden_size
        size = sizes.num_channels
        self.padding = sizes.kernel // 2, (sizes.kernel - 1) // 2
        self.norm = LayerNorm(build.at("norm"), hidden, EPS)
        shapes: dict[str, tuple[int, ...]] = {
            "up_conv.weight": (2 * size, hidden, 1),
            "up_conv.bias": (2 * size,),
            "depth_conv.conv.weight": (size, 1, sizes.kernel),
            "down_conv.weight": (hidden, size, 1),
            "down_conv.bias": (hidden,),
            **dict.fromkeys((f"batch_norm.{name}" for name in STATISTICS), (size,)),
        }
        self.given = Parameters(build, shapes)

    def forward(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        given = self.given
        up = functional.linear(
            self.norm(hidden), given["up_conv.weight"][:, :, 0], given["up_conv.bias"]
        )
        gated = functional.glu(up, 1)
        weight = given["depth_conv.conv.weight"]
        convolved = [
            functional.conv1d(functional.pad(item.T, self.padding), weight, groups=len(weight)).T
            for item in gated.split([*lengths])
        ]
        mean, variance, scale, shift = (given[f"batch_norm.{name}"] for name in STATISTICS)
        rows = functional.batch_norm(torch.cat(convolved), mean, variance, scale, shift, eps=EPS)
        down = given["down_conv.weight"][:, :, 0]
        return functional.linear(functional.silu(rows), down, given["down_conv.bias"])


STATISTICS = ("running_mean", "running_var", "weight", "bias")
