"""The thinkers of Qwen-Omni: language models with a tower for images and videos, an encoder for
audio, and positions on three axes: time in seconds, height and width.

Qwen2.5-Omni  windows in both (Xu et al. 2025, "Qwen2.5-Omni")
Qwen3-Omni    layers of the tower are added to the first layers of the language model, which has
              experts, and audio is convolved in chunks (Xu et al. 2025, "Qwen3-Omni")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, size_of
from pegboard_model_qwen_omni.audio import ChunkedEncoder, WindowedEncoder
from pegboard_model_qwen_omni.sizes import (
    PARTS,
    ChunkedSizes,
    WindowedSizes,
    thinker_of,
    with_whole_text,
)
from pegboard_models.deep_model import DeepModel
from pegboard_models.deep_sizes import DeepNames, with_deep_text
from pegboard_models.language import build_within, root_of, text_config
from pegboard_models.patch_model import PatchModel, check_width
from pegboard_models.window_sizes import WindowSizes
from pegboard_models.window_tower import WindowTower


class Qwen25Omni(PatchModel):
    """The encoders are built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_whole_text(thinker_of(config))
        build = build_within(build, "thinker", PARTS)
        super().__init__(config, build, windowed_tower)
        if build.has_first_layer:
            sizes = WindowedSizes.of(config)
            check_outer(sizes.outer, config)
            self.audio = WindowedEncoder(root_of(build).at("audio_tower"), sizes)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: input_features [mel bins, frames] of audio; see `PatchModel` for the others. A
        video with its sound has those of both, and order [rows], their places among the rows of the
        video and then those of the sound → [rows, hidden] of each."""
        if modality != "audio":
            return with_sound(super().encode(modality, items), items, self.heard)
        return [self.heard(item) for item in items]

    def heard(self, item: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of audio."""
        return self.audio.forward(item["input_features"])


class Qwen3Omni(DeepModel):
    """Rows of audio add nothing to later layers."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        config = with_experts_text(thinker_of(config))
        build = build_within(build, "thinker", PARTS)
        super().__init__(config, build, DeepNames("merger_list", "ln_q", "mlp.0", "mlp.2"))
        if build.has_first_layer:
            sizes = ChunkedSizes.of(config)
            check_outer(sizes.outer, config)
            self.audio = ChunkedEncoder(root_of(build).at("audio_tower"), sizes)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """See `Qwen25Omni`. Rows are as wide as those of all levels together."""
        if modality != "audio":
            return with_sound(super().encode(modality, items), items, self.heard)
        return [self.heard(item) for item in items]

    def heard(self, item: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of audio."""
        return self.padded(self.audio.forward(item["input_features"]))


def with_sound(
    seen: Sequence[Tensor],
    items: Sequence[Mapping[str, Tensor]],
    heard: Callable[[Mapping[str, Tensor]], Tensor],
) -> list[Tensor]:
    """Return the rows of items with those of their sound, if they have any. seen: without."""
    return [
        torch.cat([rows, heard(item)])[item["order"]] if "order" in item else rows
        for rows, item in zip(seen, items, strict=True)
    ]


def with_experts_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Like `with_whole_text`, for Qwen3-Omni: the axes take turns, and no layer has a window."""
    config = with_whole_text(config)
    is_divided = config["text_config"].get("norm_topk_prob")
    config = with_deep_text(config)
    text = {**config["text_config"], "norm_topk_prob": is_divided is not False}
    text["sliding_window"] = None
    return {**config, "text_config": text}


def windowed_tower(config: Mapping[str, Any], build: Build) -> WindowTower:
    sizes = WindowSizes.of(config, is_later=True, qkv=("q", "k", "v"))
    check_width(sizes.tower, config)
    return WindowTower(build, sizes)


def check_outer(outer: int, config: Mapping[str, Any]) -> None:
    """Raise ModelError if rows of audio do not fit the language model."""
    width = size_of(text_config(config), "hidden_size")
    if outer != width:
        raise ModelError(
            f"the checkpoint's audio_config says that rows of audio have {outer} numbers; those of "
            f"its language model have {width}. Correct its config"
        )
