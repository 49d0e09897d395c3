"""What towers that see images and videos of any size in patches say in a config (Wang et al. 2024,
"Qwen2-VL"). This module does not import torch, because processors read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError

AXES = ("rope_time", "rope_height", "rope_width")
"""The axes of positions, in the order of the sections of the rotary embedding."""
CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of the colors of CLIP's images."""


@dataclass(frozen=True)
class TowerSizes:
    """width: of the vectors of patches. inner: of the feed-forward blocks. outer: of the rows that
    the tower makes. patch: pixels of a patch's side. frames: of a patch. merge: patches of a row's
    side. is_gated: layers have norms without a mean, and a gate, as those of language models.
    eps: of norms. names: of the two matrices of the feed-forward blocks without a gate.
    qkv_bias, bias: whether queries, keys and values, and the other matrices of a layer, have one.
    qkv: the names of the matrices of queries, keys and values.
    """

    depth: int
    num_heads: int
    width: int
    inner: int
    outer: int
    patch: int
    frames: int
    merge: int
    activation: str
    theta: float
    is_gated: bool = False
    eps: float = 1e-6
    names: tuple[str, str] = ("fc1", "fc2")
    qkv_bias: bool = True
    bias: bool = True
    qkv: tuple[str, ...] = ("qkv",)


def check_numbers(values: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise ModelError for values that are not whole numbers from 1 on."""
    for name in names:
        if type(values[name]) is not int or values[name] < 1:
            raise wrong(name, values[name], "a whole number from 1 on")


def check_heads(count: int, width: int) -> None:
    """Raise ModelError for heads whose channels two axes cannot share."""
    if width % (4 * count):
        raise wrong("num_heads", count, f"a divisor of a quarter of {width}")


def video_defaults(
    colors: tuple[Sequence[float], Sequence[float]], least: int, most: int
) -> dict[str, Any]:
    """Return how videos are processed if no file says. colors: mean and standard deviation. least,
    most: pixels."""
    return {
        "do_resize": True,
        "size": {"shortest_edge": least, "longest_edge": most},
        "resample": 3,  # Pillow's bicubic filter
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": colors[0],
        "image_std": colors[1],
    }


def wrong(name: str, value: object, expected: str) -> ModelError:
    """Return the error of a value of the vision_config."""
    return ModelError(f"the checkpoint's vision_config has {name}={value!r}; expected {expected}")
