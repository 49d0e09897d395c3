"""Apertus (2025): an activation with learned numbers, without a gate; normalized queries and
keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError, brief
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import Build, Layer, read
from pegboard.layers.build import Holder, PlainTensor
from pegboard_model_dense.architecture import Architecture, Names
from pegboard_model_dense.blocks import PlainMLP
from pegboard_model_dense.config import common, refuse
from pegboard_model_dense.decoder import Decoder
from pegboard_models.norms import each_head


class XIELU(Layer):
    """(x [T, n]) → αp · x² + β · x for positive x, and αn · (exp(x) - 1 - x) + β · x for others
    (Huang and Schlag 2024). The checkpoint has numbers from which αp = softplus(alpha_p) and αn = β
    + softplus(alpha_n) follow, at build.path. It may have β, which is 0.5 otherwise. given:
    alpha_p, alpha_n and β, if the config has them; None = they are tensors."""

    def __init__(self, build: Build, size: int, given: tuple[float, ...] | None) -> None:
        super().__init__(build)
        self.given = given
        self.numbers: dict[str, PlainTensor] = {}
        start, stop = build.tensor.share(size)
        self.factors = torch.ones(3, stop - start, device=build.device)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if self.given is not None:
            return []
        names = [f"{self.build.path}.{name}" for name in ("alpha_p", "alpha_n", "beta")]
        self.numbers = {
            name: PlainTensor({name: (0, 1)}, (1,), self.build, "float32") for name in names
        }
        self.numbers[names[2]].data.fill_(0.5)
        present = names if names[2] in available else names[:2]
        return [WantedWeight(name, None if available else (1,)) for name in present]

    def accept(self, piece: WeightPiece) -> None:
        if isinstance(piece.data, Tensor) and piece.data.dim() == 0:
            piece = replace(piece, shape=(1,), data=piece.data.view(1))
        self.numbers[piece.name].accept(piece)

    def finish(self) -> None:
        loaded = [tensor.data for tensor in self.numbers.values()]
        of_positive, of_negative, beta = loaded or torch.tensor(
            self.given, device=self.factors.device
        )
        alpha_n = beta + functional.softplus(of_negative)
        for factors, number in zip(
            self.factors, (functional.softplus(of_positive), alpha_n, beta - alpha_n), strict=True
        ):
            factors.copy_(number.expand_as(factors))

    def bind(self) -> None:
        if self.given is not None:
            self.finish()
        alpha_p, alpha_n, line = self.factors

        def forward(x: Tensor) -> Tensor:
            """For x ≤ 0, elu(x) is exp(x) - 1; for others, elu(x) - x is 0. In float32, because the
            difference is small."""
            wide = x.float()
            mixed = (
                functional.relu(wide).square() * alpha_p
                + functional.elu(wide) * alpha_n
                + wide * line
            )
            return mixed.to(x.dtype)

        self.forward = forward

    def holders(self) -> list[Holder]:
        return [*self.numbers.values(), *super().holders()]


class LearnedMLP(PlainMLP):
    """A feed-forward block with xIELU. given: see `XIELU`."""

    def __init__(
        self,
        build: Build,
        model: Architecture,
        width: int,
        given: tuple[float, ...] | None = None,
    ) -> None:
        self.numbers = (width, given)
        super().__init__(build, model, width)

    def make_activation(self, build: Build, name: str) -> Any:
        if name != "xielu":
            return super().make_activation(build, name)
        return XIELU(build.at("act_fn"), *self.numbers)


class Apertus(Decoder):
    """xIELU without a gate. Queries and keys are normalized."""

    @staticmethod
    def architecture(config: Mapping[str, Any]) -> Architecture:
        refuse(config, {"mlp_bias": False, "qk_norm": True, "post_norm": False})
        base = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, **config}
        if config.get("rope_parameters") is None and "rope_scaling" not in config:
            base["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        names = Names(
            before_attention="attention_layernorm",
            before_mlp="feedforward_layernorm",
            up=("up_proj",),
        )
        bias = bool(read(config, "attention_bias", bool))
        model = common(
            base, names=names, mlp=LearnedMLP, head_norm=each_head, qkv_bias=bias, out_bias=bias
        )
        rows: Any = read(config, "xielu", list)  # of GGUF files; other checkpoints have tensors
        if rows is None:
            return model
        if len(rows) != len(model.layers) or not all(_are_numbers(row) for row in rows):
            message = f"the checkpoint's config has xielu={brief(rows)}"
            raise ModelError(
                f"{message}; expected three finite numbers for each of {len(model.layers)} layers"
            )
        pairs = zip(model.layers, rows, strict=True)
        layers = (
            replace(layer, mlp=partial(LearnedMLP, given=tuple(map(float, row))))
            for layer, row in pairs
        )
        return replace(model, layers=tuple(layers))


def _are_numbers(row: Any) -> bool:
    is_row = isinstance(row, list) and len(row) == 3
    return is_row and all(isinstance(value, int | float) and math.isfinite(value) for value in row)
