"""Audio: from a file or an object to mono samples. Files need the extra `audio`."""

from __future__ import annotations

import io
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pegboard.errors import ConfigError
from pegboard_media.limits import (
    MAX_AUDIO_SAMPLES,
    MAX_AUDIO_SECONDS,
    MAX_KEPT_SAMPLES,
    MAX_SAMPLE_RATE,
    Unusable,
)

if TYPE_CHECKING:
    import numpy as np

NO_SAMPLES = "has no samples"
BLOCK = 2**20
"""Samples of all channels together that are decoded at a time."""


class Content(io.BytesIO):
    """The bytes of a file, for libsndfile. A seek to before the beginning, as damaged files ask
    for, changes nothing."""

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with suppress(ValueError, OverflowError):
            return super().seek(offset, whence)
        return self.tell()


def decode_audio(content: bytes) -> tuple[np.ndarray, int]:
    """Return the samples of a file, float32 [samples], and how many of them a second has. Channels
    are averaged. The length is counted while the file is decoded."""
    import numpy as np

    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: its library does not load
        raise Unusable(
            "cannot be decoded, because this server lacks soundfile; install pegboard-media[audio]"
        ) from error
    try:
        with soundfile.SoundFile(Content(content)) as file:
            rate = int(file.samplerate)
            check_rate(rate)
            samples = np.empty(0, np.float32)
            count = 0
            size = max(1, BLOCK // int(file.channels))
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                count += len(block)
                check_length(count, rate, int(file.channels))
                samples.resize(count, refcheck=False)  # an hour twice would be over a gigabyte
                samples[-len(block) :] = checked(block.mean(axis=1))
    except Unusable:
        raise
    except Exception as error:
        raise Unusable("is not audio that soundfile can decode, or it is damaged") from error
    if not count:
        raise Unusable(NO_SAMPLES)
    return samples, rate


def check_audio(value: Any) -> tuple[np.ndarray, int]:
    """Return a pair (floats [samples], samples per second) with float32 samples."""
    import numpy as np

    match value:
        case (np.ndarray() as samples, int() | float() | np.number() as rate):
            pass
        case _:
            raise Unusable(
                f"is a {type(value).__name__}; expected a URL, the bytes of a file, or a pair "
                "(numpy array [samples], samples per second)"
            )
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise Unusable(
            f"is an array {samples.dtype} {list(samples.shape)}; expected floats [samples]"
        )
    if not math.isfinite(rate) or rate != int(rate):
        raise Unusable(f"has {rate} samples per second; expected a whole number")
    check_rate(int(rate))
    check_length(len(samples), int(rate), 1)
    return checked(samples.astype(np.float32)), int(rate)


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Return float32 samples at the rate `target` instead of `rate`. Needs the extra `audio`."""
    import numpy as np

    if rate == target:
        return samples
    try:
        from scipy.signal import resample_poly
    except ImportError as error:
        raise ConfigError(
            "audio cannot be resampled, because scipy is missing; install pegboard-media[audio]"
        ) from error
    common = math.gcd(rate, target)
    resampled = resample_poly(samples, target // common, rate // common)
    return np.asarray(resampled, np.float32)


def check_rate(rate: int) -> None:
    if not 1 <= rate <= MAX_SAMPLE_RATE:
        raise Unusable(f"has {rate} samples per second; expected 1 to {MAX_SAMPLE_RATE}")


def check_length(count: int, rate: int, num_channels: int) -> None:
    is_long = count > min(MAX_AUDIO_SECONDS * rate, MAX_KEPT_SAMPLES)
    if is_long or count * num_channels > MAX_AUDIO_SAMPLES:
        raise Unusable(
            f"is too long; at most {MAX_AUDIO_SECONDS} seconds, {MAX_KEPT_SAMPLES} samples and "
            f"{MAX_AUDIO_SAMPLES} samples of all channels are read"
        )


def checked(samples: np.ndarray) -> np.ndarray:
    import numpy as np

    if not len(samples):
        raise Unusable(NO_SAMPLES)
    if not np.isfinite(samples).all():
        raise Unusable("has samples that are not finite numbers")
    return samples
