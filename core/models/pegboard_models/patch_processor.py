"""Makes patches of images and videos, and positions on three axes. This module does not import
torch, because it is loaded in the API process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    PlacedItem,
    Placeholder,
    Processed,
    Video,
)
from pegboard_models.given_forms import numbers_of, wrong_rows
from pegboard_models.patch_positions import offsets
from pegboard_models.processing import ImageProcessor, token_of
from pegboard_models.videos import (
    THINNEST,
    Size,
    blamed_on,
    fitted,
    normalized,
    padded,
    patches_of,
    resized,
    video_values,
)

if TYPE_CHECKING:
    from PIL.Image import Image

LIMITS = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
"""Options, and what the image processor calls them. It counts pixels of the area with both."""


class PatchProcessor:
    """An image is scaled to a multiple of 28 × 28 pixels, each of which becomes a token. A video is
    like an image for every two frames. patch: pixels of a patch's side, if the config does not say.
    video_defaults: how videos are processed if no file says. tokens: those of an image and of a
    video, if the config does not say. texts: what stands for an image and for a video."""

    patch = 14
    video_defaults: Mapping[str, Any]
    tokens: tuple[int, int]
    texts: tuple[str, str]

    def __init__(self, options: object, setup: MultiModalProcessorSetup) -> None:
        config = setup.checkpoint.config
        vision = config.get("vision_config") or {}
        self.token = token_of(config, "image", self.tokens[0])
        self.video_token = token_of(config, "video", self.tokens[1])
        self.images = ImageProcessor(setup.checkpoint)
        self.merge = int(vision.get("spatial_merge_size", 2))
        self.patch = int(vision.get("patch_size", self.patch))
        self.frames = int(vision.get("temporal_patch_size", 2))
        self.images.fix("merge_size", self.merge)
        self.images.fix("patch_size", self.patch)
        self.images.fix("temporal_patch_size", self.frames)
        values = video_values(setup.checkpoint, {**self.video_defaults, **dict.fromkeys(LIMITS)})
        edges = {LIMITS[name]: values.pop(name) for name in LIMITS}
        given = {name: value for name, value in edges.items() if value is not None}
        self.videos = {**values, "size": {**values["size"], **given}}

    def placeholder(self, modality: str) -> Placeholder:
        """The token of the item is the only one whose place its tokens take."""
        image, video = self.texts
        if modality == "image":
            return Placeholder(image, (self.token,))
        return Placeholder(video, (self.video_token,))

    def process(self, modality: str, value: Any, options: Mapping[str, Any]) -> Processed:
        """Process an image or a video."""
        self.images.check(options)
        return (self.image if modality == "image" else self.video)(value, options)

    def image(self, value: "Image", options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values, float32 [patches, 3 · frames · patch · patch], and
        image_grid_thw, int64 [3], in patches. The facts: see `offsets`."""
        if max(value.size) > THINNEST * min(value.size):
            raise RequestError(
                f"an image has {value.width} × {value.height} pixels; its longer side may be at "
                f"most {THINNEST} times its shorter one. Crop it or add a border"
            )
        arrays = self.images([value], limited(options, self.images.inner.size))
        grid = arrays["image_grid_thw"][0].astype(np.int64)
        pixels = np.ascontiguousarray(arrays["pixel_values"], dtype=np.float32)
        placed = self.placed(*(int(count) // self.merge for count in grid[1:]))
        return replace(placed, arrays={"pixel_values": pixels, "image_grid_thw": grid})

    def placed(self, height: int, width: int) -> Processed:
        """Return the tokens of an image of so many lines and columns of them."""
        facts = {"grids": [(0, (1, height, width))]}
        return Processed([self.token] * (height * width), {}, facts=facts)

    def place_formed_rows(
        self, modality: str, num_rows: int, form: Mapping[str, np.ndarray]
    ) -> Processed:
        """The form of an image is image_grid_thw, int64 [3], as `image` makes it."""
        if modality != "image":
            raise RequestError(
                f"this model takes the rows of images, not those of type {modality}; send the item"
            )
        meaning = f"image_grid_thw, (1, height, width) in patches, multiples of {self.merge}"
        frames, *sides = numbers_of(form, {"image_grid_thw": 3}, meaning)
        height, width = (side // self.merge for side in sides)
        is_whole = not any(side % self.merge for side in sides)
        if frames != 1 or not is_whole or height * width != num_rows:
            raise wrong_rows(
                num_rows,
                f"{meaning}, with a row for every {self.merge**2} patches, got {[frames, *sides]}",
            )
        return self.placed(height, width)

    def video(self, value: Video, options: Mapping[str, Any]) -> Processed:
        """The arrays are pixel_values_videos and video_grid_thw, in the form of those of images."""
        patches, (count, height, width) = self.patches(value, options)
        grid = count, height // self.merge, width // self.merge
        return Processed(
            [self.video_token] * (grid[0] * grid[1] * grid[2]),
            {
                "pixel_values_videos": patches,
                "video_grid_thw": np.array([count, height, width], np.int64),
            },
            facts={"grids": [(0, grid)], "interval": self.interval(value)},
        )

    def interval(self, video: Video) -> float:
        """Return how far the times of two frames of patches are from each other, in positions."""
        return 1.0

    def patches(
        self, video: Video, options: Mapping[str, Any]
    ) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return the patches of a video, float32 [patches, 3 · frames · patch · patch], and how
        many are behind, below and beside each other. Raises RequestError."""
        asked = limited(options, self.videos["size"])
        values = self.videos | {name: asked[name] for name in self.videos if name in asked}
        with blamed_on(options):
            frames = padded(video.frames, self.frames)
            if values["do_resize"]:
                shape = video.frames.shape
                size = self.fitted(shape[0], (shape[1], shape[2]), values["size"])
                frames = resized(frames, size, values["resample"])
            pixels = normalized(frames, values)
            patches, (height, width) = patches_of(pixels, self.patch, self.frames, self.merge)
        return patches, (len(frames) // self.frames, height, width)

    def fitted(self, count: int, size: Size, limits: Mapping[str, int]) -> Size:
        """Return the size to which frames are scaled. limits: of the pixels of a frame."""
        least, most = (limits[name] for name in LIMITS.values())
        return fitted(size, self.patch * self.merge, least, most)

    def inputs(
        self, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> Mapping[str, Sequence[int]]:
        """See `offsets`."""
        return offsets(len(token_ids), items)


class TimedProcessor(PatchProcessor):
    """A video is like an image for every two frames, each of them beside its time as text. Limits
    of pixels are those of all frames together."""

    def timed(
        self,
        value: Video,
        options: Mapping[str, Any],
        frame: Callable[[Sequence[float]], tuple[Sequence[int], int, Sequence[int]]],
    ) -> Processed:
        """Process a video. frame: of the times of some frames, the tokens before their rows, the
        token of a row, and those after them."""
        patches, (count, height, width) = self.patches(value, options)
        shape = 1, height // self.merge, width // self.merge
        num_rows = shape[1] * shape[2]
        known = [*value.seconds, *[value.seconds[-1]] * (-len(value.seconds) % self.frames)]
        token_ids: list[int] = []
        grids: list[tuple[int, tuple[int, int, int]]] = []
        for start in range(0, len(known), self.frames):
            before, token, after = frame(known[start : start + self.frames])
            token_ids += before
            grids.append((len(token_ids), shape))
            token_ids += [*[token] * num_rows, *after]
        is_row = np.zeros(len(token_ids), bool)
        for first, _ in grids:
            is_row[first : first + num_rows] = True
        grid = np.array([count, height, width], np.int64)
        arrays = {"pixel_values_videos": patches, "video_grid_thw": grid}
        return Processed(token_ids, arrays, is_row, {"grids": grids})

    def fitted(self, count: int, size: Size, limits: Mapping[str, int]) -> Size:
        factor = self.patch * self.merge
        scale = max(1.0, factor / size[0], factor / size[1])
        larger = (int(size[0] * scale), int(size[1] * scale)) if scale > 1 else size
        least, most = (limits[name] for name in LIMITS.values())
        frames = max(count, self.frames)
        return fitted(
            larger, factor, least, most, frames, round(frames / self.frames) * self.frames
        )


def limited(options: Mapping[str, Any], size: Mapping[str, int]) -> dict[str, Any]:
    """Return the options with `size` instead of min_pixels and max_pixels. size: that of the
    checkpoint. Raises RequestError for wrong numbers."""
    others = {name: value for name, value in options.items() if name not in LIMITS}
    if len(others) == len(options):
        return others
    given = others.get("size", {})
    if not isinstance(given, Mapping):
        raise RequestError(
            f"mm_processor_kwargs has size={given!r}; expected shortest_edge and longest_edge, "
            "or min_pixels and max_pixels instead of it",
            parameter="mm_processor_kwargs",
        )
    limits = {name: size[name] for name in LIMITS.values()} | dict(given)
    limits |= {LIMITS[name]: options[name] for name in LIMITS if name in options}
    least, most = (limits.get(name) for name in LIMITS.values())
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        raise RequestError(
            f"mm_processor_kwargs gives min_pixels={least!r} and max_pixels={most!r}; expected "
            "whole numbers from 1 on, the first one not above the second one",
            parameter="mm_processor_kwargs",
        )
    return {**others, "size": limits}
