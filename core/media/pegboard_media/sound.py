"""The sound of a video file. Needs the extra `video`."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from pegboard_media.audio import check_length, check_rate, checked
from pegboard_media.limits import Unusable
from pegboard_media.video import decoder, opened

if TYPE_CHECKING:
    import numpy as np


def decode_sound(content: bytes) -> tuple[np.ndarray, int] | None:
    """Return the samples of a video file, float32 [samples], and how many of them a second has.
    Channels are averaged. None = it has no sound."""
    import numpy as np

    av = decoder()
    samples = np.empty(0, np.float32)
    count = 0
    try:
        with opened(av, content) as container:
            if not container.streams.audio:
                return None
            rate = int(container.streams.audio[0].codec_context.sample_rate or 0)
            check_rate(rate)
            resampler = av.AudioResampler(format="fltp", rate=rate)
            for frame in chain(container.decode(audio=0), [None]):
                for part in resampler.resample(frame):
                    values = part.to_ndarray()
                    length = values.shape[1]
                    count += length
                    check_length(count, rate, len(values))
                    samples.resize(count, refcheck=False)  # an hour twice would be a gigabyte
                    samples[count - length :] = values.mean(axis=0)
    except Unusable:
        raise
    except Exception as error:
        raise Unusable("has sound that av cannot decode, or it is damaged") from error
    return (checked(samples), rate) if count else None
