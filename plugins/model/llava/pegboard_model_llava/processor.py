"""Makes of images and videos what LLaVA computes with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessor,
    MultiModalProcessorSetup,
    Placeholder,
    Processed,
)
from pegboard_model_llava.defaults import (
    IMAGE_TOKEN,
    NEXT_VIDEOS,
    ONEVISION,
    ONEVISION_IMAGE_TOKEN,
    ONEVISION_VIDEO_TOKEN,
    ONEVISION_VIDEOS,
    VIDEO_IMAGE_TOKEN,
    VIDEO_TOKEN,
    pooling_of,
)
from pegboard_models.anyres import Tiling
from pegboard_models.pixtral_images import PixtralProcessor
from pegboard_models.processing import ImageProcessor, square_pixels, token_of
from pegboard_models.videos import blamed_on, framed, video_values
from pegboard_models.vision_sizes import Selection, VisionSizes

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
"""What stands for an image, if the config does not say."""


class LlavaProcessor:
    """LLaVA 1.5: each image has as many rows as the tower has features. image_token: if the config
    names none. defaults: of other values of the config."""

    image_token = IMAGE_TOKEN
    defaults: Mapping[str, Any] = {}

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = {**self.defaults, **setup.checkpoint.config}
        self.config = config
        self.token = token_of(config, "image", self.image_token)
        self.mark = str(config.get("image_token") or MARK)
        self.sizes = VisionSizes.of(config.get("vision_config") or {})
        self.selection = Selection.of(config, self.sizes)
        self.images = ImageProcessor(setup.checkpoint)

    def placeholder(self, modality: str) -> Placeholder:
        return Placeholder(self.mark, (self.token,))

    @property
    def num_features(self) -> int:
        """The features of one image of the tower's size."""
        return self.sizes.num_positions - self.selection.drops_first

    def place_rows(self, modality: str, num_rows: int) -> Processed:
        tokens = self.placeholder(modality).token_ids
        return Processed([*tokens] * num_rows, {})

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The array is pixel_values, float32 [3, size, size]."""
        pixels = square_pixels(
            self.images([value], options)["pixel_values"][0], self.sizes.image_size
        )
        return Processed([self.token] * self.num_features, {"pixel_values": pixels})


class LlavaNextProcessor(LlavaProcessor):
    """LLaVA-NeXT: the image as a whole, and tiles of it."""

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        self.tiling = Tiling.of(self.config, self.sizes, self.selection)
        self.images.fix("image_grid_pinpoints", [list(each) for each in self.tiling.resolutions])

    def process(self, modality: str, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [1 + tiles, 3, size, size], and image_sizes, int64
        [2] (height, width)."""
        pixels = square_pixels(
            self.images([value], options)["pixel_values"][0], self.sizes.image_size
        )
        size = value.height, value.width
        height, width = self.tiling.lines(size)
        rows = self.num_features + height * (width + 1)
        arrays = {"pixel_values": pixels, "image_sizes": np.array(size, np.int64)}
        return Processed([self.token] * rows, arrays)


class WithVideos(LlavaNextProcessor):
    """Frames have the size of the tower. video_token: if the config names none. videos: how they
    are processed if no file says."""

    video_token = VIDEO_TOKEN
    videos: Mapping[str, Any] = NEXT_VIDEOS

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        super().__init__(options, setup)
        self.of_videos = token_of(self.config, "video", self.video_token)
        self.video_values = video_values(setup.checkpoint, self.videos)
        self.stride = pooling_of(self.config)

    def placeholder(self, modality: str) -> Placeholder:
        if modality == "image":
            return super().placeholder(modality)
        return Placeholder("<video>", (self.of_videos,))

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """The array of a video is pixel_values_videos, float32 [frames, 3, size, size]."""
        if modality == "image":
            return super().process(modality, value, options)
        self.images.check(options)
        values = self.video_values
        values = values | {name: options[name] for name in values if name in options}
        with blamed_on(options):
            pixels = square_pixels(framed(value.frames, values), self.sizes.image_size)
        return Processed(
            [self.of_videos] * self.num_rows(len(pixels)), {"pixel_values_videos": pixels}
        )

    def num_rows(self, num_frames: int) -> int:
        """Return the rows of a video."""
        return num_frames * (self.sizes.grid // self.stride) ** 2


class LlavaNextVideoProcessor(WithVideos):
    image_token = VIDEO_IMAGE_TOKEN


class LlavaOnevisionProcessor(WithVideos):
    image_token = ONEVISION_IMAGE_TOKEN
    video_token = ONEVISION_VIDEO_TOKEN
    defaults = ONEVISION
    videos = ONEVISION_VIDEOS

    def num_rows(self, num_frames: int) -> int:
        return num_frames * math.ceil(self.sizes.grid / 2) ** 2 + 1


def llava_processor(options: object, setup: MultiModalProcessorSetup) -> MultiModalProcessor:
    """Return the processor that suits the tower."""
    tower = (setup.checkpoint.config.get("vision_config") or {}).get("model_type")
    return (PixtralProcessor if tower == "pixtral" else LlavaProcessor)(options, setup)
