"""How the processors of this package read the checkpoint's files, and what they do with pixels.
This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pegboard.errors import ModelError, RequestError
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_models.processing import FILES, folder_of, json_object

if TYPE_CHECKING:
    from PIL.Image import Image

MARK = "<image>"
"""What stands for an image, if no file says it."""
HALF = (0.5, 0.5, 0.5)


def file_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the checkpoint's files say of images, without values that are null. Raises
    ModelError for files that are wrong."""
    paths = [folder_of(checkpoint) / name for name in FILES]
    values: dict[str, Any] = {}
    for path in paths:
        given = json_object(path) if path.is_file() else {}
        values |= {name: value for name, value in given.items() if value is not None}
    return values


def mark_of(values: Mapping[str, Any]) -> str:
    """Return the text of the token that stands for an image. Raises ModelError."""
    mark = values.get("image_token", MARK)
    if not isinstance(mark, str) or not mark:
        raise wrong("image_token", mark, "a text")
    return mark


def wrong(name: str, value: object, expected: str) -> ModelError:
    """Return the error of a value of the files."""
    return ModelError(f"the checkpoint's {FILES[1]} has {name}={value!r}; expected {expected}")


def check_same(values: Mapping[str, Any], expected: Mapping[str, int]) -> None:
    """Raise ModelError if the files say something else than the config. expected: what the config
    says."""
    for name, value in expected.items():
        if values.get(name, value) != value:
            raise wrong(name, values[name], f"{value}, as in its config.json")


@dataclass(frozen=True)
class Colors:
    """mean, deviation: of red, green and blue, from 0 to 1. normalizes: whether they are used."""

    mean: Sequence[float]
    deviation: Sequence[float]
    normalizes: bool

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Colors:
        """Read the files. Raises ModelError."""
        mean = values.get("image_mean", HALF)
        deviation = values.get("image_std", HALF)
        normalizes = values.get("normalize", True)
        if not is_triple(mean) or not all(0 <= value <= 1 for value in mean):
            raise wrong("image_mean", mean, "three numbers from 0 to 1")
        if not is_triple(deviation) or min(deviation) <= 0:
            raise wrong("image_std", deviation, "three positive numbers")
        if type(normalizes) is not bool:
            raise wrong("normalize", normalizes, "true or false")
        return cls(tuple(mean), tuple(deviation), normalizes)

    def pixels(self, images: Sequence[Image]) -> np.ndarray:
        """Return images of the same size as float32 [images, 3, height, width]."""
        values = np.stack([np.asarray(image) for image in images]).astype(np.float32)
        values /= np.float32(255)
        if self.normalizes:
            values -= np.array(self.mean, np.float32)
            values /= np.array(self.deviation, np.float32)
        return np.ascontiguousarray(values.transpose(0, 3, 1, 2))

    def framed(self, image: Image, width: int, height: int) -> Image:
        """Return the whole image in this size, with the mean color where it does not reach."""
        from PIL import ImageOps

        color = tuple(int(value * 255) for value in self.mean)
        return ImageOps.pad(image, (width, height), color=color)


def is_triple(values: Any) -> bool:
    """Return whether these are three numbers."""
    return (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(type(value) in (int, float) for value in values)
    )


def tiles_of(image: Image, side: int) -> list[Image]:
    """Cut an image into squares, line by line."""
    corners = [
        (left, top) for top in range(0, image.height, side) for left in range(0, image.width, side)
    ]
    return [image.crop((left, top, left + side, top + side)) for left, top in corners]


@contextmanager
def blamed_on(image: Image) -> Iterator[None]:
    """Raise errors of Pillow, such as those of very thin images, as RequestError."""
    try:
        yield
    except (ValueError, ZeroDivisionError) as error:
        raise RequestError(
            f"an image with {image.width} × {image.height} pixels could not be processed: {error}. "
            "Crop it or add a border"
        ) from error


def changed(values: Mapping[str, Any], options: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the values with those of the options. Raises RequestError for unknown names."""
    if unknown := sorted(options.keys() - values.keys()):
        raise RequestError(
            f"mm_processor_kwargs has {', '.join(unknown)}; {model} takes "
            f"{', '.join(sorted(values))}",
            parameter="mm_processor_kwargs",
        )
    return {**values, **options}
