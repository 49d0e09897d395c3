"""Log-mel features as Whisper computes them (Radford et al. 2022). This module does not import
torch or transformers, because it is loaded in the API process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.processing import FILES, IN_CONFIG, folder_of, json_object
from pegboard_models.whisper_sizes import WhisperSizes

TOP_HZ = 8000.0
"""The highest frequency of the filters."""
FLOOR = 1e-10
"""The least power of a mel bin."""
RANGE = 8.0
"""Powers of ten below the largest power of an item that are told apart."""


@dataclass(frozen=True)
class LogMel:
    """num_bins: mel bins. rate: samples per second. size: samples of a frame. hop: samples from one
    frame to the next. seconds: of an item that is padded."""

    num_bins: int = 80
    rate: int = 16_000
    size: int = 400
    hop: int = 160
    seconds: int = 30

    @classmethod
    def of(cls, checkpoint: Checkpoint, sizes: WhisperSizes | None = None) -> LogMel:
        """Read what a checkpoint says about its WhisperFeatureExtractor. sizes: of the encoder that
        takes what it makes; None = it is not checked. Raises ModelError."""
        names = ("feature_size", "sampling_rate", "n_fft", "hop_length", "chunk_length")
        defaults = (80, 16_000, 400, 160, 30)
        given = extractor_values(checkpoint)
        values = [given.get(name, default) for name, default in zip(names, defaults, strict=True)]
        for name, value in zip(names, values, strict=True):
            if type(value) is not int or value < 1:
                raise ModelError(
                    f"the checkpoint's feature extractor has {name}={value!r}; expected a whole "
                    f"number from 1 on. Correct {FILES[0]}"
                )
        mel = cls(*values)
        shape = mel.num_bins, mel.num_samples // mel.hop
        if sizes is not None and shape != (sizes.num_bins, 2 * sizes.max_positions):
            raise ModelError(
                f"the checkpoint's feature extractor makes {shape[0]} mel bins and {shape[1]} "
                f"frames; its audio encoder takes {sizes.num_bins} and {2 * sizes.max_positions}. "
                f"Correct {FILES[0]} or the config"
            )
        return mel

    @property
    def num_samples(self) -> int:
        """The samples of an item that is padded."""
        return self.seconds * self.rate

    def num_frames(self, samples: np.ndarray) -> int:
        """Return how many frames begin in the samples."""
        return -(-len(samples) // self.hop)

    def __call__(self, samples: np.ndarray, length: int | None = None) -> np.ndarray:
        """Return float32 [num_bins, length // hop] of samples [n]. length: in samples, to which
        silence is added or which is the end; None = n."""
        length = len(samples) if length is None else length
        whole = np.zeros(length, np.float32)
        count = min(length, len(samples))
        whole[:count] = samples[:count]
        total = length // self.hop
        half = self.size // 2
        sounding = min(total, -(-(count + half) // self.hop))
        padded = np.pad(whole, half, mode="reflect")
        filters = mel_filters(self.num_bins, self.size, self.rate)
        mel = np.full((total, self.num_bins), FLOOR, np.float32)
        mel[:sounding] = powers(padded, hann(self.size), self.hop, sounding) @ filters
        logs = np.log10(np.maximum(mel, FLOOR, out=mel), out=mel)
        if total:
            np.maximum(logs, logs.max() - RANGE, out=logs)
        return np.ascontiguousarray(((logs + 4.0) / 4.0).T, np.float32)


def powers(
    padded: np.ndarray, window: np.ndarray, hop: int, count: int | None = None
) -> np.ndarray:
    """Return the power of each frequency, float32 [frames, 1 + size // 2]. padded: samples; a frame
    of the window's size begins after each `hop`. count: of frames; None = all."""
    frames = sliding_window_view(padded, len(window))[::hop][:count]
    spectrum = np.fft.rfft(frames * window)
    power = np.square(spectrum.real) + np.square(spectrum.imag)
    return power.astype(np.float32, copy=False)


def extractor_values(checkpoint: Checkpoint, name: str = "feature_extractor") -> dict[str, Any]:
    """Return what a checkpoint's files say about its feature extractor, or else its config. name:
    what it is called in the file of all processors. Raises ModelError if there is nothing or it is
    wrong."""
    folder = folder_of(checkpoint)
    file, whole = (folder / name for name in FILES)
    if file.is_file():
        return json_object(file)
    values = json_object(whole).get(name) if whole.is_file() else None
    values = checkpoint.config.get(IN_CONFIG) if values is None else values
    if not isinstance(values, Mapping):
        raise ModelError(
            f"{folder} has neither {FILES[0]} nor {name} in {FILES[1]}; one of them "
            "says how audio is processed. Copy it from the model's repository"
        )
    return dict(values)


@lru_cache(4)
def hann(size: int) -> np.ndarray:
    """Return the periodic Hann window, float32 [size]."""
    angles = 2 * np.pi * np.arange(size) / size
    return (0.5 - 0.5 * np.cos(angles)).astype(np.float32)


@lru_cache(4)
def mel_filters(num_bins: int, size: int, rate: int) -> np.ndarray:
    """Return Slaney's triangles of equal area, float32 [1 + size // 2, num_bins]."""
    edges = hertz_of(np.linspace(0.0, mel_of(TOP_HZ), num_bins + 2))
    frequencies = np.linspace(0.0, rate // 2, 1 + size // 2)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return np.asarray(triangles * 2.0 / (edges[2:] - edges[:-2]), np.float32)


STEP = np.log(6.4) / 27.0
"""The scale is linear below 1000 Hz, which is 15 mel, and then logarithmic with this step."""


def mel_of(hertz: float) -> float:
    """Return a frequency from 1000 Hz on in mel."""
    return float(15.0 + np.log(hertz / 1000.0) / STEP)


def hertz_of(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < 15.0, mels * 200.0 / 3.0, 1000.0 * np.exp(STEP * (mels - 15.0)))
