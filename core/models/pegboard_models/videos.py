"""What processors of videos share: the steps of transformers' video processors, with Pillow. This
module does not import torch or transformers, because it is loaded in the API process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.processing import described

FILES = ("video_preprocessor_config.json", "preprocessor_config.json")
"""Each may say how videos are processed, if processor_config.json does not."""
THINNEST = 200
"""The longer side of a frame may be this many times its shorter one."""
Size = tuple[int, int]
"""(height, width) in pixels."""


def video_values(checkpoint: Checkpoint, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return how videos are processed. defaults: of what the checkpoint's files do not say, and the
    names that are read. Raises ModelError for files that are wrong."""
    return described(checkpoint, "video_processor", defaults, FILES)


@contextmanager
def blamed_on(options: Mapping[str, Any]) -> Iterator[None]:
    """Raise errors of what a video is made of as RequestError. options: of the processor."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:
        how = f" with {dict(options)}" if options else ""
        raise RequestError(
            f"the video could not be processed{how}: {error}",
            parameter="mm_processor_kwargs" if options else None,
        ) from error


def fitted(
    size: Size, factor: int, least: int, most: int, frames: int = 1, rounded: int = 1
) -> Size:
    """Return multiples of `factor` that are nearly as large, where all frames together have least …
    most pixels. frames: their number. rounded: the number that is counted. Raises RequestError for
    frames that are too thin."""
    height, width = size
    if max(size) > THINNEST * min(size):
        raise RequestError(
            f"a video has {width} × {height} pixels; its longer side may be at most {THINNEST} "
            "times its shorter one. Crop it or add a border"
        )
    sides = [round(side / factor) * factor for side in size]
    if rounded * sides[0] * sides[1] > most:
        scale = math.sqrt(frames * height * width / most)
        sides = [max(factor, math.floor(side / scale / factor) * factor) for side in size]
    elif rounded * sides[0] * sides[1] < least:
        scale = math.sqrt(least / (frames * height * width))
        sides = [math.ceil(side * scale / factor) * factor for side in size]
    return sides[0], sides[1]


def resized(frames: np.ndarray, size: Size, resample: int) -> np.ndarray:
    """Return the frames uint8 [frames, height, width, 3] in another size. resample: Pillow's number
    of a filter."""
    from PIL import Image

    if frames.shape[1:3] == size:
        return frames
    images = [Image.fromarray(frame).resize(size[::-1], resample) for frame in frames]
    return np.stack([np.asarray(image) for image in images])


def scaled_size(size: Size, values: Mapping[str, Any]) -> Size:
    """Return the size that `size` asks for: height and width, or the shorter side. size: of a
    frame."""
    asked = values["size"]
    if "shortest_edge" not in asked:
        return asked["height"], asked["width"]
    short = asked["shortest_edge"]
    longer = int(short * max(size) / min(size))
    return (short, longer) if size[0] <= size[1] else (longer, short)


def cropped(frames: np.ndarray, crop: Mapping[str, int]) -> np.ndarray:
    """Return the middle of the frames. crop: height and width; what is missing is black."""
    for axis, wanted in ((1, crop["height"]), (2, crop["width"])):
        missing = max(0, wanted - frames.shape[axis])
        edges = [(0, 0)] * 4
        edges[axis] = missing // 2, (missing + 1) // 2
        frames = np.pad(frames, edges) if missing else frames
        first = (frames.shape[axis] - wanted) // 2
        frames = frames.take(range(first, first + wanted), axis)
    return frames


def framed(frames: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
    """Return pixels float32 [frames, 3, height, width] of frames uint8 [frames, height, width, 3]:
    scaled, cropped and normalized."""
    if values["do_resize"]:
        size = scaled_size((frames.shape[1], frames.shape[2]), values)
        frames = resized(frames, size, values["resample"])
    if values["do_center_crop"]:
        frames = cropped(frames, values["crop_size"])
    return normalized(frames, values).transpose(0, 3, 1, 2)


def normalized(frames: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
    """Return the frames as float32: times rescale_factor, less image_mean, divided by image_std."""
    pixels = frames.astype(np.float32)
    if values["do_rescale"]:
        pixels *= np.float32(values["rescale_factor"])
    if values["do_normalize"]:
        pixels -= np.array(values["image_mean"], np.float32)
        pixels /= np.array(values["image_std"], np.float32)
    return pixels


def patches_of(pixels: np.ndarray, patch: int, frames: int, merge: int) -> tuple[np.ndarray, Size]:
    """Return the patches [n, 3 · frames · patch · patch] of [a multiple of `frames`, height, width,
    3], and the patches of its height and its width. frames, patch: of a patch. The merge² patches
    of a block are below each other."""
    count, height, width, channels = pixels.shape
    lines = height // patch
    columns = width // patch
    cut = pixels.reshape(
        count // frames, frames, lines // merge, merge, patch, columns // merge, merge, patch, 3
    )
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    flat = ordered.reshape(-1, channels * frames * patch * patch)
    return np.ascontiguousarray(flat), (lines, columns)


def padded(frames: np.ndarray, multiple: int) -> np.ndarray:
    """Repeat the last frame until the number of frames is a multiple."""
    missing = -len(frames) % multiple
    return np.concatenate([frames, *[frames[-1:]] * missing]) if missing else frames
