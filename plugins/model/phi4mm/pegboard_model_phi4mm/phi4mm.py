"""Phi-4-multimodal (Abouelenin et al. 2025): the language model Phi-4-mini, whose adapters for
images and for speech are separate files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nn import functional

from pegboard.layers import Build, Linear, size_of
from pegboard_model_phi4mm.conformer import OTHERS, PUBLISHED, Conformer
from pegboard_model_phi4mm.sizes import AudioSizes, is_published, vision_of
from pegboard_model_phi4mm.vision import ImageEncoder
from pegboard_models.language import WithLanguageModel

BASE = ".base_layer"
"""What published checkpoints add to the names of modules that have adapters."""


class Phi4MM(WithLanguageModel):
    """Tower and encoder are built only where prompts are embedded."""

    def __init__(self, config: Mapping[str, Any], build: Build) -> None:
        text = {**config, "model_type": "phi3"}
        super().__init__({"text_config": text}, without_adapters(build))
        if build.has_first_layer:
            self.build_media(config, build.at("model.embed_tokens_extend").alone())

    def build_media(self, config: Mapping[str, Any], build: Build) -> None:
        """Build what `encode` needs."""
        published = is_published(config)
        hidden = size_of(config, "hidden_size")
        place = build.at("image_embed")
        names = ("sub_GN", "glb_GN")
        if not published:
            names = ("sub_img_feature_extensor", "global_img_feature_extensor")
        vision, depth = vision_of(config)
        self.images = ImageEncoder(place, vision, depth, *names)
        up, down = ("0", "2") if published else ("up", "down")
        joint = "img_projection." if published else "img_projection_"
        self.image_up = Linear(place.at(joint + up), vision.hidden_size, hidden, bias=True)
        self.image_down = Linear(place.at(joint + down), hidden, hidden, bias=True)
        place = build.at("audio_embed")
        audio = AudioSizes.of(config)
        self.audio = Conformer(place.at("encoder"), audio, PUBLISHED if published else OTHERS)
        names = ("audio_projection.speech.0", "audio_projection.speech.2")
        if not published:
            names = ("up_proj_for_speech", "down_proj_for_speech")
        self.audio_up = Linear(place.at(names[0]), audio.hidden_size, hidden, bias=True)
        self.audio_down = Linear(place.at(names[1]), hidden, hidden, bias=True)

    def encode(self, modality: str, items: Sequence[Mapping[str, Tensor]]) -> Sequence[Tensor]:
        """items: of images, pixel_values [3, height, width] and patches [2], how many of them show
        something, below and beside each other; of audio, input_features [frames, mel bins] →
        [rows, hidden] of each."""
        return [self.rows(modality, item) for item in items]

    def rows(self, modality: str, item: Mapping[str, Tensor]) -> Tensor:
        if modality == "image":
            shown = (int(item["patches"][0]), int(item["patches"][1]))
            features = self.images.forward(item["pixel_values"], shown)
            image_rows: Tensor = self.image_down(functional.gelu(self.image_up(features)))
            return image_rows
        features = self.audio.forward(item["input_features"])
        rows: Tensor = self.audio_down(functional.gelu(self.audio_up(features)))
        return rows


def without_adapters(build: Build) -> Build:
    """Return the build of the language model alone. Published checkpoints have the adapters among
    its weights, too; they are not read."""
    ending = f"{BASE}.weight"
    names = [name.removesuffix(ending) for name in build.stored if name.endswith(ending)]
    renamed = {name: name + BASE for name in names}
    build.declared.aliases.update(renamed)
    return replace(build, renamed={**build.renamed, **renamed})
