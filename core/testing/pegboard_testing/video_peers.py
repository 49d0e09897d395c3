"""What tests of processors of videos compare with: the steps of transformers' video processors, of
which only the one that changes sizes needs torchvision; here, Pillow does it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np

TORCHVISION = ("transforms", "transforms.v2", "transforms.v2.functional")


def video_module(family: str) -> Any:
    """Return transformers' module of a video processor. Its classes cannot be built without
    torchvision, but their methods can be called."""
    import torch  # noqa: F401
    import transformers.video_processing_utils  # noqa: F401

    modules = {"torchvision": ModuleType("torchvision")}
    for name in TORCHVISION:
        module: Any = ModuleType(f"torchvision.{name}")
        parent, _, last = module.__name__.rpartition(".")
        setattr(modules[parent], last, module)
        modules[module.__name__] = module
    with mock.patch.dict(sys.modules, modules):
        return importlib.import_module(f"transformers.models.{family}.video_processing_{family}")


def peer_frames(images: Any, frames: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return frames [frames, height, width, 3] as an image processor of transformers makes them:
    float32 [frames, 3, height, width]. size: of the result."""
    from transformers.image_utils import SizeDict

    results = []
    for frame in frames.transpose(0, 3, 1, 2):
        # the method below that of the family, which knows nothing of its sizes
        resize = super(type(images), images).resize
        pixels = resize(frame, SizeDict(height=size[0], width=size[1]), images.resample)
        pixels = images.rescale(pixels, images.rescale_factor)
        results.append(images.normalize(pixels, images.image_mean, images.image_std))
    return np.stack(results)


def random_video(frames: int, width: int, height: int, fps: float = 2.0, seed: int = 0) -> Any:
    """Return a pair (frames of random pixels, frames per second)."""
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (frames, height, width, 3), np.uint8), fps


def as_video(pair: tuple[np.ndarray, float]) -> Any:
    """Return the `Video` that a reader makes of a pair."""
    from pegboard.interfaces.multimodal_processor import Video

    frames, fps = pair
    return Video(frames, fps, tuple(index / fps for index in range(len(frames))))
