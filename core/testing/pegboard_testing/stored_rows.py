"""Random rows in every form of `Blocks` and `FloatCodes`, for tests of kernels that hold and
multiply them."""

from __future__ import annotations

import math

import torch

from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import (
    E2M1,
    FloatCodes,
    ScaleCodes,
    float8_values,
    minifloat_values,
)

HALF = torch.float16
FLOAT = torch.float32
BYTES = torch.int8
PAIRS = torch.uint8
FORMATS = [
    (bits, 32, dtype, shift)
    for bits in (4, 8)
    for dtype in (HALF, FLOAT)
    for shift in ("", "minimum", "zeros", "both")
]
FORMATS += [
    (4, 64, HALF, "zeros"),
    (4, 192, HALF, ""),
    (4, 96, FLOAT, "minimum"),
    (8, 64, HALF, "minimum"),
    (8, 192, FLOAT, "zeros"),
]
FORMATS += [
    (1, 64, HALF, "zeros"),
    (2, 32, HALF, "minimum"),
    (2, 64, FLOAT, ""),
    (3, 32, HALF, "zeros"),
    (3, 192, FLOAT, "minimum"),
]
FORMATS += [
    (5, 32, FLOAT, ""),
    (5, 32, HALF, "minimum"),
    (5, 96, HALF, "zeros"),
    (6, 32, FLOAT, "both"),
    (6, 192, HALF, "zeros"),
]
FORMATS += [(7, 32, HALF, ""), (7, 64, FLOAT, "zeros")]
FORMATS += [
    (2, 16, FLOAT, "minimum"),
    (3, 16, HALF, ""),
    (4, 16, HALF, "zeros"),
    (5, 16, FLOAT, "zeros"),
    (6, 16, FLOAT, ""),
]
FORMATS += [(8, 16, FLOAT, ""), (8, 16, HALF, "both")]
FORMATS += [
    (4, 32, BYTES, "minimum"),
    (5, 32, BYTES, "minimum"),
    (6, 16, BYTES, ""),
    (3, 16, BYTES, ""),
    (2, 16, PAIRS, "minimum"),
]
FORMATS += [
    (4, 96, BYTES, "zeros"),
    (8, 32, BYTES, "both"),
    (8, 16, PAIRS, "minimum"),
    (3, 32, PAIRS, "minimum"),
]
"""Bits, columns of a block, type of the scales, and what is added: nothing but one zero point,
minimums, both, or zero points. Integer scales have a second level."""
COLUMNS = 192
"""A multiple of every block size."""

VALUES = {
    name: float8_values(getattr(torch, f"float8_{name}"))
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
}
VALUES |= {"e2m1": E2M1, "e3m2": minifloat_values(3, 2), "e2m3": minifloat_values(2, 3)}
VALUES |= {"nf4": torch.linspace(-1, 1, 16) ** 3 + 0.01, "table": torch.linspace(-3, 2, 256) ** 3}
CODED = torch.uint8
"""Scales that are codes with a second level."""
SCALES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e8m0fnu,
    CODED,
]
BLOCKS = [(1, 16), (1, 32), (1, 64), (128, 128), (5, 48), (1, 10_000), (10_000, 10_000)]


def blocks_of(form: tuple, rows: int, columns: int, seed: int, level: int = 96) -> Blocks:
    """Return random rows in a format. The codes use the whole range. level: columns that share a
    scale of the second level, if there is one."""
    bits, block_size, dtype, shift = form
    generator = torch.Generator().manual_seed(seed)
    low, high, kind = (-128, 128, torch.int8) if bits == 8 else (0, 2**bits, torch.uint8)
    codes = torch.randint(low, high, (rows, columns), generator=generator).to(kind)
    shape = (rows, columns // block_size)
    scale = (torch.rand(shape, generator=generator) * 0.02).to(dtype)
    minimum = (
        (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        if shift in ("minimum", "both")
        else None
    )
    zeros = torch.randint(low, min(high, 127) + 1, shape, generator=generator).to(torch.int8)
    zero = (
        zeros
        if shift == "zeros"
        else 0
        if shift == "minimum" or (bits == 8 and not shift)
        else (low + high) // 2 + 1
    )
    if dtype in (HALF, FLOAT):
        return Blocks(bits, block_size, codes, scale, minimum, zero)
    outer = (
        torch.rand(
            (1 if minimum is None else 2, rows, columns // level), generator=generator
        ).half()
        * 0.0005
    )
    scale = torch.randint(
        0 if dtype == PAIRS else -128, 256 if dtype == PAIRS else 128, shape, generator=generator
    ).to(dtype)
    minimum = (
        None
        if minimum is None or dtype == PAIRS
        else torch.randint(-128, 128, shape, generator=generator).to(BYTES)
    )
    return Blocks(bits, block_size, codes, scale, minimum, zero, outer=outer)


def codes_of(
    values: str, scale: torch.dtype, block: tuple[int, int], rows: int, columns: int, seed: int
) -> FloatCodes:
    """Return random rows. All finite codes occur, if there are enough places."""
    generator = torch.Generator().manual_seed(seed)
    finite = VALUES[values].isfinite().nonzero().flatten().to(torch.uint8)
    places = torch.randperm(rows * columns, generator=generator) % len(finite)
    shape = math.ceil(rows / block[0]), math.ceil(columns / block[1])
    positive = torch.rand(shape, generator=generator) * 0.1 + 0.001
    scales = coded(shape, generator) if scale is CODED else positive.to(scale)
    return FloatCodes(finite[places].view(rows, columns), VALUES[values], scales, block, 0.7)


def coded(shape: tuple[int, int], generator: torch.Generator) -> ScaleCodes:
    """Return scales of two levels. As many blocks as possible, up to 8, share a float of the second
    level. Scales with negative parts have no offset: sums near zero would differ, because kernels
    round them once where the reference rounds twice."""
    rows, blocks = shape
    share = max(size for size in range(1, 9) if blocks % size == 0)
    offset = 0.02 if share % 2 else 0.0
    table = torch.rand(17 * share, generator=generator) - (0.0 if offset else 0.3)
    if rows % 2:
        table = torch.arange(64) * 0.5 - (0.0 if offset else 16.0)
    codes = torch.randint(0, len(table), shape, generator=generator, dtype=torch.uint8)
    return ScaleCodes(
        codes, table, torch.rand(rows, blocks // share, generator=generator) * 0.1, offset
    )
