"""Limits on media, and the error of media that cannot be used."""

from __future__ import annotations

MAX_BYTES = 64 * 1024 * 1024
"""Bytes of one file, counted while it is read."""
MAX_FETCH_SECONDS = 5.0
"""Time for one file from the network: connections, redirects and body together. Looking up a name
has the time that the system gives to it."""
MAX_HEADER_BYTES = 64 * 1024
"""Bytes of an HTTP answer before its body."""
MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
"""Characters of a URL that is not a data: URL."""
MAX_PIXELS = 8192 * 8192
"""Pixels of an image, or of all kept frames of a video together."""
MAX_AUDIO_SECONDS = 3600
MAX_AUDIO_SAMPLES = 2**28
"""Samples of all channels of an audio file together."""
MAX_KEPT_SAMPLES = 3600 * 48_000
"""Samples of an audio file after its channels are averaged."""
MAX_SAMPLE_RATE = 768_000
MAX_VIDEO_FRAMES = 100_000
"""Frames of a video file, which are decoded to find those that are kept."""
MAX_DECODED_PIXELS = 2**34
"""Pixels of all frames of a video file together."""


class Unusable(Exception):
    """An item cannot be read. The message follows "image ..., " in what the client gets."""
