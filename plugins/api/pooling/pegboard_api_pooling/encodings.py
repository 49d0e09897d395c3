"""The forms of vectors in an answer: numbers, base64, or bytes.

The server has no torch, so this rounds float32 to the smaller types itself, to the nearest value
and ties to even, as torch does.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Encoding = Literal["float", "base64", "bytes", "bytes_only"]
DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]

ITEM_BYTES: Mapping[DType, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""The size of a number."""


def base64_of(vector: bytes, dtype: DType, endianness: Endianness) -> str:
    """Return float32 values in another type and order of bytes, as base64."""
    return base64.b64encode(packed(vector, dtype, endianness)).decode()


def metadata(
    name: str,
    created: int,
    model: str,
    shapes: Sequence[Sequence[int]],
    usage: Mapping[str, object],
    dtype: DType,
    endianness: Endianness,
) -> str:
    """Return what the header `metadata` says of an answer of bytes, as vLLM does: where the bytes
    of each vector start and end, and what they are. It is JSON in ASCII."""
    items: list[dict[str, Any]] = []
    start = 0
    for index, shape in enumerate(shapes):
        end = start + math.prod(shape) * ITEM_BYTES[dtype]
        items.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": endianness,
                "start": start,
                "end": end,
                "shape": list(shape),
            }
        )
        start = end
    body = {"id": name, "created": created, "model": model, "data": items, "usage": usage}
    return json.dumps(body, separators=(",", ":"))


def packed(vector: bytes, dtype: DType, endianness: Endianness) -> bytes:
    """Return the bytes of float32 values in another type and order of bytes."""
    swaps = endianness not in ("native", sys.byteorder)
    if dtype == "float32":
        if not swaps:
            return vector
        numbers = array("f", vector)
        numbers.byteswap()
        return numbers.tobytes()
    import numpy as np

    narrow = narrowed(np.frombuffer(vector, np.float32), dtype)
    return (narrow.byteswap() if swaps else narrow).tobytes()


def narrowed(values: NDArray[np.float32], dtype: DType) -> NDArray[Any]:
    """Return the bits of float32 values in a smaller type, as unsigned integers. Values that are
    too large become infinity, or ±448 in fp8_e4m3, which has no infinity."""
    import numpy as np

    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    sign = bits >> 31
    size = bits & np.uint32(0x7FFFFFFF)
    if dtype == "bfloat16":
        rounded = _shifted(size, 16)
        rounded[size > INFINITY] = 0x7FC0
        return (sign << 15 | rounded).astype(np.uint16)
    if dtype == "fp8_e4m3":
        narrow = np.minimum(_small(size, fraction_bits=3, bias=7), 0x7E)
    else:
        narrow = np.minimum(_small(size, fraction_bits=2, bias=15), 0x7C)
    narrow[size > INFINITY] = 0x7F
    return (sign << 7 | narrow).astype(np.uint8)


INFINITY = 0x7F800000
"""The bits of infinity in float32. Larger ones are NaN."""


def _small(size: NDArray[np.uint32], *, fraction_bits: int, bias: int) -> NDArray[np.uint32]:
    """Return the bits of positive numbers in a type with few bits of fraction and of exponent, as
    if its exponent had no end. size: the bits in float32."""
    import numpy as np

    lost = 23 - fraction_bits
    lowest = np.uint32(
        (128 - bias) << 23
    )  # the smallest number that the type does not store as a subnormal
    # one step of the subnormals, times 2**23: a sum with it has no bits below a step
    grain = np.uint32((128 - bias + lost) << 23)
    low = np.minimum(size, lowest).view(np.float32)
    subnormal = (low + grain.view(np.float32)).view(np.uint32) - grain
    normal = _shifted(np.maximum(size, lowest) - np.uint32((127 - bias) << 23), lost)
    return np.where(size < lowest, subnormal, normal)


def _shifted(bits: NDArray[np.uint32], lost: int) -> NDArray[np.uint32]:
    """Return the bits without the last ones, rounded to nearest, and ties to even."""
    import numpy as np

    half = np.uint32((1 << (lost - 1)) - 1)
    rounded: NDArray[np.uint32] = (bits + half + ((bits >> lost) & np.uint32(1))) >> np.uint32(lost)
    return rounded
