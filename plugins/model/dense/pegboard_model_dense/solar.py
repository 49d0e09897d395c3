"""Solar Pro (Upstage 2024): inputs of earlier layers are mixed into those of later ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Build, read
from pegboard_model_dense.architecture import Architecture
from pegboard_model_dense.attention import Step
from pegboard_model_dense.config import common
from pegboard_model_dense.decoder import Decoder


class Solar(Decoder):
    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        model = common(config)
        skips = list[tuple[int, int, float]]()
        shares: Any = read(config, "bskcn_tv", list) or [1.0]
        if not isinstance(share := shares[-1], int | float):
            raise ModelError(
                f"the checkpoint's config has bskcn_tv={config.get('bskcn_tv')!r}, expected a "
                "list of numbers"
            )
        for start, end in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
            starts: Any = read(config, start, list) or []
            ends: Any = read(config, end, list) or []
            for to in ends:
                before = [
                    at
                    for at in starts
                    if isinstance(at, int) and isinstance(to, int) and 0 <= at <= to
                ]
                if not before:
                    raise ModelError(
                        f"the checkpoint's config has {end}={config[end]!r}, but no earlier layer "
                        f"in {start}"
                    )
                skips.append((max(before), to, float(share)))
        return replace(model, skips=tuple(skips))

    def make_layer(self, build: Build, index: int, model: Architecture) -> nn.Module:
        layer = super().make_layer(build, index, model)
        if index == 0:
            self.inputs = dict[int, Tensor]()
        starts = [(start, share) for start, to, share in model.skips if to == index]
        if starts or any(start == index for start, _, _ in model.skips):
            return Skip(layer, index, starts, self.inputs)
        return layer


class Skip(nn.Module):
    """A layer whose input is mixed with the inputs of earlier layers (Solar). inputs: the inputs
    that later layers need, by layer index, for one step."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        starts: list[tuple[int, float]],
        inputs: dict[int, Tensor],
    ) -> None:
        super().__init__()
        self.layer = layer
        self.index = index
        self.starts = starts
        self.inputs = inputs

    def forward(
        self, hidden: Tensor, residual: Tensor | None, step: Step
    ) -> tuple[Tensor, Tensor | None]:
        hidden = hidden if residual is None else hidden + residual
        self.inputs[self.index] = hidden.clone()
        for start, share in self.starts:
            hidden = self.inputs[start] * share + hidden * (1 - share)
        out: tuple[Tensor, Tensor | None] = self.layer.forward(hidden, None, step)
        return out
