"""Images: from a file or an object to an RGB image of Pillow."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from pegboard_media.limits import MAX_PIXELS, Unusable

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of the formats that are read. Others, such as EPS, start programs."""
Color = tuple[int, int, int]


def decode_image(content: bytes, background: Color) -> Image:
    """Return the first picture of a file as an RGB image. Transparent parts show `background`. The
    picture is not turned as its EXIF data say. The size is checked before the pixels are read."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            check_size(image)
            image.load()
            return as_rgb(image, background)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Unusable(f"has more than {MAX_PIXELS} pixels") from error
    except UnidentifiedImageError as error:
        raise Unusable(f"is damaged, or not one of {', '.join(FORMATS)}") from error
    except Unusable:
        raise
    except Exception as error:
        raise Unusable("is damaged") from error


def check_image(value: Any, background: Color) -> Image:
    """Return an image of Pillow, or a numpy array uint8 [height, width, 3], as an RGB image."""
    import numpy as np
    from PIL import Image

    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3 or not value.size:
            raise Unusable(
                f"is an array {value.dtype} {list(value.shape)}; expected uint8 [height, width, 3]"
            )
        value = Image.fromarray(np.ascontiguousarray(value))
    if not isinstance(value, Image.Image):
        raise Unusable(
            f"is a {type(value).__name__}; expected a URL, the bytes of a file, an image of "
            "Pillow or a numpy array"
        )
    check_size(value)
    try:
        return as_rgb(value, background)
    except Exception as error:
        raise Unusable("cannot be made an RGB image") from error


def check_size(image: Image) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Unusable(f"has {width} x {height} pixels; at most {MAX_PIXELS} are read")
    if width < 1 or height < 1:
        raise Unusable("has no pixels")


def as_rgb(image: Image, background: Color) -> Image:
    """Return an image in RGB, with `background` where it is transparent."""
    from PIL import Image

    if image.mode == "RGB":
        return image.copy()
    if not image.has_transparency_data:
        return image.convert("RGB")
    picture = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(picture, mask=picture.getchannel("A"))
    return canvas
