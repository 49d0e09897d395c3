"""Log-mel features of speech, as Phi-4-multimodal computes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from pegboard.errors import RequestError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.config_numbers import numbers
from pegboard_models.processing import FILES, described

DEFAULTS = {
    "feature_size": 80,
    "sampling_rate": 16_000,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "mel_max_frequency": 7690,
}
EMPHASIS = 0.97
"""How much of the sample before is taken away from each."""
SCALE = 32768
BLOCK = 4096
"""Frames that are computed at once."""


@dataclass(frozen=True)
class Features:
    """num_bins: mel bins. rate: samples per second. length: samples of a frame, which are padded to
    `size`. hop: samples from one frame to the next. top: the highest frequency, in Hz."""

    num_bins: int
    rate: int
    size: int
    length: int
    hop: int
    top: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Features:
        """Read what the checkpoint's files say. Raises ModelError."""
        given = described(checkpoint, "audio_processor", DEFAULTS, FILES)
        return cls(*numbers(given, DEFAULTS, "audio processor").values())

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Return float32 [frames, mel bins] of samples [n]. Raises RequestError if they are less
        than a frame."""
        if len(samples) < self.length:
            raise RequestError(
                f"the audio has {len(samples)} samples, at {self.rate} a second; the model takes at"
                f" least {self.length}. Send a longer one"
            )
        frames = sliding_window_view(np.asarray(samples, np.float32), self.length)[:: self.hop]
        parts = [self.logs(frames[i : i + BLOCK]) for i in range(0, len(frames), BLOCK)]
        return np.concatenate(parts)

    def logs(self, frames: np.ndarray) -> np.ndarray:
        """[frames, samples] → [frames, mel bins]."""
        before = np.concatenate([frames[:, :1], frames[:, :-1]], 1)
        emphasized = (frames - np.float32(EMPHASIS) * before) * np.float32(SCALE)
        spectrum = np.fft.rfft(emphasized * np.hamming(self.length), self.size)
        powers = np.square(np.abs(spectrum).astype(np.float32))
        filters = triangles(self.num_bins, self.size, self.rate, self.top)
        return np.log(np.maximum(powers @ filters, np.float32(1.0)))


@lru_cache(4)
def triangles(num_bins: int, size: int, rate: int, top: int) -> np.ndarray:
    """Return triangles of equal height on Kaldi's mel scale, float32 [1 + size // 2, num_bins]."""
    frequencies = np.arange(1 + size // 2) * (rate / size)
    mels = mel_of(frequencies)[:, None]
    edges = np.linspace(0.0, mel_of(np.asarray(float(top))), num_bins + 2)
    rising = (mels - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - mels) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0.0, np.minimum(rising, falling)), np.float32)


def mel_of(hertz: np.ndarray) -> np.ndarray:
    return 1127.0 * np.log(1.0 + hertz / 700.0)
