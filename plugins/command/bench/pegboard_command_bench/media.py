"""Requests with images of random pixels, or with recordings."""

from __future__ import annotations

import argparse
import ast
import base64
import io
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.errors import PegboardError, UsageError

if TYPE_CHECKING:
    import numpy as np

BUCKETS = "{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}"


def add_media_flags(group: Any) -> None:
    """Add the flags of random-mm."""
    group.add_argument(
        "--random-mm-base-items-per-request",
        type="number",
        default=1,
        metavar="N",
        help="random-mm: images per prompt (default %(default)s)",
    )
    group.add_argument(
        "--random-mm-num-mm-items-range-ratio",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="random-mm: numbers of images vary by ± this fraction",
    )
    group.add_argument(
        "--random-mm-bucket-config",
        type=buckets,
        default=buckets(BUCKETS),
        metavar="DICT",
        help=f"random-mm: (height, width, 1) → how likely images have that size ({BUCKETS})",
    )


def buckets(text: str) -> Mapping[tuple[int, int, int], float]:
    """Read a mapping as Python writes it. Raises ArgumentTypeError."""
    try:
        given = ast.literal_eval(text)
        sizes = {tuple(map(int, size)): float(share) for size, share in given.items()}
        is_right = bool(sizes) and all(
            len(size) == 3 and min(size) >= 1 and share >= 0 for size, share in sizes.items()
        )
    except (ValueError, SyntaxError, TypeError, AttributeError):
        is_right = False
    if not is_right or not sum(sizes.values()):
        raise argparse.ArgumentTypeError(f"expected a mapping such as {BUCKETS}, got {text[:80]!r}")
    if any(frames > 1 and share for (_, _, frames), share in sizes.items()):
        raise argparse.ArgumentTypeError("only images are made: the third number must be 1")
    return sizes  # type: ignore[return-value]


def random_images(
    num_requests: int, arguments: Any, rng: np.random.Generator
) -> list[tuple[dict[str, Any], ...]]:
    """Return the images of each request, as parts of messages."""
    base = arguments.random_mm_base_items_per_request
    ratio = arguments.random_mm_num_mm_items_range_ratio
    if not 0 <= ratio <= 1:
        raise UsageError(f"--random-mm-num-mm-items-range-ratio must be in [0, 1], got {ratio}")
    sizes = arguments.random_mm_bucket_config
    shares = [share / sum(sizes.values()) for share in sizes.values()]
    counts = rng.integers(int(base * (1 - ratio)), int(base * (1 + ratio)) + 1, num_requests)
    choices = [rng.choice(len(shares), count, p=shares) for count in counts]
    return [tuple(image_part([*sizes][index], rng) for index in each) for each in choices]


def image_part(size: tuple[int, int, int], rng: np.random.Generator) -> dict[str, Any]:
    """Return an image as a part of a message."""
    try:
        from PIL import Image
    except ImportError as error:
        raise PegboardError(
            "random-mm needs Pillow; install pegboard-command-bench[images]"
        ) from error
    height, width, _ = size
    pixels = rng.integers(0, 256, (height, width, 3)).astype("uint8")
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}


def form(fields: Mapping[str, Any], path: Path) -> tuple[str, bytes]:
    """Return the content type and the bytes of a form with a recording."""
    boundary = secrets.token_hex(16)
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{path.name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    )
    end = f"\r\n--{boundary}--\r\n"
    body = "".join([*parts, head]).encode() + path.read_bytes() + end.encode()
    return f"multipart/form-data; boundary={boundary}", body
