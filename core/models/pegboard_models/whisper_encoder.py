"""The encoder of Whisper (Radford et al. 2022), which other models read speech with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm, Linear
from pegboard_models.parameters import Parameters
from pegboard_models.vision import activation_of
from pegboard_models.whisper_sizes import WhisperSizes

EPS = 1e-5


class WhisperEncoder(nn.Module):
    """([mel bins, frames] of each item) → features [positions, width] of each. A position stands
    for two frames. An item attends only to itself, so items may have different lengths. positions:
    of items, [positions, width]; None = the checkpoint has them. norm: what the checkpoint calls
    the last norm."""

    def __init__(
        self,
        build: Build,
        sizes: WhisperSizes,
        positions: Tensor | None = None,
        norm: str = "layer_norm",
    ) -> None:
        super().__init__()
        build = build.alone()
        width = sizes.hidden_size
        self.width = width
        shapes: dict[str, tuple[int, ...]] = {
            "conv1.weight": (width, sizes.num_bins, 3),
            "conv1.bias": (width,),
            "conv2.weight": (width, width, 3),
            "conv2.bias": (width,),
        }
        self.positions = positions
        if positions is None:
            shapes["embed_positions.weight"] = (sizes.max_positions, width)
        self.given = Parameters(build, shapes)
        layers = build.at("layers")
        self.layers = nn.ModuleList(
            EncoderLayer(layers.at(index), sizes) for index in range(sizes.num_layers)
        )
        self.norm = LayerNorm(build.at(norm), width, EPS)

    def forward(
        self,
        mels: Sequence[Tensor],
        counts: Sequence[int] | None = None,
        attended: Sequence[int] | None = None,
        seen: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """counts: how many positions of each item there are, of (frames + 1) // 2; None = all. What
        comes after them is only seen by the convolutions. attended: how many of these positions the
        item attends to; None = all. seen: bool [positions, attended] of each item, those that each
        position attends to; None = all."""
        states = self.states(mels, counts, attended, seen)
        rows = self.norm(torch.cat(states))
        return [*rows.split([len(each) for each in states])]

    def states(
        self,
        mels: Sequence[Tensor],
        counts: Sequence[int] | None = None,
        attended: Sequence[int] | None = None,
        seen: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """Return what the last norm takes."""
        items = [self.convolved(mel) for mel in mels]
        if counts is not None:
            items = [item[:count] for item, count in zip(items, counts, strict=True)]
        lengths = [len(item) for item in items]
        hidden = torch.cat(items)
        for layer in self.layers:
            hidden = layer.forward(hidden, lengths, attended, seen)
        return [*hidden.split(lengths)]

    def convolved(self, mel: Tensor) -> Tensor:
        """[mel bins, frames] → [positions, width]."""
        given = self.given
        positions = self.positions
        if positions is None:
            positions = given["embed_positions.weight"]
        weight = given["conv1.weight"]
        mel = mel.to(weight.dtype)
        mel = functional.gelu(functional.conv1d(mel, weight, given["conv1.bias"], padding=1))
        weight = given["conv2.weight"]
        mel = functional.conv1d(mel, weight, given["conv2.bias"], stride=2, padding=1)
        rows = functional.gelu(mel).T
        return rows + positions[: len(rows)].to(rows.dtype)


def sinusoids(count: int, width: int, device: str) -> Tensor:
    """Return positions that are not learned, [count, width] float32: the sines, and then the
    cosines, of angles whose wavelengths grow from 2π to 20000π (Radford et al. 2022)."""
    half = width // 2
    exponents = torch.arange(half, dtype=torch.float32, device=device) / max(1, half - 1)
    places = torch.arange(count, dtype=torch.float32, device=device)
    angles = places[:, None] * 10000.0**-exponents
    return torch.cat([angles.sin(), angles.cos()], 1)


class EncoderLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)). key_bias: whether keys have a
    bias, too."""

    def __init__(self, build: Build, sizes: WhisperSizes, *, key_bias: bool = False) -> None:
        super().__init__()
        width = sizes.hidden_size
        attention = build.at("self_attn")
        self.num_heads = sizes.num_heads
        self.attention_norm = LayerNorm(build.at("self_attn_layer_norm"), width, EPS)
        self.query = Linear(attention.at("q_proj"), width, width, bias=True)
        self.key = Linear(attention.at("k_proj"), width, width, bias=key_bias)
        self.value = Linear(attention.at("v_proj"), width, width, bias=True)
        self.out = Linear(attention.at("out_proj"), width, width, bias=True)
        self.last_norm = LayerNorm(build.at("final_layer_norm"), width, EPS)
        self.up = Linear(build.at("fc1"), width, sizes.intermediate_size, bias=True)
        self.down = Linear(build.at("fc2"), sizes.intermediate_size, width, bias=True)
        self.activation = activation_of(sizes.activation)
        self.finish = within_float16 if build.dtype == "float16" else as_it_is

    def forward(
        self,
        hidden: Tensor,
        lengths: Sequence[int],
        attended: Sequence[int] | None = None,
        seen: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """[positions of all items, width] → the same. lengths: of the items, in positions.
        attended: how many positions of each item are attended to; None = all. seen: see
        `WhisperEncoder.forward`."""
        x = self.attention_norm(hidden)
        split = [
            part.unflatten(1, (self.num_heads, -1)).transpose(0, 1).split([*lengths], 1)
            for part in (self.query(x), self.key(x), self.value(x))
        ]
        masks: Sequence[Tensor | None] = seen or [None] * len(lengths)
        mixed = [
            functional.scaled_dot_product_attention(
                query[None], key[None, :, :count], value[None, :, :count], attn_mask=mask
            )[0]
            for query, key, value, count, mask in zip(
                *split, attended or lengths, masks, strict=True
            )
        ]
        rows = torch.cat(mixed, 1).transpose(0, 1).flatten(1)
        hidden = hidden + self.out(rows)
        hidden = hidden + self.down(self.activation(self.up(self.last_norm(hidden))))
        return self.finish(hidden)


def as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def within_float16(hidden: Tensor) -> Tensor:
    """Large models make numbers that float16 does not have."""
    limit = torch.finfo(torch.float16).max - 1000
    return hidden.clamp(-limit, limit)
