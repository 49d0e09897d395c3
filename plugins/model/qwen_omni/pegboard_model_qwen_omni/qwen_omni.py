"""The thinkers of Qwen-Omni: language models with a tower for images and videos, an encoder for
audio, and positions on three axes: time in seconds, height and width.

Qwen2.5-Omni  windows in both (Xu et al. 2025)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pegboard.errors import ModelError
from pegboard.layers import Build, size_of
from pegboard_model_qwen_omni.audio import WindowedEncoder
from pegboard_model_qwen_omni.sizes import PARTS, WindowedSizes, thinker_of, with_whole_text
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
        """items: input_features [mel bins, frames] of audio; see `PatchModel` for the others →
        [rows, hidden] of each."""
        if modality != "audio":
            return super().encode(modality, items)
        return [self.audio.forward(item["input_features"]) for item in items]


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
