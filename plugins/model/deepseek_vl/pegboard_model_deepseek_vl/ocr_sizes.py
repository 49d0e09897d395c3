"""What the model and the processor of DeepSeek-OCR read in a config. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ModelError
from pegboard_model_deepseek_vl.sizes import (
    ProjectorSizes,
    check_form,
    check_grid,
    numbers,
    projector_of,
)
from pegboard_models.config_numbers import section
from pegboard_models.vision_sizes import VisionSizes

PATCH = 16
"""Pixels of a patch's side."""
SHRINK = 4
"""Patches of a row's side."""
WINDOW = 14
"""Patches of a window's side."""
NECK = 256
"""Channels of SAM's results."""
IMAGE_SIZE = 1024
SAM: Mapping[str, Any] = {"width": 768, "layers": 12, "heads": 12}
CLIP: Mapping[str, Any] = {
    "width": 1024,
    "layers": 24,
    "heads": 16,
    "image_size": 224,
    "patch_size": 14,
}
WHOLE = [2, 5, 8, 11]
CHANNELS = [512, 1024]
"""The values that a vision_config has if it does not say, as in the published code."""


@dataclass(frozen=True)
class OcrSizes:
    """sam, clip: of the towers. whole: the layers of SAM that attend to all of an image.
    channels: of the results of the two convolutions that make patches fewer."""

    sam: VisionSizes
    clip: VisionSizes
    whole: frozenset[int]
    channels: tuple[int, int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> OcrSizes:
        """Read a config. Raises ModelError."""
        vision = section(config, "vision_config")
        towers = section(vision, "width")
        sam = section(towers, "sam_vit_b")
        size = numbers("vision_config", vision, {"image_size": IMAGE_SIZE})["image_size"]
        sam_values = numbers("sam_vit_b", sam, SAM)
        clip_values = numbers("clip-l-14-224", section(towers, "clip-l-14-224"), CLIP)
        sides = {"image_size": size, "patch_size": PATCH}
        depth = int(sam_values["layers"])
        whole = sam.get("global_attn_indexes", WHOLE)
        if not is_numbers(whole) or not all(0 <= index < depth for index in whole):
            raise ModelError(
                f"the checkpoint's sam_vit_b has global_attn_indexes={whole!r}; expected numbers "
                f"of layers from 0 to {depth - 1}"
            )
        width = clip_values["width"]
        channels = sam.get("downsample_channels", CHANNELS)
        if not is_numbers(channels) or len(channels) != 2 or min(channels) < 1:
            raise wrong_channels(channels, "two whole numbers from 1 on")
        if channels[1] != width:
            raise wrong_channels(channels, f"the last one to be the width of CLIP, {width}")
        sizes = cls(
            sam=tower("siglip_vision_model", {**sam_values, **sides}, "gelu", 1e-6),
            clip=tower("clip_vision_model", clip_values, "quick_gelu", 1e-5),
            whole=frozenset(whole),
            channels=(channels[0], channels[1]),
        )
        check_grid("vision_config", sizes.sam)
        check_grid("clip-l-14-224", sizes.clip)
        return sizes


def tower(kind: str, values: Mapping[str, Any], activation: str, eps: float) -> VisionSizes:
    """Return the sizes of a tower. Its feed-forward blocks have four times its width."""
    return VisionSizes.of(
        {
            "model_type": kind,
            "hidden_size": values["width"],
            "intermediate_size": 4 * values["width"],
            "num_hidden_layers": values["layers"],
            "num_attention_heads": values["heads"],
            "image_size": values["image_size"],
            "patch_size": values["patch_size"],
            "hidden_act": activation,
            "layer_norm_eps": eps,
        }
    )


def is_numbers(values: Any) -> bool:
    """Return whether this is a list of whole numbers."""
    return isinstance(values, list | tuple) and all(type(value) is int for value in values)


def wrong_channels(channels: object, expected: str) -> ModelError:
    return ModelError(
        f"the checkpoint's sam_vit_b has downsample_channels={channels!r}; expected {expected}"
    )


def ocr_projector_of(config: Mapping[str, Any], sizes: OcrSizes) -> ProjectorSizes:
    """Return the sizes of the projector, which reads the features of both towers. Raises ModelError
    for other orders of rows, too."""
    check_form("config", config, {"tile_tag": "2D", "global_view_pos": "head"})
    projector = projector_of(config, sizes.clip.hidden_size + sizes.channels[1])
    if not projector.is_linear:
        raise ModelError(
            "the checkpoint's projector_config has a projector_type that merges rows; DeepSeek-OCR "
            "takes 'linear', because its towers already make patches fewer"
        )
    return projector


def rows_of_side(size: int) -> int:
    """Return the rows of a view's side. size: of the view, in pixels."""
    return -(-(size // PATCH) // SHRINK)
