"""Rotary embedding settings of a GGUF file in Hugging Face form.

Llama 3 scaling is stored as one divisor per frequency (tensor `rope_freqs.weight`), not as the
parameters it came from; `llama3_parameters` recovers them. With wavelength w_i of the unscaled
frequency i, original context C, factor f and limits low, high, Llama 3 divides frequency i by

    1 where w_i < C/high,   f where w_i > C/low,   else 1 / ((1 - s)/f + s)   with s = (C/w_i - low)
    / (high - low)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from pegboard.errors import ModelError
from pegboard_pack_gguf.header import GGUFHeader
from pegboard_pack_gguf.metadata import Metadata

ORIGINAL_CONTEXT = 8192
"""Only C/low and C/high follow from the divisors. This C gives Llama 3's own numbers (low 1, high
4)."""

MAX_FREQUENCIES = 4096


def rope_config(
    header: GGUFHeader, metadata: Metadata, head_dim: int, is_partly_rotary: bool
) -> dict[str, Any]:
    """Returns `rope_theta`, `rope_scaling` when the frequencies are changed, and
    `partial_rotary_factor` if `is_partly_rotary` or if not all of each head is rotated."""
    theta = metadata.number("rope.freq_base", 10000.0)
    config: dict[str, Any] = {"rope_theta": theta}
    rotary_dim = metadata.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim or is_partly_rotary:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    context = metadata.count("context_length")
    kind = metadata.text("rope.scaling.type")
    divisors = _floats(header, "rope_freqs.weight")
    if divisors is not None:
        config["rope_scaling"] = divisors_config(divisors, theta, rotary_dim)
    elif (long := _floats(header, "rope_factors_long.weight")) is not None:
        short = _floats(header, "rope_factors_short.weight") or long
        original = metadata.count("rope.scaling.original_context_length", context)
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
        }
        config["original_max_position_embeddings"] = original
        if metadata.has("rope.scaling.attn_factor"):
            config["rope_scaling"]["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    elif kind == "linear" or (kind is None and metadata.has("rope.scale_linear")):
        key = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
        config["rope_scaling"] = {"rope_type": "linear", "factor": metadata.number(key)}
    elif kind == "yarn":
        original = metadata.count("rope.scaling.original_context_length", context)
        factor = metadata.number("rope.scaling.factor")
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        for name in ("beta_fast", "beta_slow"):
            if metadata.has(f"rope.scaling.yarn_{name}"):
                scaling[name] = metadata.number(f"rope.scaling.yarn_{name}")
        # of the usual factor, which grows with the length
        if metadata.has("rope.scaling.attn_factor"):
            scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor") * (
                0.1 * math.log(factor) + 1
            )
        if metadata.has("rope.scaling.yarn_log_multiplier"):  # of DeepSeek: a tenth of both
            mscale = float(f"{10 * metadata.number('rope.scaling.yarn_log_multiplier'):.7g}")
            scaling["mscale"] = scaling["mscale_all_dim"] = mscale
        config["rope_scaling"] = scaling
    elif kind not in (None, "none"):
        raise metadata.fail(
            "rope.scaling.type",
            f"is {kind!r}; supported are none, linear, yarn, longrope and llama3 divisors",
        )
    return config


def divisors_config(
    divisors: Sequence[float], theta: float, rotary_dim: int
) -> dict[str, Any] | None:
    """Returns the settings for these divisors: Llama 3 parameters that give them, or the divisors
    themselves in longrope's form, or None if all divisors are 1."""
    if len(divisors) != rotary_dim // 2:
        raise ModelError(
            f"rope_freqs.weight holds {len(divisors)} divisors, expected {rotary_dim // 2}"
        )
    if all(divisor == 1.0 for divisor in divisors):
        return None
    parameters = llama3_parameters(divisors, theta)
    if parameters is not None:
        return parameters
    return {
        "rope_type": "longrope",
        "long_factor": list(divisors),
        "short_factor": list(divisors),
        "attention_factor": 1.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }


def llama3_parameters(divisors: Sequence[float], theta: float) -> dict[str, Any] | None:
    """Fit the middle band: s is linear in 1/w_i, so two points give low and high. Returns None when
    the divisors do not form such a curve."""
    factor = max(divisors)
    wavelengths = [2 * math.pi * theta ** (i / len(divisors)) for i in range(len(divisors))]
    middle = [
        (1 / wavelength, (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for wavelength, divisor in zip(wavelengths, divisors, strict=True)
        if 1.0 < divisor < factor
    ]
    if factor <= 1.0 or len(middle) < 2:
        return None
    (x0, s0) = middle[0]
    (x1, s1) = middle[-1]
    slope = (s0 - s1) / (x0 - x1)
    if not slope > 0:
        return None
    low, high = (ORIGINAL_CONTEXT * (x0 + (goal - s0) / slope) for goal in (0.0, 1.0))
    parameters = {
        "rope_type": "llama3",
        "factor": _rounded(factor),
        "low_freq_factor": _rounded(low),
        "high_freq_factor": _rounded(high),
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    }
    expected = llama3_divisors(parameters, wavelengths)
    close = all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(expected, divisors, strict=True))
    return parameters if close else None


def llama3_divisors(parameters: Mapping[str, Any], wavelengths: Sequence[float]) -> list[float]:
    """The formula in the module's docstring."""
    context = parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    low = parameters["low_freq_factor"]
    high = parameters["high_freq_factor"]
    divisors = []
    for wavelength in wavelengths:
        smooth = min(max((context / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _rounded(value: float) -> float:
    """Rounds to four digits, because float32 stores 1.0000003 for 1.0."""
    return float(f"{value:.4g}")


def _floats(header: GGUFHeader, name: str) -> list[float] | None:
    """Returns the values of a small float32 tensor, or None when the file has no tensor with that
    name."""
    tensor = next((tensor for tensor in header.tensors if tensor.name == name), None)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.num_bytes > 4 * MAX_FREQUENCIES:
        raise ModelError(
            f"{header.path}: {name} is {tensor.type.name} {tensor.shape}, expected a short list "
            "of F32"
        )
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.num_bytes)
    values = list(struct.unpack(f"<{len(data) // 4}f", data))
    if not all(0 < value < math.inf for value in values):
        raise ModelError(f"{header.path}: {name} has values that are not positive numbers")
    return values
