"""Makes of images and audio what Phi-4-multimodal computes with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    PlacedItem,
    Placeholder,
    Processed,
)
from pegboard_media.audio import resample
from pegboard_model_phi4mm.features import Features
from pegboard_model_phi4mm.images import Crops
from pegboard_model_phi4mm.sizes import (
    AUDIO_TOKEN,
    IMAGE_TOKEN,
    MERGED,
    AudioSizes,
    is_published,
    vision_of,
)
from pegboard_models.config_numbers import section
from pegboard_models.processing import token_of

if TYPE_CHECKING:
    from PIL.Image import Image

NUMBERED = re.compile(r"<\|(image|audio)_\d+\|>")
"""What stands for an item in the prompts of the model's authors. The numbers do not matter."""


class Phi4MMProcessor:
    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.sizes = AudioSizes.of(config)
        vision, _ = vision_of(config)
        self.grid = vision.grid
        self.crops = Crops.of(setup.checkpoint, vision)
        self.features = Features.of(setup.checkpoint)
        if self.features.num_bins != self.sizes.num_bins:
            raise ModelError(
                f"the checkpoint's audio processor makes {self.features.num_bins} mel bins; its "
                f"encoder takes {self.sizes.num_bins}. Correct feature_size"
            )
        parts = {"image": ("vision_config", IMAGE_TOKEN), "audio": ("audio_config", AUDIO_TOKEN)}
        self.tokens = {
            modality: token_of(
                {} if is_published(config) else section(config, part), modality, token
            )
            for modality, (part, token) in parts.items()
        }
        self.texts = {
            modality: setup.tokenizer.decode([token], skip_special_tokens=False).strip()
            for modality, token in self.tokens.items()
        }

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.texts[modality], (self.tokens[modality],))

    def rewritten(self, text: str) -> str:
        """Write the placeholders with numbers as tokens."""
        return NUMBERED.sub(lambda match: self.texts[match[1]], text)

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """The model needs none. Raises RequestError for a prompt with both modalities, because
        audio has another projection beside images."""
        if len({item.modality for item in items}) > 1:
            raise RequestError(
                "the prompt has images and audio; this model is served with one of them in a "
                "prompt. Leave the others out",
                parameter="multi_modal_data",
            )
        return {}

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        return Processed([self.tokens[modality]] * num_rows, {})

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        if modality == "image":
            return self.image(value, options)
        self.crops.most_of(options)  # those of images, which a setting may have for all items
        samples, rate = value
        features = self.features(resample(samples, rate, self.features.rate))
        count = self.sizes.num_rows(len(features))
        return replace(self.place_rows(modality, count), arrays={"input_features": features})

    def image(self, image: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [3, height, width], of whole crops, and patches,
        int64 [2], how many of them show something, below and beside each other."""
        pixels, shown = self.crops(image, self.crops.most_of(options))
        lines, columns = (-(-count // MERGED) for count in shown)
        side = self.grid // MERGED
        count = lines * (columns + 1) + 1 + side * (side + 1)
        arrays = {"pixel_values": pixels, "patches": np.array(shown, np.int64)}
        return replace(self.place_rows("image", count), arrays=arrays)
