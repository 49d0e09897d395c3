"""Models without attention: Mamba (Gu & Dao 2023), Mamba-2 (Dao & Gu 2024) and Falcon-Mamba (Zuo et
al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from pegboard.errors import ModelError
from pegboard.layers import Build, Rope, read, size_of
from pegboard_model_mamba.decoder import StateDecoder, block
from pegboard_model_mamba.mixers import Mamba, Mamba2, Mamba2Shape, MambaShape
from pegboard_models.decoder import Names

NAMES = Names(root="backbone", embedding="embeddings", norm="norm_f")


class MambaModel(StateDecoder):
    """norms: see `MambaShape`."""

    norms = ""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        hidden = size_of(config, "hidden_size")
        eps = read(config, "layer_norm_epsilon", float) or 1e-5
        shape = MambaShape(
            hidden=hidden,
            inner=read(config, "intermediate_size", int)
            or hidden * (read(config, "expand", int) or 2),
            state=size_of(config, "state_size"),
            rank=step_rank(config, "time_step_rank"),
            width=read(config, "conv_kernel", int) or 4,
            bias=bool(read(config, "use_bias", bool)),
            conv_bias=read(config, "use_conv_bias", bool) is not False,
            norms=self.norms,
            eps=read(config, "mixer_rms_eps", float) or 1e-6,
        )

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            return block(build, hidden, eps, ("norm", Mamba(build.at("mixer"), index, shape)))

        super().__init__(config, build, make, eps=eps, names=NAMES, is_tied=True)


class FalconMambaModel(MambaModel):
    norms = "plain"


class Mamba2Model(StateDecoder):
    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        hidden = size_of(config, "hidden_size")
        eps = read(config, "layer_norm_epsilon", float) or 1e-5
        shape = Mamba2Shape(
            hidden=hidden,
            heads=size_of(config, "num_heads"),
            head_dim=size_of(config, "head_dim"),
            groups=read(config, "n_groups", int) or 8,
            state=size_of(config, "state_size"),
            width=read(config, "conv_kernel", int) or 4,
            bias=bool(read(config, "use_bias", bool)),
            conv_bias=read(config, "use_conv_bias", bool) is not False,
            out_bias=bool(read(config, "use_bias", bool)),
            eps=eps,
            limits=step_limits(config),
        )

        def make(build: Build, index: int, rope: Rope | None) -> nn.Module:
            return block(build, hidden, eps, ("norm", Mamba2(build.at("mixer"), index, shape)))

        super().__init__(config, build, make, eps=eps, names=NAMES)


def step_rank(config: Mapping[str, Any], name: str) -> int:
    """Return the rank of the step sizes, which may be "auto"."""
    if config.get(name) in (None, "auto"):
        return math.ceil(size_of(config, "hidden_size") / 16)
    return size_of(config, name)


def step_limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the smallest and the largest step size. Raises ModelError if the config has something
    else."""
    limits = config.get("time_step_limit") or (0.0, math.inf)
    try:
        low, high = (float(limit) for limit in limits)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"the checkpoint's config has time_step_limit={limits!r}; expected two numbers"
        ) from error
    return low, high
