"""Files of videos for tests, with and without sound. Needs the extra `video`."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np


def film_of(
    frames: np.ndarray, rate: int, samples: np.ndarray | None = None, hertz: int = 16_000
) -> bytes:
    """Return a file without losses. samples: [channels, samples] of its sound; None = it has
    none."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        picture = container.add_stream("ffv1", rate=rate)
        picture.height, picture.width = frames.shape[1:3]
        picture.pix_fmt = "bgr0"
        encoded: list[tuple[Any, Any]] = [
            (picture, av.VideoFrame.from_ndarray(each, format="rgb24")) for each in frames
        ]
        if samples is not None:
            layout = {1: "mono", 2: "stereo"}[len(samples)]
            sound = container.add_stream("pcm_f32le", rate=hertz, layout=layout)
            packed = np.ascontiguousarray(samples.T.reshape(1, -1), np.float32)
            block = av.AudioFrame.from_ndarray(packed, format="flt", layout=layout)
            block.sample_rate = hertz
            encoded.append((sound, block))
        for stream, part in encoded:
            container.mux(stream.encode(part))
        for stream in container.streams:
            container.mux(stream.encode(None))
    return buffer.getvalue()
