"""The images of Phi-4-multimodal (Abouelenin et al. 2025): crops at full size and a small copy of
all of it go through a SigLIP tower. Four patches are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.layers import Build
from pegboard_model_phi4mm.sizes import MERGED
from pegboard_models.parameters import Parameters
from pegboard_models.spread import spread_places
from pegboard_models.spread_tower import SpreadTower
from pegboard_models.vision_sizes import VisionSizes


class ImageEncoder(nn.Module):
    """(pixels [3, height, width], the patches below and beside each other that show something) →
    features [rows, hidden]: line by line of the crops, a separator, and line by line of the copy. A
    line ends with a feature of its own. end, separator: names of those in the checkpoint."""

    def __init__(
        self, build: Build, sizes: VisionSizes, depth: int, end: str, separator: str
    ) -> None:
        super().__init__()
        self.size = sizes.image_size
        self.grid = sizes.grid
        self.names = end, separator
        hidden = sizes.hidden_size
        shapes = {end: (1, 1, 1, hidden), separator: (1, 1, hidden)}
        self.given = Parameters(build, shapes)
        self.tower = Tower(build.at("img_processor"), sizes, depth)

    def forward(self, pixels: Tensor, shown: tuple[int, int]) -> Tensor:
        size = self.size
        copy = functional.interpolate(pixels[None], (size, size), mode="bicubic")
        lines = pixels.shape[1] // size
        crops = pixels.unflatten(2, (-1, size)).unflatten(1, (lines, size))
        crops = crops.permute(1, 3, 0, 2, 4).flatten(0, 1)
        columns = len(crops) // lines
        whole = (self.grid, self.grid)
        seen = [
            (_within(shown[0], line, self.grid), _within(shown[1], column, self.grid))
            for line in range(lines)
            for column in range(columns)
        ]
        features = self.tower.features(torch.cat([copy, crops]), [whole, *seen])
        grids = features.unflatten(1, whole).permute(0, 3, 1, 2)
        means = functional.avg_pool2d(grids, MERGED).permute(0, 2, 3, 1)
        joined = means[1:].unflatten(0, (lines, columns)).transpose(1, 2).flatten(2, 3)
        joined = joined.flatten(0, 1)[: -(-shown[0] // MERGED), : -(-shown[1] // MERGED)]
        end, separator = (self.given[name] for name in self.names)
        return torch.cat([_ended(joined, end), separator[0], _ended(means[0], end)])


def _within(shown: int, number: int, grid: int) -> int:
    """Return how many of the patches that show something a crop has on one side, at least one.
    number: the crops before it."""
    return max(1, min(shown - number * grid, grid))


def _ended(lines: Tensor, end: Tensor) -> Tensor:
    """[lines, columns, hidden] → [lines · (columns + 1), hidden]."""
    return torch.cat([lines, end[0].expand(len(lines), 1, -1)], 1).flatten(0, 1)


class Tower(SpreadTower):
    """Crops of one size."""

    def __init__(self, build: Build, sizes: VisionSizes, depth: int) -> None:
        super().__init__(build, sizes, depth)
        self.sizes = sizes

    def features(self, crops: Tensor, shown: Sequence[tuple[int, int]]) -> Tensor:
        """(crops [n, 3, size, size], the patches of each that show something) → features [n,
        patches, hidden], also of patches that show nothing, which no patch attends to."""
        grid = self.sizes.grid
        patch = self.sizes.patch_size
        cut = functional.unfold(crops, patch, stride=patch).transpose(1, 2).flatten(0, 1)
        places = torch.zeros(len(crops), grid, grid, dtype=torch.int64, device=crops.device)
        mask = torch.zeros_like(places, dtype=torch.bool)
        for index, (height, width) in enumerate(shown):
            spread = spread_places(height, width, grid, crops)
            places[index, :height, :width] = spread.unflatten(0, (height, width))
            mask[index, :height, :width] = True
        keys = None if bool(mask.all()) else mask.flatten(1)[:, None, None]
        rows = self.forward(cut, places.flatten(), len(crops), keys)
        return rows.unflatten(0, (len(crops), -1))
