"""Makes of audio what Granite Speech computes with."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_media.audio import resample
from pegboard_model_granite_speech.sizes import AUDIO_TOKEN, Windows
from pegboard_models.config_numbers import numbers
from pegboard_models.log_mel import FLOOR, RANGE, extractor_values, hann, powers
from pegboard_models.processing import refuse_options, token_of

SPECTRUM = {
    "sample_rate": 16_000,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "n_mels": 80,
}


class GraniteSpeechProcessor:
    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        self.token = token_of(config, "audio", AUDIO_TOKEN)
        self.windows = Windows.of(config)
        given = extractor_values(setup.checkpoint, "audio_processor")
        inner = given.get("melspec_kwargs") or {}
        values = numbers({**given, **inner}, SPECTRUM, "preprocessor_config.json")
        self.rate = values["sample_rate"]
        self.size = values["n_fft"]
        self.hop = values["hop_length"]
        self.window = framed(values["win_length"], self.size)
        self.filters = triangles(values["n_mels"], self.size, self.rate)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder("<|audio|>", (self.token,))

    def process(
        self, modality: str, value: tuple[np.ndarray, int], options: Mapping[str, Any]
    ) -> Processed:
        """The array is input_features, float32 [frames // 2, 2 · mel bins]. Raises RequestError for
        audio that is too short for a row."""
        refuse_options(options)
        samples = resample(*value, self.rate)
        if len(samples) < self.hop:
            raise RequestError(
                f"the audio has {len(samples)} samples, at {self.rate} a second; the model takes at"
                f" least {self.hop}. Send a longer one"
            )
        features = self.features(samples)
        num_rows = self.windows.num_rows(len(features))
        return Processed([self.token] * num_rows, {"input_features": features})

    def features(self, samples: np.ndarray) -> np.ndarray:
        """Return the log-mel features of two frames after each other: [samples] → float32."""
        padded = np.pad(samples, self.size // 2, mode="reflect")
        mel = powers(padded, self.window, self.hop) @ self.filters
        logs = np.log10(np.maximum(mel, FLOOR))
        logs = np.maximum(logs, logs.max() - RANGE) / 4.0 + 1.0
        even = logs[: len(logs) // 2 * 2]
        return np.ascontiguousarray(even.reshape(len(even) // 2, -1), np.float32)


def framed(length: int, size: int) -> np.ndarray:
    """Return a Hann window of `length` samples in the middle of `size`."""
    before = (size - length) // 2
    return np.pad(hann(length), (before, size - length - before))


@lru_cache(4)
def triangles(num_bins: int, size: int, rate: int) -> np.ndarray:
    """Return the HTK scale's triangles of equal height, float32 [1 + size // 2, num_bins]."""
    top = 2595.0 * np.log10(1.0 + rate // 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0.0, top, num_bins + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0.0, rate // 2, 1 + size // 2)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)), np.float32)
