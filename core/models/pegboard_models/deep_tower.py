"""The vision tower of Qwen3-VL, and what adds its layers to those of the language model
("DeepStack", Meng et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.layers import Build, LayerNorm, LayerStack, Linear
from pegboard_models.deep_sizes import DeepSizes
from pegboard_models.parameters import Parameters
from pegboard_models.patch_tower import TowerLayer, in_blocks, rotation_of


class DeepTower(nn.Module):
    """(patches [n, 3 · frames · patch · patch], how many of them are behind, below and beside each
    other) → rows [n / merge², (1 + taps) · outer]: of the last layer, and of the taps in their
    order in the tower. The patches of a row are below each other. Those of different times do not
    attend to each other."""

    def __init__(self, build: Build, sizes: DeepSizes) -> None:
        super().__init__()
        build = build.alone()
        tower = sizes.tower
        shape = (tower.width, 3, tower.frames, tower.patch, tower.patch)
        self.sizes = tower
        self.side = sizes.side
        self.patches = Parameters(
            build.at("patch_embed").at("proj"), {"weight": shape, "bias": shape[:1]}
        )
        self.places = Parameters(build.at("pos_embed"), {"weight": (sizes.side**2, tower.width)})
        blocks = build.at("blocks")
        self.layers = nn.ModuleList(
            TowerLayer(blocks.at(index), tower) for index in range(tower.depth)
        )
        self.merger = Merger(build.at("merger"), sizes, is_late=False)
        mergers = build.at(sizes.names.levels)
        self.mergers = nn.ModuleList(
            Merger(mergers.at(index), sizes, is_late=True) for index in range(len(sizes.taps))
        )
        self.taps: dict[int, Any] = dict(zip(sizes.taps, self.mergers, strict=True))

    def forward(self, pixels: Tensor, count: int, height: int, width: int) -> Tensor:
        weight = self.patches["weight"].flatten(1)
        hidden = functional.linear(pixels.to(weight.dtype), weight, self.patches["bias"])
        hidden = hidden + self.positions(height, width).repeat(count, 1).to(hidden.dtype)
        order = torch.arange(height * width // self.sizes.merge**2, device=pixels.device)
        cos, sin = rotation_of(self.sizes, height, width, order)
        rotation = cos.repeat(count, 1, 1), sin.repeat(count, 1, 1)
        parts = []
        for index, layer in enumerate(self.layers):
            hidden = layer.forward(hidden, rotation, [(count, height * width)])
            if index in self.taps:
                parts.append(self.taps[index].forward(hidden))
        return torch.cat([self.merger.forward(hidden), *parts], 1)

    def positions(self, height: int, width: int) -> Tensor:
        """Return the learned positions of the patches of an image, [patches, width] float32,
        between those of the table."""
        table = self.places["weight"].float().T.unflatten(1, (self.side, self.side))
        plane = functional.interpolate(
            table[None], (height, width), mode="bilinear", align_corners=True
        )
        return in_blocks(plane[0].permute(1, 2, 0), self.sizes.merge).flatten(0, 1)


class Merger(nn.Module):
    """([n, width]) → rows [n / merge², outer]. is_late: the norm is of a whole row and not of a
    patch."""

    def __init__(self, build: Build, sizes: DeepSizes, *, is_late: bool) -> None:
        super().__init__()
        tower = sizes.tower
        names = sizes.names
        inner = tower.width * tower.merge**2
        self.inner = inner
        self.width = inner if is_late else tower.width
        self.norm = LayerNorm(build.at(names.norm), self.width, tower.eps)
        self.first = Linear(build.at(names.first), inner, inner, bias=True)
        self.last = Linear(build.at(names.last), inner, tower.outer, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        grouped = self.norm(hidden.reshape(-1, self.width)).view(-1, self.inner)
        rows: Tensor = self.last(functional.gelu(self.first(grouped)))
        return rows


class Levels:
    """Adds rows to the hidden states of a step after each of the first layers of a language model.
    rows: of each of these layers, [T, hidden]; they are set before the step. is_chosen: the user
    has chosen which layers there are. Raises ModelError if the layers are not in the same pipeline
    stage."""

    def __init__(self, language: nn.Module, count: int, *, is_chosen: bool = False) -> None:
        stack = next(part for part in language.modules() if isinstance(part, LayerStack))
        if len(stack.layers) < count and not is_chosen:
            raise ModelError(
                f"what the tower sees is added after each of the first {count} layers, and the "
                f"first pipeline stage has only {len(stack.layers)}; use fewer stages"
            )
        self.count = count
        self.rows: Sequence[Tensor] = ()
        steps: list[Callable[..., tuple[Tensor, Tensor | None]]] = stack.steps
        for level, layer in enumerate(stack.layers[:count]):
            steps.insert(steps.index(layer.forward) + 1, partial(self.add, level))

    def add(
        self, level: int, hidden: Tensor, residual: Tensor | None, *step: object
    ) -> tuple[Tensor, Tensor | None]:
        return hidden + self.rows[level], residual
