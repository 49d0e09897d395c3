"""Video: from a file or an object to frames. Files need the extra `video`."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pegboard.errors import brief
from pegboard.interfaces.multimodal_processor import Video
from pegboard_media.limits import (
    MAX_DECODED_PIXELS,
    MAX_PIXELS,
    MAX_VIDEO_FRAMES,
    Unusable,
)

if TYPE_CHECKING:
    import numpy as np

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,ogg,mpegts,flv,asf,gif"
"""FFmpeg's names of the formats that are read."""
DEFAULT_FPS = 24.0
"""The frames of a second of an array that comes without this number, as in transformers."""


def decode_video(content: bytes, num_frames: int, fps: float | None) -> Video:
    """Return frames of a file, evenly spaced from the first frame to the last. num_frames: the most
    frames; -1 = all. fps: the most frames of a second; None = any number."""
    import numpy as np

    av = decoder()
    try:
        total, rate = length(av, content)
        wanted = positions(total, rate, num_frames, fps)
        frames = kept_frames(av, content, wanted)
    except Unusable:
        raise
    except Exception as error:
        raise Unusable("is not a video that av can decode, or it is damaged") from error
    if not frames:
        raise Unusable("has no frames that can be decoded")
    seconds = tuple(index / rate for index in wanted[: len(frames)])
    return Video(np.stack(frames), rate * len(wanted) / total, seconds)


def decoder() -> Any:
    """Return the library that decodes videos."""
    try:
        import av
    except (ImportError, OSError) as error:
        raise Unusable(
            "cannot be decoded, because this server lacks av; install pegboard-media[video]"
        ) from error
    return av


def opened(av: Any, content: bytes) -> Any:
    """Return the container of a file. Playlists and scripts, which name other files, are not
    read."""
    options = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    return av.open(io.BytesIO(content), options=options)


def length(av: Any, content: bytes) -> tuple[int, float]:
    """Return how many frames a file has, and how many of them a second has."""
    with opened(av, content) as container:
        stream = container.streams.video[0]
        check_frames(stream.codec_context.width, stream.codec_context.height, 1)
        total = 0
        for packet in container.demux(stream):
            total += packet.size > 0
            if total > MAX_VIDEO_FRAMES:
                raise Unusable(f"has more than {MAX_VIDEO_FRAMES} frames")
        rate = float(stream.average_rate or 0)
    if not total or not rate > 0:
        raise Unusable("has no frames")
    return total, rate


def positions(total: int, rate: float, num_frames: int, fps: float | None) -> list[int]:
    """Return which of `total` frames are kept, in order."""
    count = total if num_frames < 0 else min(num_frames, total)
    if fps is not None:
        count = min(count, max(1, math.floor(total / rate * fps)))
    if count == 1:
        return [0]
    return [index * (total - 1) // (count - 1) for index in range(count)]


def kept_frames(av: Any, content: bytes, wanted: list[int]) -> list[np.ndarray]:
    """Decode a file up to the last frame that is wanted. All frames get the size of the first."""
    frames: list[np.ndarray] = []
    num_pixels = 0
    left = set(wanted)
    with opened(av, content) as container:
        container.streams.video[0].codec_context.options = {"max_pixels": str(MAX_PIXELS)}
        for index, frame in enumerate(container.decode(video=0)):
            num_pixels += frame.width * frame.height
            if num_pixels > MAX_DECODED_PIXELS:
                raise Unusable(f"has more than {MAX_DECODED_PIXELS} pixels in all its frames")
            if index in left:
                check_frames(frame.width, frame.height, len(wanted))
                height, width = frames[0].shape[:2] if frames else (frame.height, frame.width)
                frames.append(frame.to_ndarray(format="rgb24", width=width, height=height))
                left.discard(index)
            if not left:
                break
    return frames


def check_video(value: Any) -> Video:
    """Return the video of an array uint8 [frames, height, width, 3] or a list of frames, or of a
    pair of one and its frames per second or its metadata, after a check."""
    if isinstance(value, Video):
        check_array(value.frames)
        return value
    frames, more = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    frames = check_array(array_of(frames))
    metadata = more if isinstance(more, Mapping) else {"fps": more}
    rate = number_of(metadata, "fps", DEFAULT_FPS)
    indices = metadata.get("frames_indices")
    if indices is None:
        return Video(frames, rate, tuple(index / rate for index in range(len(frames))))
    places = [float(index) for index in indices] if hasattr(indices, "__iter__") else []
    if len(places) != len(frames) or not all(0 <= place < math.inf for place in places):
        raise Unusable(
            f"has frames_indices={brief(indices)}; expected the number of each of its "
            f"{len(frames)} frames in the whole video"
        )
    total = number_of(metadata, "total_num_frames", float(len(frames)))
    return Video(frames, rate * len(frames) / total, tuple(place / rate for place in places))


def array_of(frames: Any) -> Any:
    """Return the array of frames that are PIL images or arrays of one size."""
    import numpy as np

    if not isinstance(frames, list):
        return frames
    try:
        each = [frame.convert("RGB") if hasattr(frame, "convert") else frame for frame in frames]
        return np.stack([np.asarray(frame) for frame in each])
    except Exception as error:
        raise Unusable(
            f"is a list of {len(frames)} things that are not frames; expected PIL images or arrays "
            "uint8 [height, width, 3] of one size"
        ) from error


def check_array(frames: Any) -> np.ndarray:
    """Return the frames if they are uint8 [frames, height, width, 3]."""
    import numpy as np

    if not isinstance(frames, np.ndarray):
        raise Unusable(
            f"is a {type(frames).__name__}; expected a URL, the bytes of a file, a numpy array "
            "[frames, height, width, 3], a list of frames, or a pair (array or list, frames per "
            "second or metadata)"
        )
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or not frames.size:
        raise Unusable(
            f"is an array {frames.dtype} {list(frames.shape)}; expected uint8 [frames, height, "
            "width, 3]"
        )
    check_frames(frames.shape[2], frames.shape[1], frames.shape[0])
    return frames


def number_of(metadata: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number of the metadata. None = default."""
    value = metadata.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, str | bytes) or not 0 < number < math.inf:
        raise Unusable(f"has {name}={brief(value)}; expected a number above 0")
    return number


def check_frames(width: int, height: int, count: int) -> None:
    if width * height * count > MAX_PIXELS:
        raise Unusable(
            f"has {count} frames of {width} x {height} pixels to keep; at most {MAX_PIXELS} pixels "
            "are kept"
        )
