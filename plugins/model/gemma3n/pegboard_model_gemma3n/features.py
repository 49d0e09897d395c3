"""Log-mel features as Gemma 3n's feature extractor computes them. This module does not import torch
or transformers, because it is loaded in the API process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.config_numbers import numbers
from pegboard_models.log_mel import extractor_values, hann

MULTIPLE = 128
"""Samples to a multiple of which an item is padded."""
LONGEST = 480_000
"""The samples after which an item is cut."""
COUNTS = {"feature_size": 128, "sampling_rate": 16_000}
NUMBERS = {
    "padding_value": 0.0,
    "frame_length_ms": 32.0,
    "hop_length_ms": 10.0,
    "min_frequency": 125.0,
    "max_frequency": 7600.0,
    "preemphasis": 0.97,
    "dither": 0.0,
    "input_scale_factor": 1.0,
    "mel_floor": 1e-5,
}
FLAGS = {"preemphasis_htk_flavor": True, "fft_overdrive": True}


class MelFeatures:
    """Samples [n] → features, float32 [frames, mel bins]: the logarithms of the magnitudes in
    triangles of the HTK scale."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Read what a checkpoint says about its Gemma3nAudioFeatureExtractor. Raises ModelError."""
        given = {
            name: value for name, value in extractor_values(checkpoint).items() if value is not None
        }
        what = "feature extractor"
        counts = numbers(given, COUNTS, what)
        self.num_bins = counts["feature_size"]
        self.rate = counts["sampling_rate"]
        self.values = self.checked(given)
        self.size = round(self.rate * self.values["frame_length_ms"] / 1000.0)
        self.hop = round(self.rate * self.values["hop_length_ms"] / 1000.0)
        if self.size < 1 or self.hop < 1:
            raise ModelError(
                f"the checkpoint's {what} has frames of {self.size} samples that begin every "
                f"{self.hop} samples; expected at least 1. Correct frame_length_ms and "
                "hop_length_ms"
            )
        self.is_htk = given.get("preemphasis_htk_flavor", True)
        factor = 2 if given.get("fft_overdrive", True) else 1
        self.width = factor * 2 ** math.ceil(math.log2(self.size))
        limits = self.values["min_frequency"], self.values["max_frequency"]
        self.filters = triangles(self.num_bins, self.width, self.rate, *limits)
        self.mean = self.each_bin(given, "per_bin_mean", 0.0)
        self.deviation = self.each_bin(given, "per_bin_stddev", 1.0)

    def checked(self, given: Mapping[str, Any]) -> dict[str, float]:
        """Return the numbers. Raises ModelError for those that the features cannot be made with."""
        values = {name: given.get(name, default) for name, default in NUMBERS.items()}
        flags = {name: given.get(name, default) for name, default in FLAGS.items()}
        wrong = {name: value for name, value in values.items() if type(value) not in (int, float)}
        wrong |= {name: value for name, value in flags.items() if type(value) is not bool}
        if not wrong and values["dither"]:
            wrong = {"dither": values["dither"]}
        if not wrong and not values["mel_floor"] > 0:
            wrong = {"mel_floor": values["mel_floor"]}
        if not wrong and not 0 <= values["min_frequency"] < values["max_frequency"]:
            wrong = {name: values[name] for name in ("min_frequency", "max_frequency")}
        if given.get("padding_side", "right") != "right":
            wrong = {"padding_side": given["padding_side"]}
        if wrong:
            raise ModelError(
                f"the checkpoint's feature extractor has {wrong}; expected numbers, of which "
                "mel_floor is above 0, dither is 0, and max_frequency is above min_frequency, true "
                'or false for flags, and padding_side="right". Correct preprocessor_config.json'
            )
        return {name: float(value) for name, value in values.items()}

    def each_bin(self, given: Mapping[str, Any], name: str, default: float) -> np.ndarray:
        """Return a number for each bin [num_bins]. Raises ModelError."""
        values = given.get(name, [default] * self.num_bins)
        is_list = isinstance(values, list) and len(values) == self.num_bins
        if not is_list or any(type(value) not in (int, float) for value in values):
            raise ModelError(
                f"the checkpoint's feature extractor has {name}={values!r:.60}; expected "
                f"{self.num_bins} numbers. Correct preprocessor_config.json"
            )
        return np.array(values, np.float64)

    @property
    def least(self) -> int:
        """The samples of the shortest item that has a frame."""
        return self.size // MULTIPLE * MULTIPLE + 1

    def num_frames(self, count: int) -> int:
        """Return how many frames these samples have."""
        padded = -(-min(count, LONGEST) // MULTIPLE) * MULTIPLE
        return max(0, (padded - self.size - 1) // self.hop + 1)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        cut = samples[:LONGEST]
        silence = self.values["padding_value"]
        whole = np.pad(cut, (0, -len(cut) % MULTIPLE), constant_values=silence)
        scaled = whole * np.float32(self.values["input_scale_factor"])
        frames = sliding_window_view(scaled, self.size + 1)[:: self.hop]
        emphasized = self.emphasized(frames)
        spectrum = np.abs(np.fft.rfft(emphasized * hann(self.size), self.width))
        logs = np.log(np.maximum(spectrum @ self.filters, self.values["mel_floor"]))
        return np.ascontiguousarray((logs - self.mean) / self.deviation, np.float32)

    def emphasized(self, frames: np.ndarray) -> np.ndarray:
        """Return frames [frames, size] of [frames, size + 1], with emphasized high frequencies."""
        share = np.float32(self.values["preemphasis"])
        if not share > 0:
            return frames[:, :-1]
        if not self.is_htk:
            return frames[:, 1:] - share * frames[:, :-1]
        first = frames[:, :1] * (1 - share)
        return np.concatenate([first, frames[:, 1:-1] - share * frames[:, :-2]], 1)


def triangles(num_bins: int, size: int, rate: int, lowest: float, highest: float) -> np.ndarray:
    """Return the HTK scale's triangles of equal height between two frequencies, [1 + size // 2,
    num_bins]."""
    first, last = (2595.0 * math.log10(1.0 + hertz / 700.0) for hertz in (lowest, highest))
    edges = 700.0 * (10.0 ** (np.linspace(first, last, num_bins + 2) / 2595.0) - 1.0)
    frequencies = (np.arange(1 + size // 2) * (rate / size))[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    filters: np.ndarray = np.maximum(0.0, np.minimum(rising, falling))
    return filters
