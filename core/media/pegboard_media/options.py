"""How files are decoded: the options of --media-io-kwargs, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegboard.errors import ConfigError, brief, did_you_mean

NAMES = {"image": ("rgba_background_color",), "audio": (), "video": ("num_frames", "fps")}
DEFAULT_NUM_FRAMES = 32


@dataclass(frozen=True, slots=True)
class Options:
    """background: what transparent parts of images show, RGB. num_frames: the most frames of a
    video; -1 = all. fps: the most frames of a second of a video; None = any number."""

    background: tuple[int, int, int] = (255, 255, 255)
    num_frames: int = DEFAULT_NUM_FRAMES
    fps: float | None = None


def read_options(options: Mapping[str, Mapping[str, Any]]) -> Options:
    """Return the options of all modalities. Raises ConfigError."""
    for modality, given in options.items():
        if modality not in NAMES:
            raise ConfigError(
                f"media_io_kwargs has the modality {brief(modality)}; expected one of "
                f"{', '.join(NAMES)}{did_you_mean(str(modality), NAMES)}"
            )
        for name in given:
            if name not in NAMES[modality]:
                raise ConfigError(
                    f"media_io_kwargs has the {modality} option {brief(name)}; expected one of "
                    f"{list(NAMES[modality])}{did_you_mean(str(name), NAMES[modality])}"
                )
    image = options.get("image", {})
    video = options.get("video", {})
    num_frames = video.get("num_frames", DEFAULT_NUM_FRAMES)
    if type(num_frames) is not int or (num_frames < 1 and num_frames != -1):
        raise wrong("video.num_frames", num_frames, "a number of frames, or -1 for all")
    fps = video.get("fps", -1)
    if type(fps) not in (int, float) or not (0 < fps < float("inf") or fps == -1):
        raise wrong("video.fps", fps, "a number above 0, or -1 for any")
    color = image.get("rgba_background_color", (255, 255, 255))
    if (
        not isinstance(color, list | tuple)
        or len(color) != 3
        or not all(type(part) is int and 0 <= part <= 255 for part in color)
    ):
        raise wrong("image.rgba_background_color", color, "three whole numbers from 0 to 255")
    return Options((color[0], color[1], color[2]), num_frames, None if fps == -1 else float(fps))


def wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"media_io_kwargs: {name} is {brief(value)}; expected {expected}")
