"""The encoder of a VQ-GAN (Esser et al. 2021), whose codes are those of Make-A-Scene (Gafni et al.
2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build
from pegboard_model_chameleon.sizes import GROUPS, EncoderSizes
from pegboard_models.parameters import Parameters

EPS = 1e-6


class Codes(nn.Module):
    """(pixels [images, 3, resolution, resolution]) → the numbers of the codes [images, rows]."""

    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        self.encoder = Encoder(build.at("encoder"), sizes)
        self.last = Convolution(build.at("quant_conv"), sizes.latent, sizes.width, 1)
        place = build.at("quantize").at("embedding")
        self.given = Parameters(place, {"weight": (sizes.num_codes, sizes.width)})

    def forward(self, pixels: Tensor) -> Tensor:
        table = self.given["weight"]
        vectors = self.last.forward(self.encoder.forward(pixels.to(table.dtype)))
        rows = vectors.permute(0, 2, 3, 1).flatten(0, 2)
        squares = rows.square().sum(1, keepdim=True) + table.square().sum(1)
        return (squares - 2 * (rows @ table.T)).argmin(1).view(len(pixels), -1)


class Encoder(nn.Module):
    """(pixels [images, 3, resolution, resolution]) → features [images, latent, side, side]."""

    def __init__(self, build: Build, sizes: EncoderSizes) -> None:
        super().__init__()
        self.first = Convolution(build.at("conv_in"), 3, sizes.base)
        self.steps = nn.ModuleList()
        width = sizes.base
        for level, channels in enumerate(sizes.channels):
            place = build.at("down").at(level)
            attends = sizes.resolution // 2**level in sizes.attention
            for index in range(sizes.num_blocks):
                self.steps.append(Block(place.at("block").at(index), width, channels))
                width = channels
                if attends:
                    self.steps.append(Attention(place.at("attn").at(index), width))
            if level < len(sizes.channels) - 1:
                self.steps.append(Half(place.at("downsample").at("conv"), width))
        middle = build.at("mid")
        self.steps.append(Block(middle.at("block_1"), width, width))
        if sizes.attends:
            self.steps.append(Attention(middle.at("attn_1"), width))
        self.steps.append(Block(middle.at("block_2"), width, width))
        self.norm = GroupNorm(build.at("norm_out"), width)
        self.last = Convolution(build.at("conv_out"), width, sizes.latent)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.first.forward(pixels)
        for step in self.steps:
            hidden = step.forward(hidden)
        return self.last.forward(functional.silu(self.norm.forward(hidden)))


class Convolution(nn.Module):
    """A convolution [images, width, …] → [images, outer, …] of the same size. kernel: its side."""

    def __init__(self, build: Build, width: int, outer: int, kernel: int = 3) -> None:
        super().__init__()
        self.padding = kernel // 2
        self.given = Parameters(build, {"weight": (outer, width, kernel, kernel), "bias": (outer,)})

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.given
        return functional.conv2d(hidden, given["weight"], given["bias"], padding=self.padding)


class Half(Convolution):
    """A convolution to half the size, with a line of zeros below and at the right."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__(build, width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        given = self.given
        padded = functional.pad(hidden, (0, 1, 0, 1))
        return functional.conv2d(padded, given["weight"], given["bias"], stride=2)


class GroupNorm(nn.Module):
    """A norm of groups of channels (Wu and He 2018)."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        self.given = Parameters(build, {"weight": (width,), "bias": (width,)})

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.group_norm(hidden, GROUPS, self.given["weight"], self.given["bias"], EPS)


class Block(nn.Module):
    """x + two convolutions, each after a norm and SiLU. x is projected if its width changes."""

    def __init__(self, build: Build, width: int, outer: int) -> None:
        super().__init__()
        self.first_norm = GroupNorm(build.at("norm1"), width)
        self.first = Convolution(build.at("conv1"), width, outer)
        self.last_norm = GroupNorm(build.at("norm2"), outer)
        self.last = Convolution(build.at("conv2"), outer, outer)
        self.across = (
            None if width == outer else Convolution(build.at("nin_shortcut"), width, outer, 1)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.first.forward(functional.silu(self.first_norm.forward(hidden)))
        inner = self.last.forward(functional.silu(self.last_norm.forward(inner)))
        return inner + (hidden if self.across is None else self.across.forward(hidden))


class Attention(nn.Module):
    """x + attention of one head among all places of an image."""

    def __init__(self, build: Build, width: int) -> None:
        super().__init__()
        self.norm = GroupNorm(build.at("norm"), width)
        self.parts = nn.ModuleList(
            Convolution(build.at(name), width, width, 1) for name in ("q", "k", "v")
        )
        self.out = Convolution(build.at("proj_out"), width, width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        rows = self.norm.forward(hidden)
        split = [part.forward(rows).flatten(2).transpose(1, 2) for part in self.parts]
        mixed = functional.scaled_dot_product_attention(*split)
        return hidden + self.out.forward(torch.reshape(mixed.transpose(1, 2), hidden.shape))
