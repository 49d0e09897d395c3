"""Reads the media of requests: fetches, decodes, and says what an item is."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from pegboard.data.media import MediaSource
from pegboard.errors import RequestError, brief
from pegboard.interfaces.multimodal_processor import MediaReaderSetup
from pegboard_media.audio import check_audio, decode_audio
from pegboard_media.fetch import Fetcher
from pegboard_media.images import check_image, decode_image
from pegboard_media.limits import MAX_BYTES, Unusable
from pegboard_media.options import read_options
from pegboard_media.sound import decode_sound
from pegboard_media.video import check_video, decode_video
from pegboard_media.web import Connect, Resolve, connect_to, resolve_name


class Reader:
    """A `MediaReader`. resolve, connect: how names are looked up, and how addresses are reached.
    Raises ConfigError for options that do not exist."""

    def __init__(
        self,
        setup: MediaReaderSetup,
        resolve: Resolve = resolve_name,
        connect: Connect = connect_to,
    ) -> None:
        self._fetcher = Fetcher(setup, resolve, connect)
        self._options = read_options(setup.options)

    def read(self, source: MediaSource) -> tuple[Any, bytes]:
        """Return the item as the processor takes it, and bytes that say what it is: how it was
        decoded, and its file or its numbers. Raises RequestError."""
        try:
            value = source.value
            content = self._fetcher.fetch(value) if isinstance(value, str) else value
            if not isinstance(content, bytes | bytearray | memoryview):
                return self._checked(source.modality, value)
            if len(content) > MAX_BYTES:
                raise Unusable(f"is larger than {MAX_BYTES} bytes")
            return self._decoded(source.modality, bytes(content))
        except Unusable as error:
            shown = f" {brief(source.value)}" if isinstance(source.value, str) else ""
            message = f"{source.path}: the {source.modality}{shown} {error}"
            raise RequestError(message, parameter=source.path) from error

    def _decoded(self, modality: str, content: bytes) -> tuple[Any, bytes]:
        """Return the item that a file holds, and what it is."""
        options = self._options
        if modality == "image":
            image = decode_image(content, options.background)
            return image, identity(content, "image", "file", options.background)
        if modality == "audio":
            return decode_audio(content), identity(content, "audio", "file")
        if modality == "video":
            video = decode_video(content, options.num_frames, options.fps)
            video = video._replace(sound=partial(sound_of, content))
            return video, identity(content, "video", "file", options.num_frames, options.fps)
        raise unknown(modality)

    def _checked(self, modality: str, value: Any) -> tuple[Any, bytes]:
        """Return an item that came as an object, and what it is."""
        if modality == "image":
            image = check_image(value, self._options.background)
            return image, identity(image.tobytes(), "image", "RGB", image.size)
        if modality == "audio":
            samples, rate = check_audio(value)
            return (samples, rate), identity(samples.tobytes(), "audio", "samples", rate)
        if modality == "video":
            video = check_video(value)._replace(sound=None)  # only a file says what is heard
            frames = video.frames
            what = (frames.shape, video.fps, video.seconds)
            return video, identity(frames.tobytes(), "video", "RGB", *what)
        raise unknown(modality)


def sound_of(content: bytes) -> Any:
    """Return the sound of a video file (see `Video`). Raises RequestError."""
    try:
        return decode_sound(content)
    except Unusable as error:
        raise RequestError(f"the video {error}") from error


def identity(content: bytes, *what: object) -> bytes:
    """Return what an item is, before its bytes. No other item has the same result, because JSON has
    no byte 0."""
    return json.dumps(what).encode() + b"\0" + content


def unknown(modality: str) -> Unusable:
    return Unusable(f"has the unknown modality {brief(modality)}; expected image, audio or video")
