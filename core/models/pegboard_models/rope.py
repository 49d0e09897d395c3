"""Rotary embeddings as the config of a checkpoint describes them.

Scaling rules: linear (Chen et al. 2023), dynamic NTK, fixed and mixed NTK (Su 2023,
kexue.fm/archives/9706), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024) and that of Llama 3,
as their config fields define them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, Rope
from pegboard.layers.config import rope_parameters as rope_parameters
from pegboard.layers.config import stretched


def scaled_rope(
    build: Build,
    rotary_dim: int,
    *,
    max_positions: int,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
) -> Rope:
    """Return the rotary embedding of `rotary_dim` channels. base, scaling: see `rope_parameters`.
    max_positions: the config's max_position_embeddings, in tokens. Rules that stretch it make the
    table longer. Raises ModelError for values that give no angles."""
    settings = dict(scaling or {})
    wrong = f"the rotary embedding of {rotary_dim} channels with base {base} and scaling {settings}"
    try:
        frequencies, magnitude = rope_frequencies(rotary_dim, base, settings, max_positions)
        length = stretched_positions(settings, max_positions)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(f"{wrong} cannot be computed: {type(error).__name__}: {error}") from error
    if frequencies.shape != (rotary_dim // 2,) or not (
        frequencies.isfinite().all() and magnitude > 0
    ):
        raise ModelError(
            f"{wrong} has no finite frequency for each of the {rotary_dim / 2} pairs of channels"
        )
    return Rope(build, frequencies, length, magnitude, axes_of_pairs(settings, rotary_dim // 2))


def axes_of_pairs(scaling: Mapping[str, Any], num_pairs: int) -> Tensor | None:
    """Return the axis (0 time, 1 height, 2 width) of each pair of channels, if `mrope_section` says
    how many pairs each has: one axis after the other, or, with `mrope_interleaved`, in turns for as
    long as the second and third last (Bai et al. 2025, "Qwen3-VL"). Raises ModelError if they are
    not three numbers of pairs."""
    sections = scaling.get("mrope_section")
    if sections is None:
        return None
    if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != num_pairs:
        raise ModelError(
            f"mrope_section is {sections}; expected the numbers of pairs of channels of three "
            f"axes, {num_pairs} together"
        )
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    if scaling.get("mrope_interleaved"):
        axes = torch.zeros(num_pairs, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def stretched_positions(scaling: Mapping[str, Any], max_positions: int) -> int:
    """Return how many positions can be served. Linear and dynamic scaling stretch
    max_position_embeddings; YaRN stretches its original length."""
    return max(max_positions, stretched(scaling, max_positions))


def _kind(scaling: Mapping[str, Any]) -> str:
    return str(scaling.get("rope_type") or scaling.get("type") or "default")


def rope_frequencies(
    dim: int, base: float, scaling: Mapping[str, Any], max_positions: int
) -> tuple[Tensor, float]:
    """Return the angle per position of each channel pair, [dim / 2] float32, and the factor of cos
    and sin."""
    kind = _kind(scaling)
    inverse = _inverse(dim, base)
    if kind in ("default", "mrope", "ernie45_vl"):
        return inverse, 1.0
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    factor = float(scaling.get("factor") or max_positions / original)
    if kind == "linear":
        return inverse / factor, 1.0
    # HunYuan: the base grows by a fixed amount
    if kind == "xdrope" or (kind == "dynamic" and scaling.get("alpha")):
        return _inverse(dim, base * float(scaling["alpha"]) ** (dim / (dim - 2))), 1.0
    # all lengths use the base of the longest one, because a key must not depend on later tokens
    if kind == "dynamic":
        grown = factor * stretched_positions(scaling, max_positions) / max_positions - (factor - 1)
        return _inverse(dim, base * grown ** (dim / (dim - 2))), 1.0
    if kind == "llama3":
        return _llama3(inverse, factor, original, scaling), 1.0
    if kind == "ntk":
        return _ntk(dim, base, factor, scaling.get("mixed_b")), 1.0
    if kind in ("yarn", "deepseek_yarn"):
        return _yarn(inverse, dim, base, factor, original, scaling)
    if kind in ("longrope", "su"):  # "su": its first name
        return _longrope(inverse, factor, original, max_positions, scaling)
    known = (
        "default, linear, dynamic, ntk, llama3, yarn, deepseek_yarn, longrope, mrope, ernie45_vl, "
        "xdrope"
    )
    raise ModelError(f"rope scaling {kind!r} is not supported; known: {known}")


def _inverse(dim: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _ntk(dim: int, base: float, factor: float, mixed: Any) -> Tensor:
    """Fixed NTK: the slowest channels are interpolated by `factor`, the fastest not at all. mixed:
    an exponent, with which the divisors grow faster or slower from channel to channel."""
    if mixed is None:
        return _inverse(dim, base * factor) / factor ** (2 / dim)
    growth = math.log(factor) / (dim / 2) ** float(mixed)
    return _inverse(dim, base) / torch.exp(
        growth * torch.arange(1, dim // 2 + 1, dtype=torch.float32) ** float(mixed)
    )


def _longrope(
    inverse: Tensor, factor: float, original: int, max_positions: int, scaling: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """Divide each channel pair by a factor: by the long ones if the model reaches beyond its
    original length, else by the short ones."""
    divisors = scaling["long_factor"] if max_positions > original else scaling["short_factor"]
    if len(divisors) != len(inverse):
        raise ValueError(f"{len(divisors)} factors for {len(inverse)} pairs of channels")
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return inverse / torch.tensor(divisors, dtype=torch.float32), float(magnitude)


def _llama3(inverse: Tensor, factor: float, original: int, scaling: Mapping[str, Any]) -> Tensor:
    """Divide long waves by `factor` and keep short ones, with a smooth ramp between them."""
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    turns = original * inverse / (2 * math.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return inverse / factor * (1 - ramp) + inverse * ramp


def _yarn(
    inverse: Tensor, dim: int, base: float, factor: float, original: int, scaling: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """NTK by parts: keep channels that turn often and interpolate slow ones, with a ramp between
    them (equations 17 to 23)."""

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    low = channel(float(scaling.get("beta_fast") or 32))
    high = channel(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(
        0, 1
    )
    magnitude = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    if _kind(scaling) == "deepseek_yarn":
        magnitude = 1.0 if magnitude is None else magnitude
        all_dim = all_dim or 1e-9  # an omitted factor divides by 1
    default = grown(magnitude) / grown(all_dim) if magnitude and all_dim else grown(1.0)
    return inverse / factor * ramp + inverse * (1 - ramp), float(
        scaling.get("attention_factor") or default
    )
