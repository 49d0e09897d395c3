"""Makes of images and audio what Gemma 3n computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_media.audio import resample
from pegboard_model_gemma3n.features import LONGEST, MelFeatures
from pegboard_model_gemma3n.sizes import TOKENS, AudioSizes, check_vision, reads, soft_tokens
from pegboard_models.processing import (
    ImageProcessor,
    processor_values,
    refuse_options,
    token_id,
    token_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

TEXTS = {
    "image": ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "audio": ("<start_of_audio>", "<audio_soft_token>", "<end_of_audio>"),
}
NAMES = {"image": ("boi", "image", "eoi"), "audio": ("boa", "audio", "eoa")}
PARTS = {"image": "vision", "audio": "audio"}
COUNTS = {"image": "vision_soft_tokens_per_image", "audio": "audio_soft_tokens_per_image"}
LENGTHS = {"image": "image_seq_length", "audio": "audio_seq_length"}


class Gemma3nProcessor:
    """Every item has the same tokens as the others of its modality: a token for each row, between
    those that begin and end it and blank lines."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        checkpoint = setup.checkpoint
        config = checkpoint.config
        self.marks = {name: token_of(config, name, TOKENS[name]) for name in PARTS}
        self.tokens: dict[str, list[int]] = {}
        names = checkpoint.tensors.keys()
        self.modalities = [
            modality for modality, part in PARTS.items() if reads(config, names, part)
        ]
        for modality in self.modalities:
            self.add(modality, setup)
        if "image" in self.modalities:
            check_vision(config)
            self.images = ImageProcessor(checkpoint)
        if "audio" in self.modalities:
            self.features = MelFeatures(checkpoint)
            self.check_audio(AudioSizes.of(config))

    def add(self, modality: str, setup: MultiModalProcessorSetup) -> None:
        """Make the tokens of a modality. Raises ModelError if the files of the checkpoint
        contradict each other."""
        config = setup.checkpoint.config
        known = [token_of(config, name, TOKENS[name]) for name in NAMES[modality]]
        for text, expected in zip(TEXTS[modality], known, strict=True):
            if (token := token_id(setup.tokenizer, text)) != expected:
                raise ModelError(
                    f"the checkpoint's tokenizer has {text} as token {token}, and its config says "
                    f"{expected}; use the tokenizer of the model's repository"
                )
        count = soft_tokens(config, COUNTS[modality])
        length = processor_values(setup.checkpoint).get(LENGTHS[modality], count)
        if length != count:
            raise ModelError(
                f"processor_config.json has {LENGTHS[modality]}={length!r}, and the checkpoint's "
                f"config has {COUNTS[modality]}={count}; expected the same. Correct one of them"
            )
        blank = [*setup.tokenizer.encode("\n\n", add_special_tokens=False)]
        begin, mark, end = known
        self.tokens[modality] = [*blank, begin, *[mark] * count, end, *blank]

    def check_audio(self, sizes: AudioSizes) -> None:
        """Raise ModelError if the encoder does not take the features, or makes too many rows."""
        if self.features.num_bins != sizes.num_bins:
            raise ModelError(
                f"the checkpoint's feature extractor makes {self.features.num_bins} mel bins; its "
                f"audio encoder takes {sizes.num_bins}. Correct preprocessor_config.json or the "
                "config"
            )
        most = sizes.num_rows(self.features.num_frames(LONGEST))
        count = self.tokens["audio"].count(self.marks["audio"])
        if most > count:
            raise ModelError(
                f"the checkpoint's audio encoder makes up to {most} rows; expected at most "
                f"audio_soft_tokens_per_image={count}. Correct its config"
            )

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(TEXTS[modality][1], (self.marks[modality],))

    def check(self, modality: str) -> None:
        """Raise RequestError if the checkpoint does not read this modality."""
        if modality not in self.modalities:
            raise RequestError(
                f"the checkpoint has no tensors that read items of the modality {modality}; it "
                f"reads {' and '.join(['text', *self.modalities])}. Leave the item out"
            )

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, height, width], or input_features, float32
        [frames, mel bins]. Audio is cut after 30 seconds. Raises RequestError for audio that is
        too short for a frame."""
        self.check(modality)
        arrays = (
            {"pixel_values": self.pixels(value, options)}
            if modality == "image"
            else {"input_features": self.sound(value, options)}
        )
        tokens = [*self.tokens[modality]]
        return Processed(tokens, arrays, np.array(tokens) == self.marks[modality])

    def pixels(self, image: "Image", options: Mapping[str, Any]) -> np.ndarray:
        """Return the pixels of an image. Raises RequestError for those without three channels."""
        pixels = self.images([image], options)["pixel_values"][0]
        if pixels.ndim != 3 or len(pixels) != 3:
            raise RequestError(
                f"the processed image has shape {list(pixels.shape)}; the vision tower takes "
                "[3, height, width]. Leave data_format out",
                parameter="mm_processor_kwargs",
            )
        return np.ascontiguousarray(pixels, np.float32)

    def sound(self, value: tuple[np.ndarray, int], options: Mapping[str, Any]) -> np.ndarray:
        """Return the features of audio."""
        refuse_options(options)
        samples = resample(*value, self.features.rate)
        if not self.features.num_frames(len(samples)):
            raise RequestError(
                f"the audio has {len(samples)} samples, at {self.features.rate} a second; the model"
                f" takes at least {self.features.least}. Send a longer one"
            )
        return self.features(samples)
