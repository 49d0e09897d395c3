"""Makes of audio what Ultravox computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegboard.errors import ModelError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_media.audio import resample
from pegboard_model_ultravox.sizes import AUDIO_TOKEN, Stacking, encoder_sizes
from pegboard_models.log_mel import LogMel
from pegboard_models.processing import (
    FILES,
    folder_of,
    processor_values,
    refuse_options,
    token_of,
)
from pegboard_models.whisper_sizes import WhisperSizes

TEXT = "<|audio|>"
LEAST_FRAMES = 2
"""Shorter audio is followed by silence."""


class UltravoxProcessor:
    """Audio of any length is one item: its chunks follow each other."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        sizes = encoder_sizes(config)
        self.stacking = Stacking.of(config, sizes)
        check_values(processor_values(setup.checkpoint), self.stacking)
        self.mel = mel_of(setup.checkpoint, sizes)
        self.token = row_token(config)
        self.mark = tuple(setup.tokenizer.encode(TEXT, add_special_tokens=False))

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(TEXT, self.mark)

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The array is input_features, float32 [mel bins, frames]. Raises RequestError for
        options."""
        refuse_options(options)
        samples = resample(*value, self.mel.rate)
        count = max(LEAST_FRAMES, self.mel.num_frames(samples))
        features = self.mel(samples, count * self.mel.hop)
        return Processed([self.token] * self.stacking.num_rows(count), {"input_features": features})

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        return Processed([self.token] * num_rows, {})


def row_token(config: Mapping[str, Any]) -> int:
    """Return the token in whose place a row is. The audio token of many checkpoints comes after the
    last one that has an embedding; the first token of all stands for it then. Raises ModelError."""
    token = token_of(config, "audio", AUDIO_TOKEN)
    text = config.get("text_config")
    size = text.get("vocab_size") if isinstance(text, Mapping) else None
    return 0 if isinstance(size, int) and token >= size else token


def mel_of(checkpoint: Checkpoint, sizes: WhisperSizes) -> LogMel:
    """Return what makes mel bins. Published checkpoints have no file of a feature extractor: theirs
    is that of the encoder. Raises ModelError."""
    is_file = (folder_of(checkpoint) / FILES[0]).is_file()
    if is_file or "feature_extractor" in processor_values(checkpoint):
        return LogMel.of(checkpoint, sizes)
    return LogMel(sizes.num_bins)


def check_values(values: Mapping[str, Any], stacking: Stacking) -> None:
    """Raise ModelError for values of processor_config.json that do not fit the config."""
    expected = {
        "audio_padding": "longest",
        "audio_placeholder": TEXT,
        "encoder_ds_factor": 2,
        "stack_factor": stacking.stack,
        "audio_context_size": stacking.frames,
    }
    for name, value in expected.items():
        given = values.get(name, value)
        if given != value:
            raise ModelError(
                f"{FILES[1]} has {name}={given!r}; the checkpoint's config needs {value!r}. "
                "Correct one of them"
            )
