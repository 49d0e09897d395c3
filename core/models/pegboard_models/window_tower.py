"""The vision towers of Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL (Bai et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, Linear
from pegboard_models.parameters import Parameters
from pegboard_models.patch_tower import Runs, TowerLayer, norm_of, rotation_of
from pegboard_models.window_sizes import WindowSizes


class WindowTower(nn.Module):
    """(patches [n, 3 · frames · patch · patch], how many of them are behind, below and beside each
    other) → rows [n / merge², outer]. The patches of a row are below each other. Those of different
    times do not attend to each other."""

    def __init__(self, build: Build, given: WindowSizes) -> None:
        super().__init__()
        build = build.alone()
        sizes = given.tower
        self.sizes = sizes
        self.window = given.window
        self.whole = given.whole
        shape = (sizes.width, 3, sizes.frames, sizes.patch, sizes.patch)
        self.patches = Parameters(build.at("patch_embed").at("proj"), {"weight": shape})
        blocks = build.at("blocks")
        self.layers = nn.ModuleList(
            TowerLayer(blocks.at(index), sizes) for index in range(sizes.depth)
        )
        merger = build.at("merger")
        self.group = sizes.merge**2
        inner = sizes.width * self.group
        self.norm = norm_of(merger.at("ln_q"), sizes)
        self.first = Linear(merger.at("mlp").at(0), inner, inner, bias=True)
        self.last = Linear(merger.at("mlp").at(2), inner, sizes.outer, bias=True)

    def forward(self, pixels: Tensor, count: int, height: int, width: int) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        merge = self.sizes.merge
        order, lengths = ordered(height // merge, width // merge, self.window)
        windows = [(parts, rows * self.group) for parts, rows in lengths] * count
        order = order.to(pixels.device)
        cos, sin = rotation_of(self.sizes, height, width, order)
        rotation = cos.repeat(count, 1, 1), sin.repeat(count, 1, 1)
        order = repeated(order, count)
        pixels = pixels.unflatten(0, (-1, self.group))[order].flatten(0, 1)
        hidden = functional.linear(pixels.to(weight.dtype), weight)
        frames = [(count, height * width)]
        for index, layer in enumerate(self.layers):
            runs = frames if self.whole is None or index in self.whole else windows
            hidden = layer.forward(hidden, rotation, runs)
        grouped = self.norm(hidden).view(len(order), -1)
        rows: Tensor = self.last(functional.gelu(self.first(grouped)))
        return torch.empty_like(rows).index_copy_(0, order, rows)


def ordered(height: int, width: int, window: int) -> tuple[Tensor, Runs]:
    """Return the order in which the rows of an image are computed, and its windows in this order.
    Windows of the same size are below each other. height, width: of the image, in rows. window: of
    a side; 0 = the image is one. The lengths of windows are in rows."""
    places = torch.arange(height * width).view(height, width)
    side = window or max(height, width)
    windows = [part.flatten() for line in places.split(side) for part in line.split(side, 1)]
    windows.sort(key=len)
    counts: dict[int, int] = {}
    for each in windows:
        counts[len(each)] = counts.get(len(each), 0) + 1
    return torch.cat(windows), [(count, size) for size, count in counts.items()]


def repeated(order: Tensor, count: int) -> Tensor:
    """Return the order of `count` images of the same size that are below each other."""
    starts = torch.arange(count, device=order.device) * len(order)
    return (starts[:, None] + order).flatten()
