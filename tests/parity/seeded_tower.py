"""Weights and images that are the same wherever they are made, for comparisons with the package
timm. This module needs only numpy and torch, because it also runs where timm is."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

SMALL = [
    ["er_r1_k3_s2_e4_c8", "er_r1_k3_s1_e4_c8"],
    ["uir_r1_a3_k5_s2_e6_c16", "mqa_r1_k3_h3_v2_s1_d8_c16", "uir_r1_a5_k0_s1_e4_c16"],
    ["uir_r1_a5_k5_s2_e6_c24", "mqa_r1_k3_h2_s1_d8_c24", "uir_r1_a0_k0_s1_e2_c24"],
]
"""The blocks of a small tower, as timm writes them."""
STEM = 8
SIZES = {"small": ((96, 64), (128, 256), (37, 51)), "whole": ((256, 256), (96, 160))}
"""Heights and widths of the images for each tower."""
STEP = 32, 128
"""Every 32nd row and 128th channel of the small tower is kept in a file."""


def normal(name: str, shape: Sequence[int]) -> Tensor:
    """Return normal numbers that depend only on the name and the shape."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    return torch.from_numpy(random.normal(size=tuple(shape)).astype(np.float32))


def seeded(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Return the weights of a tower, by name."""
    tensors = {}
    for name, shape in shapes.items():
        numbers = normal(name, shape)
        is_plain = len(shape) == 1
        tensors[name] = 1 + 0.1 * numbers if is_plain else numbers / math.prod(shape[1:]) ** 0.5
    return tensors


def images(tower: str) -> dict[str, Tensor]:
    """Return pixels [3, height, width] of images, by a name."""
    named = {f"{height}x{width}": (3, height, width) for height, width in SIZES[tower]}
    return {name: normal(f"{tower} {name}", shape).sigmoid() for name, shape in named.items()}
