"""The blocks of the vision tower: the encoder of MobileNet-V5 with 300 million weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pegboard_model_gemma3n.sizes import VISION_WIDTH


@dataclass(frozen=True)
class Edge:
    """A convolution of all channels to `expansion` times as many, and one back to `channels`."""

    channels: int
    stride: int = 1
    expansion: int = 4


@dataclass(frozen=True)
class Inverted:
    """Convolutions of each channel before (start) and after (middle) there are `expansion` times as
    many of them. Their kernels may be 0, for none."""

    channels: int
    start: int
    middle: int = 0
    stride: int = 1
    expansion: int = 4


@dataclass(frozen=True)
class Attending:
    """Attention of several heads of queries to one of keys. stride: of the keys."""

    channels: int
    heads: int
    head_dim: int
    stride: int = 1


Stage = Sequence[Edge | Inverted | Attending]


@dataclass(frozen=True)
class Stages:
    """stem: channels of the first convolution. width: channels of the output."""

    stem: int
    stages: Sequence[Stage]
    width: int = VISION_WIDTH


def attending(channels: int, count: int, heads: int, head_dim: int, stride: int) -> Stage:
    """Return blocks of attention and convolutions in turn. count: of each."""
    pair = (Attending(channels, heads, head_dim, stride), Inverted(channels, 0, expansion=2))
    return pair * count


STAGES = Stages(
    64,
    (
        (Edge(128, stride=2), Edge(128), Edge(128)),
        (Inverted(256, 3, 5, 2, 6), *(Inverted(256, kernel) for kernel in (5, 3, 5, 3))),
        (
            Inverted(640, 5, 5, 2, 6),
            *(Inverted(640, 5) for _ in range(7)),
            Inverted(640, 0, expansion=1),
            *attending(640, 14, 12, 64, 2),
        ),
        (Inverted(1280, 5, 5, 2, 6), *attending(1280, 19, 16, 96, 1)),
    ),
)
"""The encoder with 300 million weights."""
