"""Multiplies a small matrix with a compiled library, and exits with an error if the result is
wrong: `python -m pegboard_kernel_cpu.trial PATH`. build.py runs this once for every library that it
compiles."""

from __future__ import annotations

import random
import sys
from ctypes import addressof, byref, c_float, c_int8, c_uint8, c_uint16

from pegboard.errors import ConfigError
from pegboard_kernel_cpu.build import NOT_LOADED, WRONG
from pegboard_kernel_cpu.library import Library, NotLoadable
from pegboard_kernel_cpu.structures import WORDS_GAP, Format, LinearBlocks, Quantize, Quantized

TOKENS = 37
ROWS = 16
BLOCKS = 3
BLOCK = 32
COLUMNS = BLOCKS * BLOCK


def try_linear(library: Library, bits: int) -> None:
    """Multiply blocks of `bits` bits with random whole numbers and compare the results with plain
    sums. Raises AssertionError if they differ."""
    rng = random.Random(bits)
    zero = 8 if bits == 4 else 0
    codes = (c_uint8 * (ROWS * COLUMNS))(
        *(rng.randrange(16 if bits == 4 else 128) for _ in range(ROWS * COLUMNS))
    )
    scales = (c_float * (ROWS * BLOCKS))(*(rng.choice((0.25, 0.5)) for _ in range(ROWS * BLOCKS)))
    # whole numbers up to 127 are exact as bytes and as bfloat16 numbers
    x = (c_float * (TOKENS * COLUMNS))(*(rng.randint(-127, 127) for _ in range(TOKENS * COLUMNS)))
    for first in range(0, len(x), BLOCK):
        x[first] = 127
    form = Format(bits, BLOCK, 1, 0, zero, 4 * ROWS + BLOCK * bits * ROWS // 8, 0)
    packed = (c_uint8 * (BLOCKS * form.record_bytes))()
    library.pack_blocks(codes, scales, None, None, 0, ROWS, COLUMNS, byref(form), packed)
    x_codes = (c_int8 * len(x))()
    x_scales = (c_float * (TOKENS * BLOCKS))()
    x_sums = (c_float * (TOKENS * BLOCKS * 2))()
    x_words = (c_uint16 * (TOKENS * (COLUMNS + WORDS_GAP)))()
    to = Quantized(*map(addressof, (x_codes, x_scales, x_sums, x_words)))
    out = (c_float * (TOKENS * ROWS))()
    sizes = (addressof(out), ROWS, addressof(packed), None, ROWS, COLUMNS, form)
    linear = LinearBlocks(to.codes, to.scales, to.sums, to.words, *sizes)
    library.team_run(
        [("quantize", Quantize(addressof(x), COLUMNS, to, COLUMNS)), ("linear_blocks", linear)],
        TOKENS,
    )
    for token in range(TOKENS):
        for row in range(ROWS):
            dots = [
                sum(
                    x[token * COLUMNS + c] * (codes[row * COLUMNS + c] - zero)
                    for c in range(b * BLOCK, b * BLOCK + BLOCK)
                )
                for b in range(BLOCKS)
            ]
            expected = sum(dots[b] * scales[row * BLOCKS + b] for b in range(BLOCKS))
            actual = out[token * ROWS + row]
            assert abs(actual - expected) < 1e-4 * BLOCK * 127 * 2**bits, (
                f"a {bits}-bit product is {actual} instead of {expected}"
            )


if __name__ == "__main__":
    try:
        tried = Library("trial", sys.argv[1], num_threads=1)
        for some_bits in (4, 8):
            try_linear(tried, some_bits)
        tried.stop()
    except (AssertionError, ConfigError) as error:
        print(error)
        sys.exit(NOT_LOADED if isinstance(error, NotLoadable) else WRONG)
