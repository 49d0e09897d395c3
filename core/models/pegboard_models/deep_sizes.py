"""What configs of towers whose layers are added to the language model say (Meng et al. 2024,
"DeepStack")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from pegboard.layers.config import rope_parameters
from pegboard_models.patch_sizes import TowerSizes, check_heads, check_numbers, wrong

DEEP: Mapping[str, Any] = {
    "depth": 27,
    "num_heads": 16,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
DEEP_TAPS = (8, 16, 24)
SECTIONS = [24, 20, 20]
"""The pairs of channels of each axis, if the config does not say."""


@dataclass(frozen=True)
class DeepNames:
    """What checkpoints call the modules that make rows. levels: those of the taps. norm, first,
    last: the parts of each."""

    levels: str = "deepstack_merger_list"
    norm: str = "norm"
    first: str = "linear_fc1"
    last: str = "linear_fc2"


@dataclass(frozen=True)
class DeepSizes:
    """side: of the square of learned positions. taps: the layers of the tower that are added to the
    language model. names: of what makes rows, see `DeepNames`."""

    tower: TowerSizes
    side: int
    taps: tuple[int, ...]
    names: DeepNames

    @classmethod
    def of(cls, config: Mapping[str, Any], names: DeepNames | None = None) -> DeepSizes:
        """Read the vision_config. Raises ModelError for wrong values."""
        given = config.get("vision_config") or {}
        values = {**DEEP, **given}
        check_numbers(values, DEEP)
        check_heads(values["num_heads"], values["hidden_size"])
        count = values["num_position_embeddings"]
        if isqrt(count) ** 2 != count:
            raise wrong("num_position_embeddings", count, "the square of a whole number")
        taps = values.get("deepstack_visual_indexes", DEEP_TAPS)
        if (
            not isinstance(taps, list | tuple)
            or not all(type(layer) is int and 0 <= layer < values["depth"] for layer in taps)
            or len({*taps}) < len(taps)
        ):
            expected = f"different layers from 0 to {values['depth'] - 1}"
            raise wrong("deepstack_visual_indexes", taps, expected)
        rope = given.get("rope_parameters") or {}
        tower = TowerSizes(
            depth=values["depth"],
            num_heads=values["num_heads"],
            width=values["hidden_size"],
            inner=values["intermediate_size"],
            outer=values["out_hidden_size"],
            patch=values["patch_size"],
            frames=values["temporal_patch_size"],
            merge=values["spatial_merge_size"],
            activation=given.get("hidden_act") or "gelu_pytorch_tanh",
            theta=float(rope.get("rope_theta") or 10000.0),
            names=("linear_fc1", "linear_fc2"),
        )
        return cls(tower, isqrt(count), tuple(taps), names or DeepNames())


def with_deep_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with what its text_config leaves unsaid: the axes take turns, the weights
    of experts are divided by their sum, and only the whole config says whether embeddings are
    tied."""
    text = dict(config.get("text_config") or {})
    base, scaling = rope_parameters(text)
    rope = {"mrope_section": SECTIONS, **scaling, "rope_theta": base, "mrope_interleaved": True}
    is_tied = bool(config.get("tie_word_embeddings"))
    text |= {"rope_parameters": rope, "norm_topk_prob": True, "tie_word_embeddings": is_tied}
    return {**config, "text_config": text, "tie_word_embeddings": is_tied}
