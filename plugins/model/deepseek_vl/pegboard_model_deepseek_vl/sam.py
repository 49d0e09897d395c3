"""The encoder of SAM (Kirillov et al. 2023, "Segment Anything"): a transformer with windows and
positions relative to the query (Li et al. 2022, "MViTv2"), and convolutions that make patches
fewer, as in DeepSeek-OCR (Wei et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build, LayerNorm
from pegboard_model_deepseek_vl.ocr_sizes import NECK, WINDOW, OcrSizes
from pegboard_models.parameters import Parameters
from pegboard_models.vision import TIMM, VisionLayer
from pegboard_models.vision_sizes import VisionSizes

NAMES = replace(TIMM, linears=("lin1", "lin2"))
MOST = 1 << 26
"""The most scores of queries and keys that are in memory at once."""
TABLES = ("rel_pos_h", "rel_pos_w")


class SamTower(nn.Module):
    """(pixels [views, 3, size, size]) → features [views, channels, side, side], a sixteenth of the
    patches."""

    def __init__(self, build: Build, sizes: OcrSizes) -> None:
        super().__init__()
        sam = sizes.sam
        self.patch = sam.patch_size
        width = sam.hidden_size
        grid = sam.grid
        self.positions = Parameters(build, {"pos_embed": (1, grid, grid, width)})
        self.patches = Parameters(
            build.at("patch_embed.proj"),
            {"weight": (width, 3, self.patch, self.patch), "bias": (width,)},
        )
        blocks = build.at("blocks")
        self.layers = nn.ModuleList(
            SamLayer(blocks.at(index), sam, 0 if index in sizes.whole else WINDOW)
            for index in range(sam.num_layers)
        )
        first, last = sizes.channels
        shapes = {
            "neck.0.weight": (NECK, width, 1, 1),
            "neck.2.weight": (NECK, NECK, 3, 3),
            "net_2.weight": (first, NECK, 3, 3),
            "net_3.weight": (last, first, 3, 3),
        }
        self.filters = Parameters(build, shapes)
        self.norms = nn.ModuleList(
            LayerNorm(build.at(f"neck.{index}"), NECK, sam.eps) for index in (1, 3)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        weight = self.patches["weight"]
        vectors = functional.conv2d(
            pixels.to(weight.dtype), weight, self.patches["bias"], stride=self.patch
        ).permute(0, 2, 3, 1)
        shape = vectors.shape
        rows = (vectors + stretched(self.positions["pos_embed"][0], shape[1])).flatten(0, 2)
        for layer in self.layers:
            rows = layer.forward(rows, shape[0])
        plane = rows.view(shape).permute(0, 3, 1, 2)
        plane = self.normed(functional.conv2d(plane, self.filters["neck.0.weight"]), 0)
        plane = self.normed(functional.conv2d(plane, self.filters["neck.2.weight"], padding=1), 1)
        for name in ("net_2.weight", "net_3.weight"):
            plane = functional.conv2d(plane, self.filters[name], stride=2, padding=1)
        return plane

    def normed(self, plane: Tensor, index: int) -> Tensor:
        """Return the plane [views, channels, height, width] with each place's vector normalized."""
        lines = plane.permute(0, 2, 3, 1)
        rows: Tensor = self.norms[index](lines.flatten(0, 2))
        return rows.view(lines.shape).permute(0, 3, 1, 2)


class SamLayer(VisionLayer):
    """Patches attend to those of their window. Windows that go over the edge have zeros there.
    window: patches of its side; 0 = they attend to all of the image."""

    def __init__(self, build: Build, sizes: VisionSizes, window: int) -> None:
        super().__init__(build, sizes, NAMES)
        self.window = window
        shape = (2 * (window or sizes.grid) - 1, sizes.hidden_size // sizes.num_heads)
        self.tables = Parameters(build.at("attn"), dict.fromkeys(TABLES, shape))

    def attend(self, rows: Tensor, count: int, seen: Tensor | None = None) -> Tensor:
        side = math.isqrt(len(rows) // count)
        window = self.window or side
        missing = -side % window
        plane = rows.view(count, side, side, -1)
        whole = functional.pad(plane, (0, 0, 0, missing, 0, missing))
        cut = whole.unflatten(2, (-1, window)).unflatten(1, (-1, window)).transpose(2, 3)
        shape = cut.shape
        mixed = super().attend(cut.flatten(0, 4), shape[0] * shape[1] * shape[2])
        joined = mixed.view(shape).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return joined[:, :side, :side].reshape(rows.shape)

    def mix(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        count, heads, positions, _ = query.shape
        side = math.isqrt(positions)
        tables = [relative(self.tables[name], side) for name in TABLES]
        lines = query.unflatten(2, (side, side))
        vertical = torch.einsum("nhyxc,ykc->nhyxk", lines, tables[0])[..., None]
        horizontal = torch.einsum("nhyxc,xkc->nhyxk", lines, tables[1])[..., None, :]
        step = max(1, MOST // (count * heads * side * positions))
        parts = []
        for start in range(0, side, step):
            chosen = slice(start, start + step)
            bias = vertical[:, :, chosen] + horizontal[:, :, chosen]
            mixed = functional.scaled_dot_product_attention(
                lines[:, :, chosen].flatten(2, 3),
                key,
                value,
                attn_mask=bias.flatten(4).flatten(2, 3),
            )
            parts.append(mixed)
        return torch.cat(parts, 2)


def relative(table: Tensor, side: int) -> Tensor:
    """Return the vectors of each query's and each key's place on a side, [side, side, channels].
    table: by their distance. It is stretched to other sides."""
    count = 2 * side - 1
    if len(table) != count:
        lines = functional.interpolate(table.float().T[None], size=count, mode="linear")
        table = lines[0].T.to(table.dtype)
    places = torch.arange(side, device=table.device)
    return table[places[:, None] - places + side - 1]


def stretched(positions: Tensor, side: int) -> Tensor:
    """Return learned positions for another number of patches: [grid, grid, width] → [side, side,
    width]."""
    if len(positions) == side:
        return positions
    plane = functional.interpolate(
        positions.float().permute(2, 0, 1)[None],
        size=(side, side),
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    return plane[0].permute(1, 2, 0).to(positions.dtype)
